"""Prompts in their order: what is generated next, and how to go on exactly there.

    [data]        ShuffledSource    every prompt once a pass
    [data.mix]    MixedSource       one ShuffledSource a part, in the ratio of their weights (next_part)

Owns: the order of every pass, which part is next, the position, tokenisation. Never: decides which worker gets a
prompt. Invariant: the prompts after a position depend on the settings and the data only; a source that seeks there
gives what the uninterrupted one would have given.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from orchestrator.errors import DataError
from orchestrator.prompts.dataset import ChatMessage, Problem, load_problems
from transport.contracts import tokenizer
from transport.contracts.chat_template import ChatTemplate, TemplateError
from transport.contracts.code_tasks import CODE_REWARD
from transport.contracts.messages import SlotOutcome, TrialRow, TrialRows
from transport.contracts.settings import DEFAULT_CONTEXT, DataSettings, ScoringSettings, Settings, data_parts, eval_sets
from transport.contracts.types import PromptId, SamplingParams
from transport.errors import DECODE_ERRORS, InputFileError
from transport.process.files import replace

log = structlog.get_logger(__name__)

TEMPLATE_TOKENS = 16
"""Special tokens that a tokenizer may add to a text; beside them, a token is at least one byte of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """text: as the model reads it, chat template included.  prompt_ids: [P] int32.  The others: see Problem."""

    prompt_id: PromptId
    text: str
    prompt_ids: NDArray[np.int32]
    entry_json: str
    eval_set: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """positions: [len(prompts)] the source's position after each prompt.  exhausted: none come after these."""

    prompts: list[Prompt]
    positions: list[str]
    exhausted: bool


CLOCK = (
    "the model's chat template writes the date of the day into each prompt, so a run that goes on tomorrow, and an "
    "evaluation of it, read other prompts; keep one date with --set data.chat_template_kwargs.today=2026-01-31"
)
"""Said of a template that reads the clock."""


class PromptSource(Protocol):
    """Where prompts come from. A source may choose by what it hears; its position must then contain what it heard."""

    @property
    def position(self) -> str:
        """Opaque state after the last prompt that ``next`` gave."""
        ...

    def next(self, count: int) -> PromptBatch:
        """Up to ``count`` further prompts."""
        ...

    def seek(self, position: str) -> None:
        """Go on as after ``position``; "" is the start. Raises DataError for a position in other data."""

    def lookup(self, prompt_id: PromptId) -> Prompt:
        """The prompt of this name, wherever the position is. Raises KeyError when there is none."""
        ...

    def observe(self, outcome: SlotOutcome) -> None:
        """Hear how a prompt's slot ended."""


def open_source(settings: Settings, model_dir: Path, *, scored: bool = True) -> ShuffledSource | MixedSource:
    """The training prompts. model_dir: Hugging Face directory of the model.  scored: responses will be.

    Raises DataError.
    """
    data = settings.data
    encoder = PromptEncoder(load_tokenizer(model_dir), data, opening_alone=settings.endpoint.enabled)
    limit = context_limit(settings, model_dir)
    problems = load_problems(settings, scored=scored).training
    parts: dict[str, ShuffledSource] = {}
    for name in data_parts(data):
        of_part = [problem for problem in problems if problem.part == name]
        fit = fitting(of_part, encoder, limit, settings)
        source = ShuffledSource(fit, encoder, seed=settings.run.seed, shuffle=data.shuffle, passes=data.passes)
        if left_out := len(of_part) - len(fit):
            where = f" of data.mix.{name}" if name else ""
            source.remarks += (f"{left_out} of {len(of_part)} prompts{where} are beyond the context and left out",)
        parts[name] = source
    source = MixedSource(parts, {name: part.weight for name, part in data.mix.items()}) if data.mix else parts[""]
    if encoder.reads_clock:
        source.remarks += (CLOCK,)
    return source


