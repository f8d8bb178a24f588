"""The client for programs that are not ours: ``from workers.client import Client``. See docs/client.md."""

from workers.client.batch import ExperienceBatch
from workers.client.client import Client
from workers.client.service import ServiceClient

__all__ = ["Client", "ExperienceBatch", "ServiceClient"]
