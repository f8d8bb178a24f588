"""All fuzz targets, in the order in which they are run."""

from __future__ import annotations

from tests.fuzz import decoders, events, files
from tests.fuzz.harness import Target

TARGETS: tuple[Target, ...] = (decoders.TARGET, events.TARGET, files.TARGET)