def held_out(settings: Settings, model_dir: Path) -> ShuffledSource:
    """The held-out prompts: one pass, in a fixed order, no question of which is trained on. Raises DataError.

    A problem of a set that asks for several samples comes as often in a row: an evaluation asks each prompt once.
    """
    encoder = PromptEncoder(load_tokenizer(model_dir), settings.data, opening_alone=settings.endpoint.enabled)
    problems = fitting(load_problems(settings).held_out, encoder, context_limit(settings, model_dir), settings)
    asked = eval_sets(settings)
    repeated = [problem for problem in problems for _ in range(asked[problem.eval_set].samples)]
    return ShuffledSource(repeated, encoder, seed=settings.eval.seed, shuffle=False, passes=1)


def sampling_of_sets(settings: Settings) -> dict[str, SamplingParams]:
    """How each of ``[eval.sets]`` is sampled, by name; {} where there are none, and the run's settings hold."""
    named = eval_sets(settings) if settings.eval.sets else {}
    return {
        name: msgspec.structs.replace(settings.sampling.params, temperature=asked.temperature or 0.0)
        for name, asked in named.items()
    }


def write_held_out(settings: Settings, model_dir: Path, path: Path) -> None:
    """Write the held-out prompts to ``path`` as JSON lines, unless it is there: any model can be asked them later.

    Raises DataError.
    """
    asked = any(one.problems for one in eval_sets(settings).values())
    if path.exists() or not asked or settings.trainer.engine == "none":
        return
    source = held_out(settings, model_dir)
    lines: list[str] = []
    for number, prompt in enumerate(source.next(len(source)).prompts):
        if prompt.eval_set and number and source.problems[number] is source.problems[number - 1]:
            continue  # another sample of the same problem
        line: dict[str, object] = {"eval_set": prompt.eval_set} if prompt.eval_set else {}
        line |= {"prompt_id": prompt.prompt_id, "text": prompt.text, "prompt_ids": prompt.prompt_ids.tolist()}
        lines.append(json.dumps(line | {"entry": prompt.entry_json}) + "\n")
    replace(path, "".join(lines))


TRIAL_ROWS = 4
"""A good reward may fail on one hard row, and hardly on four."""


def trial_rows(problems: Sequence[Problem], scoring: ScoringSettings) -> TrialRows:
    """The first of ``problems``, each with its right answer as a model would give it, where the data has one."""

    def right(answer: str) -> str:
        if scoring.reward == CODE_REWARD:
            return f"```python\n{answer}\n```"
        return f"{scoring.answer_marker} {answer.rsplit('####', 1)[-1].strip()}"

    answers = [msgspec.json.decode(one.entry_json).get("answer") for one in problems[:TRIAL_ROWS]]
    return TrialRows(
        rows=[
            TrialRow(
                prompt=one.question,
                response=right(str(answer)) if answer is not None else "",
                entry=one.entry_json,
            )
            for one, answer in zip(problems, answers, strict=False)
        ]
    )


