"""Where a stop string ends a response: the text, the decoder, and what a server sends too much."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from orchestrator.config.rules import violations
from tests.fakes.decoding import by_sample, check_logprobs, decoder_of, request, run_all
from tests.fakes.tiny_models import tiny_model
from tests.unit.test_server_parts import OLD, chunk
from transport.contracts.settings import GenerationSettings, Settings
from transport.contracts.types import FinishReason
from workers.generation.engine import NO_STOPS, StopStrings
from workers.generation.server.sender import cut

PIECES = ["a", "b", "</an", "swer", ">!", "\n", "\n\nQ"]


def decode(ids: Sequence[int]) -> str:
    return "".join(PIECES[i % len(PIECES)] for i in ids)


def test_a_string_ends_a_response_with_the_token_that_completes_it() -> None:
    stops = StopStrings(["</answer>", "\n\n"], decode)
    assert stops.end([0, 2, 3, 4, 0, 0]) == 4, "over three tokens, the last of which says more"
    assert stops.end([0, 2, 3, 4, 0, 0], checked=3) == 4
    assert stops.end([0, 6, 2, 3, 4]) == 2, "the first of several"
    assert stops.end([0, 5, 5]) == 3
    assert stops.end([0, 5, 0, 5, 2, 3]) is None
    assert stops.end([]) is None
    assert NO_STOPS.end([0, 2, 3, 4]) is None


def test_a_long_response_is_read_near_its_end_only() -> None:
    read: list[int] = []

    def counting(ids: Sequence[int]) -> str:
        read.append(len(ids))
        return decode(ids)

    ids = [1] * 5000 + [2, 3, 4]
    assert StopStrings(["</answer>"], counting).end(ids, checked=4990) == 5003
    assert max(read) < 20


def test_characters_of_several_tokens_are_found_whole() -> None:
    text = "ab\u00e9\u2713c".encode()
    stops = StopStrings(["\u2713"], lambda ids: bytes(ids).decode(errors="replace"))
    assert stops.end(list(text)) == len(text) - 1


def test_the_decoder_stops_where_the_string_is_and_keeps_its_logprobs() -> None:
    model = tiny_model()
    asked = [request(slot, new_tokens=60, ignore_eos=False) for slot in range(3)]
    free = by_sample(run_all(decoder_of(model), asked))
    stops = StopStrings(["ab\nb", "ba>!"], decode)
    decoder = decoder_of(model, stops=stops)
    stopped = run_all(decoder, asked)
    assert {result.finish_reason for result in stopped} == {FinishReason.STOP, FinishReason.LENGTH}
    for key, result in by_sample(stopped).items():
        whole = free[key].response_ids.tolist()
        end = stops.end(whole)
        assert result.response_ids.tolist() == whole[:end]
        assert result.finish_reason is (FinishReason.LENGTH if end is None else FinishReason.STOP)
        assert len(result.logprobs) == len(result.response_ids) == result.spans[-1].end
    check_logprobs(model, asked, stopped)
    forced = run_all(decoder_of(model, stops=stops), [request(0, new_tokens=60)])
    assert {len(result.response_ids) for result in forced} == {60}, "a length that is forced is not cut"


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_what_a_server_sends_beyond_a_string_is_cut_with_its_logprobs_and_weights(tokens: int) -> None:
    last = cut(chunk((str(OLD), 0, 2), ("1.2", 2, 3)), tokens)
    assert (last.token_ids, [token for _, token in last.logprobs]) == (list(range(tokens)), list(range(tokens)))
    assert last.finish_reason == "stop"
    covered = [n for span in last.spans for n in range(span.start, span.end)]
    assert covered == list(range(tokens))


def test_an_engine_that_writes_no_text_takes_no_stop_strings() -> None:
    settings = Settings(generation=GenerationSettings(engine="emulated", stop=["x"]))
    assert [keys[0] for keys, _ in violations(settings)] == ["generation.stop"]
    assert np.all([not list(violations(Settings(generation=GenerationSettings(stop=["x"]))))])
