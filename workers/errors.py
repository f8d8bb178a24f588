"""Errors of the workers, below the data plane's tree.

FatalError (transport.errors)
└── ModelError   a model directory is missing, broken or of an unsupported kind: the message says what to do
"""

from __future__ import annotations

from transport.errors import FatalError


class ModelError(FatalError):
    """A model cannot be found, read or converted."""