class ShuffledSource:
    """Every problem once a pass, in a new seeded order on each. Ignores outcomes."""

    def __init__(
        self, problems: Sequence[Problem], encoder: PromptEncoder, *, seed: int, shuffle: bool, passes: int
    ) -> None:
        """passes: passes before it is exhausted; 0: it never is."""
        self.problems = problems
        self.remarks: tuple[str, ...] = ()
        """Sentences that a user should read about these prompts."""
        self._encoder = encoder
        self._seed = seed
        self._shuffle = shuffle
        self._passes = passes if problems else 1
        self._by_id = {problem.prompt_id: problem for problem in problems}
        self._fingerprint = _fingerprint(problems, seed=seed, shuffle=shuffle)
        self._made: tuple[Problem, Prompt] | None = None
        """The newest prompt: a problem of an evaluation of several samples comes as often in a row."""
        self._go_to(0, 0)

    def __len__(self) -> int:
        return len(self.problems)

    @property
    def position(self) -> str:
        return f"{self._pass}/{self._index}@{self._fingerprint}"

    @property
    def given(self) -> int:
        """Prompts before the position, over all passes."""
        return self._pass * len(self.problems) + self._index

    @property
    def exhausted(self) -> bool:
        """Whether the last pass is over."""
        return self._passes > 0 and (self._pass >= self._passes or not self.problems)

    def next(self, count: int) -> PromptBatch:
        prompts: list[Prompt] = []
        positions: list[str] = []
        while len(prompts) < count and not self.exhausted:
            prompts.append(self._prompt(self.problems[self._order[self._index]]))
            if self._index + 1 < len(self.problems):
                self._index += 1
            else:
                self._go_to(self._pass + 1, 0)
            positions.append(self.position)
        return PromptBatch(prompts=prompts, positions=positions, exhausted=self.exhausted)

    def seek(self, position: str) -> None:
        match = re.fullmatch(r"(\d+)/(\d+)@(\w+)", position or f"0/0@{self._fingerprint}")
        if match is None or int(match[2]) >= max(1, len(self)) or match[3] != self._fingerprint:
            raise DataError(
                f"position {position!r} is not one in these prompts ({self._fingerprint}): the data, its settings or "
                "run.seed have changed since the run began"
            )
        self._go_to(int(match[1]), int(match[2]))

    def lookup(self, prompt_id: PromptId) -> Prompt:
        return self._prompt(self._by_id[prompt_id])

    def observe(self, outcome: SlotOutcome) -> None:
        """Every prompt comes as often as any other, however it went."""

    def _prompt(self, problem: Problem) -> Prompt:
        if self._made is None or self._made[0] is not problem:
            text = self._encoder.render(problem.question, problem.messages)
            prompt = Prompt(
                prompt_id=problem.prompt_id,
                text=text,
                prompt_ids=self._encoder.encode(text),
                entry_json=problem.entry_json,
                eval_set=problem.eval_set,
            )
            self._made = problem, prompt
        return self._made[1]

    def _go_to(self, number: int, index: int) -> None:
        """The order of a pass is its own seeded stream, so that it needs no pass before it."""
        self._pass, self._index = number, index
        self._order: NDArray[np.int64] = np.arange(len(self.problems))
        if self._shuffle:
            self._order = np.random.default_rng((self._seed, number)).permutation(len(self.problems))


def next_part(given: Sequence[int], weights: Sequence[float], exhausted: Sequence[bool] = ()) -> int | None:
    """The part that gives the next prompt: whose next one is due first, the first named of several; None if all ended.

    Args:   given: [P] prompts that each part gave.  weights: [P] > 0.  exhausted: [P] parts with no more to give.
    Source: stride scheduling (Waldspurger 1995): part p's n-th prompt is due at n / weight. Without chance, so that
            every batch has nearly the whole's ratio.
    """
    due = [
        ((count + 1) / weight, part)
        for part, (count, weight) in enumerate(zip(given, weights, strict=True))
        if not (exhausted and exhausted[part])
    ]
    return min(due)[1] if due else None


