"""One request of a service run, as the core sees it.

Owns: the noun and its own arithmetic. Never: decisions (``service.py``).
"""

from __future__ import annotations

import msgspec

from transport.contracts.types import GroupId, RowId


class Request(msgspec.Struct, kw_only=True):
    """One request that is not all taken.

    waiting: groups that the window still holds back, next one last.  started: samples of groups that it let pass.
    num_samples: of all groups.  results: rows in the order in which they ended; the place is the sample's number.
    failed: why, for those of ``results`` that have no row.  taken: results that the reader has.
    untaken: results that the reader lacks, of each group.  remade: results whose row went missing and is made again.
    active_s: when its reader or its last sample last did something.
    """

    num_samples: int
    waiting: list[GroupId] = msgspec.field(default_factory=list[GroupId])
    started: int = 0
    results: list[RowId] = msgspec.field(default_factory=list[RowId])
    failed: dict[RowId, str] = msgspec.field(default_factory=dict[RowId, str])
    taken: int = 0
    untaken: dict[GroupId, int] = msgspec.field(default_factory=dict[GroupId, int])
    remade: dict[RowId, None] = msgspec.field(default_factory=dict[RowId, None])
    active_s: float = 0.0

    def counts(self) -> dict[str, int]:
        """Its samples: all, let pass by the window, ended, of those failed, and what the reader has."""
        return {
            "samples": self.num_samples,
            "started": self.started,
            "ended": len(self.results),
            "failed": len(self.failed),
            "taken": self.taken,
        }

    @property
    def whole(self) -> bool:
        """Whether every sample has ended."""
        return len(self.results) == self.num_samples
