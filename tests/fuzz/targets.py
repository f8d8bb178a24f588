"""All fuzz targets, in the order in which they are run."""

from __future__ import annotations

from tests.fuzz import conversations, decoders, events, files, mathematics, pages, requests
from tests.fuzz.harness import Target

TARGETS: tuple[Target, ...] = (
    decoders.TARGET,
    events.TARGET,
    files.TARGET,
    conversations.TARGET,
    requests.TARGET,
    mathematics.TARGET,
    pages.TARGET,
)