class MixedSource:
    """One source of several. A part that ends (``data.passes``) leaves its share to the others."""

    def __init__(self, parts: Mapping[str, ShuffledSource], weights: Mapping[str, float]) -> None:
        """parts: by name, none of them empty.  weights: > 0, of the same names."""
        self._names = list(parts)
        self._parts = list(parts.values())
        self._weights = [weights[name] for name in parts]
        self._of_prompt = {problem.prompt_id: part for part in self._parts for problem in part.problems}
        self.remarks = tuple(remark for part in self._parts for remark in part.remarks)

    @property
    def problems(self) -> list[Problem]:
        """Of all parts, the first ones of each first."""
        longest = max(len(part) for part in self._parts)
        return [part.problems[index] for index in range(longest) for part in self._parts if index < len(part)]

    @property
    def given(self) -> int:
        """Prompts before the position, of all parts."""
        return sum(part.given for part in self._parts)

    @property
    def position(self) -> str:
        places = {name: part.position for name, part in zip(self._names, self._parts, strict=True)}
        return msgspec.json.encode(places).decode()

    def next(self, count: int) -> PromptBatch:
        prompts: list[Prompt] = []
        positions: list[str] = []
        while len(prompts) < count and (part := self._next_part()) is not None:
            prompts += self._parts[part].next(1).prompts
            positions.append(self.position)
        return PromptBatch(prompts=prompts, positions=positions, exhausted=self._next_part() is None)

    def _next_part(self) -> int | None:
        given = [part.given for part in self._parts]
        return next_part(given, self._weights, [part.exhausted for part in self._parts])

    def seek(self, position: str) -> None:
        try:
            decoded = msgspec.json.decode(position or b"{}", type=dict[str, str])
            places = decoded if position else dict.fromkeys(self._names, "")
        except DECODE_ERRORS:
            places = {}
        if list(places) != self._names:
            raise DataError(
                f"position {position!r} is not one in a mix of {', '.join(self._names)}: data.mix has changed since "
                "the run began"
            )
        for part, place in zip(self._parts, places.values(), strict=True):
            part.seek(place)

    def lookup(self, prompt_id: PromptId) -> Prompt:
        return self._of_prompt[prompt_id].lookup(prompt_id)

    def observe(self, outcome: SlotOutcome) -> None:
        """The ratio is of prompts that are given out, however they went."""


def _fingerprint(problems: Sequence[Problem], **order: object) -> str:
    digest = hashlib.blake2b(repr(sorted(order.items())).encode(), digest_size=6)
    for problem in problems:
        digest.update(f"{problem.prompt_id}\0{problem.question}\0{problem.entry_json}\0".encode())
    return digest.hexdigest()


# --- text and tokens --------------------------------------------------------------------------------------------------


class ModelTokenizer:
    """The model's tokenizer and chat template. May be used from several threads."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> None:
        """arguments: chat_template_kwargs. Raises DataError: the template reads no such argument."""
        self._tokenizer = tokenizer
        try:
            self._template = ChatTemplate(tokenizer, arguments)
        except TemplateError as error:
            raise DataError(f"data.chat_template_kwargs: {error}") from error
        self._lock = threading.Lock()  # encoding changes the tokenizer's own settings while it runs
        self.has_template = bool(tokenizer.chat_template)

    @property
    def reads_clock(self) -> bool:
        """Whether what the chat template writes depends on the day."""
        return self._template.reads_clock

    def ids(self, text: str, *, special: bool) -> list[int]:
        """special: add the tokenizer's own special tokens; a chat template has put all of them into the text.

        A beginning that the text has already is not written twice.
        """
        with self._lock:
            ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        begin = self._tokenizer.bos_token_id
        return ids[1:] if special and begin is not None and ids[:2] == [begin, begin] else ids

    def render(self, messages: list[dict[str, str]], arguments: Mapping[str, Any] | None = None) -> str:
        """The text that the chat template makes of them. arguments: over the run's chat_template_kwargs.

        Raises DataError: it refuses one, or leaves it out.
        """
        try:
            self._template.check_arguments(arguments or {})
            return self._template.render(messages, arguments=arguments)
        except TemplateError as error:
            raise DataError(str(error)) from error


class PromptEncoder:
    """Questions to texts to ids, with the model's chat template and tokenizer. May be used from several threads."""

    def __init__(self, tokenizer: Any, data: DataSettings, *, opening_alone: bool = False) -> None:
        """tokenizer: of transformers.  data: chat_template, its arguments, system.

        opening_alone: the ids end with the prompt's first token: agents write the messages, and no more is sure to be
        common to the samples of a group.
        """
        self._opening_alone = opening_alone
        self._tokenizer = ModelTokenizer(tokenizer, data.chat_template_kwargs if data.chat_template else None)
        self._system = data.system
        self._templated = data.chat_template and self._tokenizer.has_template

    @property
    def reads_clock(self) -> bool:
        """Whether a prompt depends on the day on which it is made."""
        return self._templated and self._tokenizer.reads_clock

    def render(self, question: str, conversation: Sequence[ChatMessage] = ()) -> str:
        """The text the model reads. Raises DataError when its chat template refuses the messages, or there is none."""
        if not self._templated:
            if conversation:
                raise DataError("a prompt is a list of messages, and the model has no chat template: give text")
            return f"{self._system}\n\n{question}" if self._system else question
        messages = [{"role": "system", "content": self._system}] if self._system else []
        messages += [{"role": turn.role, "content": turn.content} for turn in conversation]
        if not conversation:
            messages.append({"role": "user", "content": question})
        try:
            return self._tokenizer.render(messages)
        except DataError as error:
            raise DataError(f"{error}{'; see data.system' if self._system else ''}") from error

    def encode(self, text: str) -> NDArray[np.int32]:
        """[P] int32."""
        ids = np.asarray(self._tokenizer.ids(text, special=not self._templated), dtype=np.int32)
        return ids[:1] if self._opening_alone else ids


