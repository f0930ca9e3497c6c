"""Committing accepted blocks token by token."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.commit import CommitState, Committed, commit
from gateway.request import CommittedToken, FinishReason, TokenSource
from gateway.stop_strings import StopStrings
from gateway.text import TextStream, Tokenizer
from tests.helpers.tiny_tokenizer import END_OF_TEXT, IM_END, tiny_tokenizer_files

TINY = Tokenizer(tiny_tokenizer_files())
EOS = frozenset({IM_END, END_OF_TEXT})
DRAFT, TARGET = TokenSource.DRAFT, TokenSource.TARGET
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def state(max_tokens: int = 100, stop: Iterable[str] = ()) -> CommitState:
    return CommitState(max_tokens, EOS, StopStrings(tuple(stop)), TextStream(TINY))


def block_of(ids: Iterable[int]) -> list[tuple[int, TokenSource]]:
    """All drafted but the last, as a round gives them."""
    ids = list(ids)
    return [(token_id, TARGET if i == len(ids) - 1 else DRAFT) for i, token_id in enumerate(ids)]


def commit_all(state: CommitState, blocks: Iterable[Iterable[int]]) -> list[Committed]:
    done: list[Committed] = []
    for round, ids in enumerate(blocks):
        done.append(commit(state, block_of(ids), round))
        if done[-1].finish_reason is not None:
            break
    return done


def text_of(done: list[Committed]) -> str:
    return "".join(committed.text for committed in done)


def num_tokens(done: list[Committed]) -> int:
    return sum(len(committed.tokens) for committed in done)


# --- stop ids and limits ---


def test_tokens_keep_their_source_and_round() -> None:
    committed = commit(state(), [(97, DRAFT), (98, TARGET)], 7)
    assert committed.tokens == (CommittedToken(97, DRAFT, 7), CommittedToken(98, TARGET, 7))
    assert (committed.text, committed.finish_reason) == ("ab", None)


@pytest.mark.parametrize("eos", sorted(EOS))
def test_every_stop_id_ends_a_block_counts_and_is_not_shown(eos: int) -> None:
    answer = state()
    [committed] = commit_all(answer, [[97, eos, 98, 99]])
    assert [token.id for token in committed.tokens] == [97, eos]
    assert (committed.text, committed.finish_reason) == ("a", STOP)
    assert (answer.completion_tokens, answer.finish_reason) == (2, STOP)


def test_stop_before_the_limit_wins() -> None:
    [committed] = commit_all(state(max_tokens=4), [[97, IM_END, 98, 99, 100]])
    assert (len(committed.tokens), committed.finish_reason) == (2, STOP)


def test_stop_beyond_the_limit_gives_length_at_the_limit() -> None:
    [committed] = commit_all(state(max_tokens=2), [[97, 98, 99, IM_END]])
    assert (len(committed.tokens), committed.text, committed.finish_reason) == (2, "ab", LENGTH)


@pytest.mark.parametrize(("ids", "stop"), [([97, IM_END], ()), ([97, 98], ("b",))])
def test_stop_at_the_limit_is_a_stop(ids: list[int], stop: tuple[str, ...]) -> None:
    [committed] = commit_all(state(max_tokens=2, stop=stop), [[*ids, 99]])
    assert (len(committed.tokens), committed.text, committed.finish_reason) == (2, "a", STOP)


def test_counters_are_those_of_committed_tokens() -> None:
    answer = state(max_tokens=6)
    commit_all(answer, [[97], [98, 99, 100], [101, 102, 103]])
    assert (answer.completion_tokens, answer.num_accepted_tokens) == (6, 4)


def test_a_finished_answer_takes_no_block() -> None:
    answer = state(max_tokens=1)
    commit(answer, block_of([97]), 0)
    with pytest.raises(ValueError, match="finished"):
        commit(answer, block_of([98]), 1)


def test_an_empty_block_commits_nothing() -> None:
    assert commit(state(), [], 0) == Committed((), "", None)


# --- stop strings ---


def test_stop_string_inside_a_block() -> None:
    [committed] = commit_all(state(stop=["STOP"]), [b"ab STOP cd"])
    assert (committed.text, committed.finish_reason) == ("ab ", STOP)
    assert len(committed.tokens) == 7


def test_stop_string_over_two_blocks() -> None:
    done = commit_all(state(stop=["STOP"]), [b"ab ST", b"OP cd"])
    assert [committed.text for committed in done] == ["ab ", ""]
    assert (num_tokens(done), done[-1].finish_reason) == (7, STOP)


def test_what_only_began_like_a_stop_string_is_released() -> None:
    done = commit_all(state(stop=["STOP"]), [b"a ST", b"ST", b"AR"])
    assert [committed.text for committed in done] == ["a ", "ST", "STAR"]


def test_held_back_text_comes_with_the_finish() -> None:
    assert text_of(commit_all(state(stop=["STOP"]), [b"a ST", [IM_END]])) == "a ST"
    assert text_of(commit_all(state(max_tokens=4, stop=["STOP"]), [b"a STOP"])) == "a ST"


def test_stop_string_that_ends_inside_a_token() -> None:
    """The token counts; its text behind the stop string is cut."""
    stops = StopStrings(["lo"])
    assert [stops.push("hel"), stops.push("lo world"), stops.push("lo"), stops.flush()] == ["he", "l", "", ""]
    assert stops.hit


def test_stop_string_complete_first_wins_and_of_those_the_longest() -> None:
    assert StopStrings(["abcd", "bc"]).push("abcd") == "a"
    assert StopStrings(["c", "abc", "bc"]).push("xabc") == "x"


@pytest.mark.parametrize(
    ("stop", "text", "kept"),
    [("aab", "aaab", "a"), ("abac", "ababac", "ab"), ("aabaaa", "aabaabaaa", "aab")],
)
def test_stop_string_that_begins_inside_a_failed_one(stop: str, text: str, kept: str) -> None:
    stops = StopStrings([stop])
    assert "".join(stops.push(char) for char in text) == kept
    assert stops.hit


def test_stop_string_of_characters_spread_over_tokens() -> None:
    done = commit_all(state(stop=["끝"]), ["가".encode(), "끝".encode()[:2], "끝".encode()[2:] + b"a"])
    assert (text_of(done), num_tokens(done)) == ("가", 6)


# --- text ---


def test_unfinished_character_is_held_back_and_shown_at_the_limit() -> None:
    korean = "한".encode()
    assert [c.text for c in commit_all(state(), [korean[:1], korean[1:2], korean[2:]])] == ["", "", "한"]
    assert text_of(commit_all(state(max_tokens=2), [korean])) == "�"


# --- against an oracle that looks at one token after the other, and at the whole text each time ---


def oracle(ids: list[int], max_tokens: int, stops: list[str]) -> tuple[int, str, FinishReason | None]:
    for count, token_id in enumerate(ids, 1):
        if token_id in EOS:
            return count, _decode(ids[: count - 1], "replace"), STOP
        text = _decode(ids[:count], "ignore")
        for end in range(len(text) + 1):
            hits = [len(stop) for stop in stops if text[:end].endswith(stop)]
            if hits:
                return count, text[: end - max(hits)], STOP
        if count == max_tokens:
            return count, _decode(ids[:count], "replace"), LENGTH
    return len(ids), _decode(ids, "ignore"), None


def _decode(ids: list[int], errors: str) -> str:
    return bytes(token_id for token_id in ids if token_id < 256).decode(errors=errors)


@st.composite
def answers(draw: st.DrawFn) -> list[int]:
    parts = draw(st.lists(st.sampled_from(["a", "b", "aa", "한", "😀", "<|im_start|>"]), max_size=12))
    ids = [token_id for part in parts for token_id in TINY.encode(part)]
    return ids + draw(st.sampled_from([[], [IM_END], [IM_END, 97], [END_OF_TEXT, 98]]))


@given(
    ids=answers(),
    max_tokens=st.integers(1, 20),
    stops=st.lists(st.text("ab한😀", min_size=1, max_size=5), max_size=4),
    data=st.data(),
)
def test_blocks_give_what_single_tokens_give(
    ids: list[int], max_tokens: int, stops: list[str], data: st.DataObject
) -> None:
    answer, rest = state(max_tokens, stops), ids
    done: list[Committed] = []
    while rest and answer.finish_reason is None:
        size = data.draw(st.integers(1, 9))
        done.append(commit(answer, block_of(rest[:size]), len(done)))
        rest = rest[size:]
    count, text, reason = oracle(ids, max_tokens, stops)
    assert [token.id for committed in done for token in committed.tokens] == ids[:count]
    assert (answer.completion_tokens, answer.finish_reason) == (count, reason)
    drafted = [token for committed in done for token in committed.tokens if token.source is DRAFT]
    assert answer.num_accepted_tokens == len(drafted)
    if reason is None:
        held = text.removeprefix(text_of(done))
        assert text_of(done) + held == text
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    else:
        assert text_of(done) == text
