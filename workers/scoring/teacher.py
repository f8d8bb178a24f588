"""A teacher behind a server: its logprobs of what the policy sampled, asked of SGLang or vLLM.

Owns: the connection, which kind of server it is, that its token ids are the policy's words. Never: what the logprobs
are for. Invariant: nothing is asked of it before it encoded a text as the policy's tokenizer does, and each answer
names the tokens that it is of; a server that is away for OUTAGE_S is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from transport.contracts.settings import Settings
from transport.contracts.types import RowId
from workers.errors import ModelError, RewardError, ServerAnswerError, ServerUnavailableError
from workers.generation.server.client import ServerClient, ServerKind, ServerSettings
from workers.generation.server.engine import KINDS
from workers.models import load_tokenizer
from workers.trainer.learner import PromptGroup

log = structlog.get_logger(__name__)

OUTAGE_S = 60.0
"""As long as a broker is waited for: a server of a large model takes longer to start, and is then a failure."""
RETRY_S = 1.0
PROBED_TOKENS = 256
PROBE = "State the answer: 12 + 7 = 19.\n\tdef f(x): return x**2  # äöü €½ Привет, 你好 🙂\n"
"""Digits, spaces, code and other scripts: where vocabularies of one size differ first."""


def teacher_of(settings: Settings, allowed: str, key: str, model_dir: Path) -> Teacher | None:
    """The run's, None where it has none behind a server.

    allowed: address from the worker's own command line; the run's setting alone gets no tokens and no key.
    Raises ModelError: it is another.
    """
    wanted = settings.algorithm.teacher_url
    if wanted != allowed and settings.has_reference and wanted:
        raise ModelError(
            f"algorithm.teacher_url = {wanted!r} is not what this worker may ask ({allowed or 'none'}): start it with "
            f"--teacher-url {wanted}"
        )
    return Teacher(wanted, key, settings, model_dir) if wanted else None


class Teacher:
    """model_dir: of the policy, whose tokenizer the server must have. ``start`` comes first, ``close`` last."""

    def __init__(self, url: str, key: str, settings: Settings, model_dir: Path) -> None:
        self._url = url
        self._key = key
        self._settings = settings
        self._model_dir = model_dir
        self._client: ServerClient | None = None

    async def start(self) -> None:
        """Raises ModelError: it is away, none of the known servers, or its token ids are other words."""
        probe = await asyncio.to_thread(self._probe)
        try:
            self._client = client = await self._find()
            theirs = [token for token, _ in await client.prompt_logprobs(probe[0], 0)]
        except ServerUnavailableError as error:
            raise ModelError(f"algorithm.teacher_url: {error}") from error
        except ServerAnswerError as error:
            raise ModelError(
                f"algorithm.teacher_url: it does not encode a text, so its vocabulary is not known: {error} (a server "
                "that was started with --skip-tokenizer-init cannot)"
            ) from error
        if theirs[max(0, len(theirs) - len(probe[1])) :] != probe[1]:  # it may put a token before a text
            raise ModelError(
                f"algorithm.teacher_url = {self._url!r} has another vocabulary than model.path = "
                f"{self._settings.model.path!r}: it encodes the same text otherwise, so its logprobs are of other "
                "words; serve a teacher of the same family of models"
            )

    def _probe(self) -> tuple[str, list[int]]:
        """A text that touches all of the vocabulary, and the ids that it has. Raises ModelError."""
        tokenizer = load_tokenizer(self._model_dir)
        ordinary = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
        spread = ordinary[:: max(1, len(ordinary) // PROBED_TOKENS)]
        words = (tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in spread)
        text = PROBE + " ".join(word for word in words if "\ufffd" not in word)  # parts of a character
        return text, tokenizer(text, add_special_tokens=False)["input_ids"]

    async def _find(self) -> ServerClient:
        """A client of its kind: the first that has an answer to a prompt of one token. Raises what the last raises."""
        failure: ServerAnswerError | None = None
        for kind in KINDS.values():
            client = await self._open(kind)
            try:
                await self._patiently(client, [0, 0], 1)
            except ServerAnswerError as error:
                failure = error
                await client.close()
            except BaseException:
                await client.close()
                raise
            else:
                log.info("the teacher is a server", url=self._url, kind=kind.name)
                return client
        raise ModelError(
            f"algorithm.teacher_url: {self._url} gives no logprobs of a prompt, as servers of "
            f"{' and '.join(kind.name for kind in KINDS.values())} do: {failure}"
        )

    async def _open(self, kind: ServerKind) -> ServerClient:
        request_s = self._settings.pipeline.rollout_timeout_s
        made_of = ServerSettings(directory=self._model_dir, log=Path("/dev/null"), request_s=request_s)
        client = kind.client(self._url, made_of, self._key)
        await client.open()
        return client

    async def _patiently(self, client: ServerClient, ids: Sequence[int], start: int) -> list[tuple[int, float | None]]:
        """Raises ServerUnavailableError after OUTAGE_S; ServerAnswerError, at once where it would say so again."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + OUTAGE_S
        while True:
            try:
                return await client.prompt_logprobs(ids, start)
            except (ServerUnavailableError, ServerAnswerError) as error:
                final = isinstance(error, ServerAnswerError) and error.status < 500
                if final or loop.time() >= until_s:
                    raise
                log.warning("the teacher is away", reason=str(error))
                await asyncio.sleep(RETRY_S)

    async def logprobs(self, row_id: RowId, group: PromptGroup) -> NDArray[np.float32]:
        """[R] of the response of ``row_id``, the one sample of ``group``. Raises RewardError."""
        if self._client is None:
            raise ValueError("the teacher was not started")
        (sample,) = group.samples
        prompt = group.prompt_ids.tolist()
        found: list[tuple[int, float | None]] = []
        try:
            for branch in sample.branches:
                ids = [*prompt, *sample.response_ids[branch].tolist()]
                found += await self._patiently(self._client, ids, len(prompt))
        except (ServerUnavailableError, ServerAnswerError) as error:
            raise RewardError(f"no logprobs of {row_id} from the teacher: {error}") from error
        values = np.array([np.nan if logprob is None else logprob for _, logprob in found], np.float32)
        if len(values) != len(sample.response_ids) or not np.isfinite(values).all():
            raise RewardError(f"the teacher's logprobs of {row_id} are not a number for each token")
        return values

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