def load_tokenizer(model_dir: Path) -> Any:
    """Raises DataError where there is none."""
    try:
        return tokenizer.load_tokenizer(model_dir)
    except InputFileError as error:
        raise DataError(f"the tokenizer in {model_dir} cannot be read: {error.problem}") from error


def load_detokenizer(model_dir: Path) -> Callable[[Sequence[int]], str]:
    """Token ids to text without special tokens, as rewards see it. Raises DataError where there is no tokenizer."""
    tokenizer = load_tokenizer(model_dir)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def text_config(model_dir: Path) -> dict[str, Any]:
    """The model's configuration; of one that reads more than text, that part of it."""
    config = json.loads((model_dir / "config.json").read_bytes())
    return config.get("text_config") or config


def context_limit(settings: Settings, model_dir: Path) -> int:
    """Tokens of prompt and response. Raises DataError when more are asked for than the model was made for."""
    of_model = text_config(model_dir).get("max_position_embeddings") or DEFAULT_CONTEXT
    asked = settings.generation.max_context
    if asked > of_model:
        raise DataError(f"generation.max_context is {asked}, but {settings.model.path} was made for {of_model} tokens")
    return asked or min(of_model, DEFAULT_CONTEXT)


def fitting(problems: Sequence[Problem], encoder: PromptEncoder, limit: int, settings: Settings) -> list[Problem]:
    """The problems whose prompt leaves room for a response: all of them, unless ``data.overlong`` is "skip".

    limit: tokens of prompt and response. Raises DataError naming the longest prompt, or when nothing fits.
    """
    room = limit - settings.sampling.max_new_tokens
    if room < 1:
        raise DataError(
            f"a context of {limit} tokens has no room for a prompt beside sampling.max_new_tokens "
            f"({settings.sampling.max_new_tokens})"
        )

    def length(problem: Problem) -> int:
        """Tokens; 0 for a prompt of so few bytes that it surely fits, which saves tokenising whole data sets."""
        try:
            text = encoder.render(problem.question, problem.messages)
        except DataError as error:
            raise DataError(f"{problem.prompt_id}: {error}") from error
        return 0 if len(text.encode()) + TEMPLATE_TOKENS <= room else len(encoder.encode(text))

    lengths = list(map(length, problems))
    fit = [problem for problem, length in zip(problems, lengths, strict=True) if length <= room]
    if len(fit) == len(problems):
        return fit
    if fit and settings.data.overlong == "skip":
        log.warning("prompts beyond the context are left out", left_out=len(problems) - len(fit), of=len(problems))
        return fit
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    raise DataError(
        f"{len(problems) - len(fit)} of {len(problems)} prompts do not fit: {problems[longest].prompt_id} has "
        f"{lengths[longest]} tokens, and a context of {limit} leaves {room} beside sampling.max_new_tokens "
        f'({settings.sampling.max_new_tokens}). Raise generation.max_context, or set data.overlong to "skip"'
    )
