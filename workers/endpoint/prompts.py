"""The own prompts of agents, in the broker: kept until no worker can generate their groups any more."""

from __future__ import annotations

import msgspec

from transport.broker import keys
from transport.broker.base import Broker
from transport.contracts.messages import OwnPrompt
from transport.contracts.types import GroupId

KEPT_S = 7 * 24 * 3600.0
"""Longer than a group waits for anything; a finished group needs it no more."""


class BrokerPrompts:
    """A PromptStore (engine.py)."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def load(self, group_id: GroupId) -> OwnPrompt | None:
        raw = await self._broker.get_meta(keys.own_prompt(group_id))
        return msgspec.msgpack.decode(raw, type=OwnPrompt) if raw is not None else None

    async def keep(self, group_id: GroupId, prompt: OwnPrompt) -> None:
        await self._broker.put_meta(keys.own_prompt(group_id), msgspec.msgpack.encode(prompt), ttl_s=KEPT_S)
