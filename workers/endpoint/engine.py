"""An engine around an engine: a request for samples becomes sessions that foreign agents lease; a completion is a whole
conversation.

    submit ─► seat ─► lease ─► chat, complete ─► inner engine: a turn ─► answer ─► ... ─► seal ─► results
                                    ▲                                      │
                                    └───── the agent, wherever it runs ◄───┘  (meanwhile another sample has the slot)

A row is the longest branch of what its agent asked, or all of them (conversation.py): ids as they were sampled, what
was said between as ids that were encoded once and are not trained, each token with the weights it was sampled under.

Owns: turns under way. Never: the broker; who may ask (http.py); when a sample is given up (the core). Invariant: every
submitted sample comes out exactly once; a sample whose agent failed has no reward at all.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import structlog

from transport.contracts.messages import OwnPrompt
from transport.contracts.settings import EndpointSettings
from transport.contracts.types import FinishReason, GroupId, SamplingParams, SegmentKind, WeightIdentity
from transport.errors import first_error
from transport.process.clock import Clock
from workers.endpoint.conversation import Conversation, Exchange
from workers.endpoint.messages import (
    TOOL_CALL,
    Answer,
    ChatRequest,
    CompletionRequest,
    Request,
    digest_behind,
    digests,
    find_tool_calls,
    refused,
)
from workers.endpoint.sessions import SESSION_ENDED, End, Session, Sessions
from workers.endpoint.stream import TurnStream, TurnText
from workers.environments.encoder import ObservationEncoder
from workers.environments.transcript import LATER_TURN_PRIORITY, turn_seed
from workers.errors import EndpointRefusedError, ModelError
from workers.generation.engine import (
    ABORTED_UNSTARTED,
    Completion,
    EngineInfo,
    EngineLoad,
    GenerationEngine,
    GenerationRequest,
    Progress,
    Result,
    ResultQueue,
    SampleKey,
    StopStrings,
)

if TYPE_CHECKING:
    import torch

log = structlog.get_logger(__name__)

LAPSE_S = 1.0
"""Between two looks at sessions that may have lost their agent; limits are minutes."""
MAX_TURNS_AT_ONCE = 8
"""Of one session: an agent that forks may ask in parallel, and none may take all slots."""
MAX_PLAIN = 256
"""Requests outside of sessions that are generated or wait, before more are answered with 429."""
LOOP_CHARACTERS = 20_000
"""Longer texts are encoded in a thread: 5 ms of the loop otherwise."""
COMPLETION_TOKENS = 16
"""Of /v1/completions without max_tokens, as OpenAI has it."""


class Listener(Protocol):
    async def start(self) -> None: ...
    async def close(self) -> None: ...


class PromptStore(Protocol):
    """Where the own prompts of agents outlive a worker: a group that is generated again has the same one."""

    async def load(self, group_id: GroupId) -> OwnPrompt | None: ...
    async def keep(self, group_id: GroupId, prompt: OwnPrompt) -> None: ...


class SessionEngine:
    """A GenerationEngine (engine.py of generation). inner: generates the turns.

    model: the name that requests must give, "*" for any.  sampling: of requests outside of sessions.  group_size: of
    the run.  prompts: where own prompts of agents are kept; None: there are none.
    """

    def __init__(
        self,
        inner: GenerationEngine,
        encoder: ObservationEncoder,
        settings: EndpointSettings,
        clock: Clock,
        *,
        model: str,
        sampling: SamplingParams,
        group_size: int = 1,
        prompts: PromptStore | None = None,
    ) -> None:
        self.sessions = Sessions(settings, group_size=group_size)
        self._prompts = prompts
        self._tasks: asyncio.TaskGroup | None = None
        self._looked_up: dict[tuple[GroupId, int], GenerationRequest] = {}
        self._binding = asyncio.Lock()
        self._closing = False
        self.num_waiting = 0
        """Leases that wait for a sample."""
        self.listener: Listener | None = None
        self.model = model
        self._inner = inner
        self._encoder = encoder
        self._settings = settings
        self._clock = clock
        self._sampling = sampling
        self._longest_token = encoder.longest_token
        self._results = ResultQueue()
        self._info = EngineInfo(name="not started", capacity=0, max_context=0, vocab_size=0)
        self._turns: dict[GroupId, asyncio.Future[Result]] = {}
        self._plain = 0
        self._numbers = itertools.count(1)
        self._offered = asyncio.Event()
        self._encoding = asyncio.Lock()

    # -- a generation engine

    async def start(self) -> EngineInfo:
        """Raises ModelError; EndpointSetupError: the address cannot be listened on."""
        self._info = await self._inner.start()
        self._results.serving = asyncio.create_task(self._serve(), name="endpoint")
        if self.listener is not None:
            await self._results.until(self.listener.start())
        return self._info

    async def _serve(self) -> None:
        """Take turns from the inner engine, and look after sessions, until it is closed. Raises what ends it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._take_turns(), name="turns")
                tasks.create_task(self._end_lapsed(), name="lapses")
        except BaseExceptionGroup as failures:
            raise first_error(failures) from None

    async def _take_turns(self) -> None:
        while True:
            for result in await self._inner.results():
                waiting = self._turns.pop(result.group_id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(result)

    async def _end_lapsed(self) -> None:
        while True:
            await asyncio.sleep(LAPSE_S)
            lapsed = self.sessions.lapsed(self._clock.now_s())
            for session, reason in lapsed:
                self._give_back(session, reason)
            await self._stop_turns(session for session, _ in lapsed)

    def submit(self, request: GenerationRequest) -> None:
        # room for the whole conversation; ids are checked by an engine that reads them
        if reason := request.why_impossible(max_context=self._info.max_context, vocab_size=2**31):
            self._results.put(request.failure(request.samples, reason, retryable=False))
            return
        if self._prompts is None or self._tasks is None:
            self._offer(request)
        else:
            self._looked_up[request.key] = request
            self._tasks.create_task(self._look_up(request, self._prompts), name=f"prompt {request.group_id}")

    def _offer(self, request: GenerationRequest, own: OwnPrompt | None = None) -> None:
        self.sessions.offer(request, own)
        self._offered.set()

    async def _look_up(self, request: GenerationRequest, prompts: PromptStore) -> None:
        """Whether an agent brought the prompt of a group, before anyone else gets it."""
        own = await prompts.load(request.group_id)
        if self._looked_up.pop(request.key, None) is not None:  # it was not aborted meanwhile
            self._offer(request, own)

    async def results(self) -> list[Result]:
        return await self._results.take()

    async def abort(self, groups: Collection[tuple[GroupId, int]]) -> None:
        for key in [one for one in self._looked_up if one in groups]:
            request = self._looked_up.pop(key)
            self._results.put(request.failure(request.samples, ABORTED_UNSTARTED))
        seats, sessions = self.sessions.withdraw(groups)
        for seat in seats:
            self._results.put(seat.request.failure((seat.sample,), ABORTED_UNSTARTED))
        for session in sessions:
            reason = "the run does not want its sample any more (another version of the weights, or a time-out)"
            self._results.put(self._aborted(session))
            self.sessions.close(session, End(reason=reason, sealed=False))
        await self._stop_turns(sessions)

    def _aborted(self, session: Session) -> Result:
        end = session.conversation.longest
        if end is None:
            return session.request.failure((session.seat.sample,), ABORTED_UNSTARTED)
        made = session.conversation.transcript([end])
        return made.completion(session.request, session.seat.sample, FinishReason.ABORT, reward=None)

    async def progress(self, known: Mapping[SampleKey, int]) -> list[Progress]:
        """None: a conversation is its agent's, which goes with this worker."""
        return []

    async def load_weights(self, weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> None:
        await self._inner.load_weights(weights, tensors)

    async def use_full_precision(self, reason: str) -> None:
        await self._inner.use_full_precision(reason)

    def load(self) -> EngineLoad:
        """A session whose agent thinks has no slot, so one more fits; as many again as there are slots."""
        load = self._inner.load()
        thinking = sum(not session.turns for session in self.sessions.open.values())
        capacity = (load.capacity or self._info.capacity) + min(thinking, self._info.capacity)
        return replace(
            load, waiting=load.waiting + thinking + len(self.sessions.seats) + len(self._looked_up), capacity=capacity
        )

    async def close(self) -> None:
        self._closing = True
        self._offered.set()  # leases that wait are answered before their connections end
        try:
            if self.listener is not None:
                await self.listener.close()
        finally:
            try:
                await self._results.end_serving()
            finally:
                await self._inner.close()

    # -- sessions

    async def lease(self, *, group: str = "", prompt: OwnPrompt | None = None, wait_s: float | None = None) -> Session:
        """A sample to work on. prompt: the agent's own, whose group it is to be of.

        Raises EndpointRefusedError: none came within ``wait_s`` (at most endpoint.wait_s).
        """
        most = self._settings.wait_s
        self.num_waiting += 1
        try:
            async with asyncio.timeout(most if wait_s is None else min(wait_s, most)):
                while True:
                    if self._closing:
                        raise EndpointRefusedError(503, "closing", "the worker ends: its run is over, or begins again")
                    self._offered.clear()
                    if (session := await self._next(group, prompt)) is not None:
                        return session
                    await self._offered.wait()
        except TimeoutError:
            why = self.sessions.why_none(group, own=prompt is not None)
            raise EndpointRefusedError(429, "no_sample", f"{why}; ask again") from None
        finally:
            self.num_waiting -= 1

    async def _next(self, group: str, prompt: OwnPrompt | None) -> Session | None:
        now_s = self._clock.now_s()
        if prompt is None:
            return self.sessions.lease(now_s, group)
        if self._prompts is None:
            raise refused("this run keeps no prompts of agents", param="prompt")
        async with self._binding:  # or two requests with one prompt would take two groups
            session = self.sessions.lease_own(now_s, prompt)
            if session is None and (name := self.sessions.untouched_group()) is not None:
                self.sessions.own_prompts[name] = prompt  # nobody else takes a seat of it for the row's question now
                try:
                    await self._prompts.keep(name, prompt)
                except BaseException:  # also where the agent went away
                    self.sessions.own_prompts.pop(name, None)
                    raise
                session = self.sessions.lease_own(now_s, prompt)
            return session

    def heard(self, session: Session) -> None:
        session.heard_s = self._clock.now_s()

    async def give_back(self, session: Session, reason: str) -> None:
        """Its agent failed: what it did is dropped, and its sample waits for another agent, or has failed."""
        self._give_back(session, reason)
        await self._stop_turns([session])

    def _give_back(self, session: Session, reason: str) -> None:
        seat = session.seat
        log.warning("a session ended without a sample", group=seat.request.group_id, sample=seat.sample, reason=reason)
        if failed := self.sessions.give_back(session, reason):
            self._results.put(seat.request.failure((seat.sample,), failed))
        else:
            self._offered.set()

    async def seal(self, session: Session) -> End:
        """What is trained of it is the sample, with the reward that was reported, if one was.

        Raises EndpointRefusedError: nothing was generated in it.
        """
        end = session.conversation.longest
        if end is None:
            reason = "nothing was generated in the session: ask for an answer, or give it back (POST .../fail)"
            raise EndpointRefusedError(409, "empty_session", reason)
        if session.reward is None and session.request.group_id in self.sessions.own_prompts:
            reason = "a prompt of your own needs a reward of yours: the run's function knows the data's rows alone"
            raise refused(reason, param="reward")
        made = session.conversation.transcript(self.trained(session))
        reason = FinishReason.LENGTH if session.outgrown else end.turn.finish_reason
        completion = made.completion(session.request, session.seat.sample, reason, reward=session.reward)
        ended = End(reason="it was sealed", sealed=True, tokens=len(completion.response_ids), reward=session.reward)
        self.sessions.close(session, ended)
        self._results.put(completion)
        await self._stop_turns([session])
        return ended

    def trained(self, session: Session) -> list[Exchange]:
        """The ends of the branches that its row would have now (endpoint.branches)."""
        if self._settings.branches == "all":
            return session.conversation.branches(session.room)
        longest = session.conversation.longest
        return [] if longest is None else [longest]

    async def _stop_turns(self, ended: Iterable[Session]) -> None:
        """Of sessions that are closed: while an engine stops turns, those that are open may end in other ways."""
        if turns := [(name, session.request.attempt) for session in ended for name in session.turns]:
            await self._inner.abort(turns)

    # -- turns

    async def chat(self, session: Session | None, asked: ChatRequest, stream: TurnStream | None = None) -> Answer:
        """The policy's next message. session: whose sample it is part of; None: of none, it is answered and forgotten.
        stream: where it can be read while it is generated.

        Raises EndpointRefusedError.
        """
        self._check(asked)
        conversation = session.conversation if session else Conversation(())
        arguments = asked.chat_template_kwargs
        begun = digests(asked.messages, asked.offered_tools, conversation.answered)
        parent, known = conversation.find(begun[1:])
        said, tools = [one.for_template() for one in asked.messages[known:]], asked.offered_tools
        self._check_characters(session, sum(len(one["content"]) for one in said))
        from_tool = parent is not None and bool(said) and all(one["role"] == "tool" for one in said)
        kind = SegmentKind.TOOL if from_tool else SegmentKind.ENVIRONMENT
        try:
            if parent is not None:
                calls = asked.messages[known - 1].for_template().get("tool_calls") or () if known else ()
                added = self._encoder.behind(said, parent.last_token, tools, arguments, calls=calls)
            else:
                text = self._encoder.prompt(said, tools, arguments)
                added = await self._encode(text, special=not self._encoder.templated)
        except ModelError as error:
            raise refused(str(error), param="messages") from error
        if stream is not None:
            calls = self._settings.tool_calls if tools else "none"
            stream.text = TurnText(
                self._encoder.text,
                ends=asked.stops,
                held_from=TOOL_CALL if calls == "hermes" else "",
                silent=calls == "json",
            )
        exchange, prompt = await self._exchange(session, conversation, asked, parent, added, kind, stream)
        answer = self._answer(session, asked, exchange.turn, prompt, offered=bool(tools))
        conversation.add(exchange, digest_behind(begun[-1], answer.message))
        return answer

    async def complete(
        self, session: Session | None, asked: CompletionRequest, stream: TurnStream | None = None
    ) -> Answer:
        """What the policy writes behind a text, or behind ids. stream: as in ``chat``. Raises EndpointRefusedError."""
        self._check(asked)
        conversation = session.conversation if session else Conversation(())
        prompt = asked.text_or_ids
        if isinstance(prompt, str):
            parent = conversation.find_text(prompt)
            rest = prompt.removeprefix((parent and parent.text) or "")
            self._check_characters(session, len(rest))
            added = await self._encode(rest, special=parent is None)
        else:
            if any(not 0 <= one < self._info.vocab_size for one in prompt):
                raise refused(f"token ids lie in [0, {self._info.vocab_size})", param="prompt")
            parent = conversation.find_ids(prompt)
            known = conversation.ids(parent) if parent else []
            begins = tuple(prompt[: len(conversation.opening)]) == conversation.opening
            added = prompt[len(known) - (0 if begins else len(conversation.opening)) :] if parent else prompt
        if not added and parent is None:
            raise refused("the prompt is empty", param="prompt")
        if stream is not None:
            stream.text = TurnText(self._encoder.text, ends=asked.stops)
        kind = SegmentKind.ENVIRONMENT
        exchange, ids = await self._exchange(session, conversation, asked, parent, added, kind, stream)
        if isinstance(prompt, str):
            exchange.text = prompt + self._encoder.text(exchange.turn.response_ids.tolist())
        answer = self._answer(session, asked, exchange.turn, ids, offered=False)
        conversation.add(exchange)
        return answer

    def _check(self, asked: Request) -> None:
        if self.model != "*" and asked.model != self.model:
            reason = f"the model {asked.model!r} is not served here: this run's is {self.model!r} (endpoint.model)"
            raise EndpointRefusedError(404, "model_not_found", reason, param="model")
        asked.check()

    def _check_characters(self, session: Session | None, characters: int) -> None:
        most = (session.room if session else self._info.max_context) * self._longest_token
        if characters > most:
            raise self._too_long(session, f"the messages have {characters} characters")

    def _too_long(self, session: Session | None, what: str) -> EndpointRefusedError:
        if session is None:
            limit = f"the model's context is {self._info.max_context} tokens"
        else:
            session.outgrown = True
            limit = f"a conversation may have {session.room} (sampling.max_new_tokens): end the session"
        return EndpointRefusedError(400, "context_length_exceeded", f"{what}; {limit}", param="messages")

    async def _encode(self, text: str, *, special: bool) -> list[int]:
        if len(text) < LOOP_CHARACTERS:
            return self._encoder.ids(text, special=special)
        async with self._encoding:
            return await asyncio.to_thread(self._encoder.ids, text, special=special)

    async def _exchange(
        self,
        session: Session | None,
        conversation: Conversation,
        asked: Request,
        parent: Exchange | None,
        added: list[int],
        kind: SegmentKind,
        stream: TurnStream | None,
    ) -> tuple[Exchange, list[int]]:
        """(the exchange, not yet part of the conversation; the ids that the policy read)."""
        opening = conversation.opening
        if parent is None and opening and tuple(added[: len(opening)]) == opening:
            added = added[len(opening) :]
        prompt = [*conversation.ids(parent), *added]
        room = session.room + len(opening) if session else self._info.max_context
        if len(prompt) >= room:
            raise self._too_long(session, f"the conversation has {len(prompt)} tokens")
        left = [room - len(prompt), asked.limit or 0, self._settings.max_turn_tokens]
        if isinstance(asked, CompletionRequest) and not asked.limit:
            left.append(COMPLETION_TOKENS)
        sampling = self._sampling_of(session, asked, min(one for one in left if one))
        stops = StopStrings(asked.stops, self._encoder.whole_text)
        turn = await self._turn(session, prompt, sampling, stops, stream, later=parent is not None)
        if stream is not None and not stream.agrees(turn.response_ids.tolist()):
            reason = "the engine began the answer anew after a part of it was sent: ask again"
            raise EndpointRefusedError(503, "engine_failed", reason)
        return Exchange(parent=parent, added=added, kind=kind, turn=turn), prompt

    def _sampling_of(self, session: Session | None, asked: Request, limit: int) -> SamplingParams:
        """In a session as the run samples, whatever is asked: the trainer computes the same distribution."""
        if session is not None:
            run = session.request.sampling
            seed, session.asked = turn_seed(run.seed, session.asked), session.asked + 1
            return msgspec.structs.replace(run, max_new_tokens=limit, seed=seed, ignore_eos=False)
        wanted: dict[str, float | int] = {
            name: value
            for name in ("temperature", "top_p", "top_k")
            if (value := getattr(asked, name)) is not None and value >= 0
        }
        seed = next(self._numbers) if asked.seed is None else abs(asked.seed) % 2**62
        return msgspec.structs.replace(self._sampling, max_new_tokens=limit, seed=seed, **wanted)

    async def _turn(
        self,
        session: Session | None,
        prompt: Sequence[int],
        sampling: SamplingParams,
        stops: StopStrings,
        stream: TurnStream | None,
        *,
        later: bool,
    ) -> Completion:
        """One turn from the inner engine; a caller that goes away calls it off. Raises EndpointRefusedError."""
        self._check_open(session)
        sample = session.seat.sample if session else 0
        attempt = session.request.attempt if session else 0
        of = session.request.group_id if session else "endpoint"
        name = GroupId(f"{of}~{next(self._numbers)}")
        request = GenerationRequest(
            group_id=name,
            prompt_ids=np.array(prompt, np.int32),
            samples=(sample,),
            sampling=sampling,
            priority=(session.request.priority if session else 0.0) + (LATER_TURN_PRIORITY if later else 0.0),
            attempt=attempt,
            stops=stops,
            keep=session is not None,
            conversation=session.name if session else "",
            on_tokens=stream.put if stream else None,
        )
        self._turns[name] = answered = asyncio.get_running_loop().create_future()
        if session is not None:
            session.turns.add(name)
        else:
            self._plain += 1
        try:
            self._inner.submit(request)
            await self._results.until(asyncio.shield(answered))
        except asyncio.CancelledError:
            await self._inner.abort([(name, attempt)])
            raise
        finally:
            self._turns.pop(name, None)
            if session is not None:
                session.turns.discard(name)
                self.heard(session)
            else:
                self._plain -= 1
        self._check_still_open(session)
        return _completed(answered.result())

    def _check_open(self, session: Session | None) -> None:
        """Raises EndpointRefusedError: more than may be asked at once, or than a session may have."""
        if session is None:
            if self._plain >= MAX_PLAIN:
                raise EndpointRefusedError(429, "too_many_requests", f"{MAX_PLAIN} requests are under way: ask again")
            return
        self._check_still_open(session)
        if len(session.turns) >= MAX_TURNS_AT_ONCE:
            raise EndpointRefusedError(
                429, "too_many_requests", f"{MAX_TURNS_AT_ONCE} requests of the session are under way: ask again"
            )
        if len(session.conversation.exchanges) + len(session.turns) >= self._settings.max_turns:
            raise refused(
                f"a session may have {self._settings.max_turns} answers (endpoint.max_turns): end it",
                code="too_many_turns",
            )

    def _check_still_open(self, session: Session | None) -> None:
        if session is not None and session.name not in self.sessions.open:
            end = self.sessions.end_of(session.name)
            reason = end.reason if end else "long ago"
            raise EndpointRefusedError(410, SESSION_ENDED, f"the session has ended: {reason}; lease another one")

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Of each by itself, special ones included."""
        return [self._encoder.whole_text([one]) for one in ids]

    def _not_obeyed(self, session: Session | None, asked: Request) -> tuple[str, ...]:
        """Fields that ask for another distribution than the one of a session's run."""
        if session is None:
            return ()
        run = session.request.sampling
        given = {name: getattr(asked, name) for name in ("temperature", "top_p", "top_k")}
        differing = [name for name, value in given.items() if value is not None and value != getattr(run, name)]
        return (*differing, *(["seed"] if asked.seed is not None else []))

    def _answer(
        self, session: Session | None, asked: Request, turn: Completion, prompt: Sequence[int], *, offered: bool
    ) -> Answer:
        ids = turn.response_ids.tolist()
        text = self._encoder.text(ids)
        ends = [end for stop in asked.stops if (end := text.find(stop)) >= 0]
        text = text[: min(ends)] if ends else text
        calls = ()
        if offered:
            text, calls = find_tool_calls(text, self._settings.tool_calls)
        return Answer(
            text=text,
            reason=turn.finish_reason,
            prompt_ids=prompt,
            token_ids=ids,
            logprobs=turn.logprobs.tolist() if asked.wants_logprobs else (),
            tokens=self.token_texts(ids) if asked.wants_logprobs else (),
            fingerprint=str(turn.spans[-1].weights) if turn.spans else "",
            tool_calls=tuple(calls),
            not_obeyed=self._not_obeyed(session, asked),
            created_s=int(time.time()),
        )


def _completed(result: Result) -> Completion:
    """Raises EndpointRefusedError: the engine gave no whole turn."""
    if isinstance(result, Completion):
        if result.finish_reason is not FinishReason.ABORT:
            return result
        raise EndpointRefusedError(410, SESSION_ENDED, "the session has ended; lease another one")
    if result.retryable:
        raise EndpointRefusedError(503, "engine_failed", f"the engine gave no answer: {result.reason}; ask again")
    raise refused(result.reason)
