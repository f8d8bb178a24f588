"""All fuzz targets, in the order in which they are run."""

from __future__ import annotations

from tests.fuzz import conversations, decoders, events, files, http_requests, mathematics, pages
from tests.fuzz.harness import Target

TARGETS: tuple[Target, ...] = (
    decoders.TARGET,
    events.TARGET,
    files.TARGET,
    conversations.TARGET,
    http_requests.TARGET,
    mathematics.TARGET,
    pages.TARGET,
)
