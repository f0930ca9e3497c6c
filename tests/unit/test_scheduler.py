"""The scheduler: admission by pages, the budgets of a round, preemption, and what has to be freed."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from gateway.commit import CommitState
from gateway.scheduler import Close, Scheduler
from gateway.sequence import Sequence
from gateway.stop_strings import StopStrings
from gateway.text import TextStream, Tokenizer
from tests.helpers.engine import ask
from tests.helpers.tiny_tokenizer import tiny_tokenizer_files

PAGE_SIZE = 4
PLENTY = 1000


def sequence(num_tokens: int, num_computed: int = 0) -> Sequence:
    request = ask([0] * num_tokens, 10)
    text = TextStream(Tokenizer(tiny_tokenizer_files()))
    commit = CommitState(request.max_tokens, frozenset(), StopStrings(()), text)
    return Sequence(request, commit, list(request.prompt_ids), num_computed=num_computed)


def scheduler(*waiting: Sequence, max_sequences: int = 16, prompt_rows: int = 256) -> Scheduler:
    made = Scheduler(max_sequences, prompt_rows)
    made.waiting.extend(waiting)
    return made


def plan(
    made: Scheduler, free_pages: int = PLENTY, max_rows: int = PLENTY, among: Seq[Sequence] = ()
) -> list[tuple[int, int]]:
    """The shares, as the place of the sequence among `among` and the tokens that go in."""
    return [(among.index(s.sequence), s.num_fed) for s in made.plan(free_pages, PAGE_SIZE, max_rows)]


def test_nothing_to_do() -> None:
    made = scheduler()
    assert not made.has_work
    assert plan(made) == []


def test_prompts_share_the_budget_of_rows_oldest_first() -> None:
    some = [sequence(n) for n in (6, 3, 9)]
    made = scheduler(*some, prompt_rows=8)
    assert plan(made, among=some) == [(0, 6), (1, 2)]
    some[0].num_computed = 5
    some[1].num_computed = 2
    assert plan(made, among=some) == [(0, 1), (1, 1), (2, 8)]


def test_the_last_chunk_is_the_one_that_leaves_nothing() -> None:
    one = sequence(6)
    made = scheduler(one, prompt_rows=4)
    [share] = made.plan(PLENTY, PAGE_SIZE, PLENTY)
    assert not share.is_last_chunk
    one.num_computed = 4
    [share] = made.plan(PLENTY, PAGE_SIZE, PLENTY)
    assert share.is_last_chunk


def test_the_target_s_rows_go_to_those_that_decode_first() -> None:
    some = [sequence(9), sequence(5, 4), sequence(7, 6)]
    made = scheduler(*some)
    assert plan(made, max_rows=6, among=some) == [(1, 1), (2, 1), (0, 4)]
    assert plan(made, max_rows=2, among=some) == [(1, 1), (2, 1)]
    assert plan(made, max_rows=1, among=some) == [(1, 1)]


@pytest.mark.parametrize(("free_pages", "admitted"), [(0, 0), (1, 0), (2, 1), (4, 1), (5, 2), (9, 3)])
def test_admission_by_pages(free_pages: int, admitted: int) -> None:
    """7 tokens take 2 pages, 8 take 3: the next token has its place too."""
    some = [sequence(7), sequence(8), sequence(8)]
    made = scheduler(*some)
    plan(made, free_pages, among=some)
    assert len(made.running) == admitted
    assert list(made.waiting) == some[admitted:]


def test_nobody_overtakes_the_first_in_the_queue() -> None:
    some = [sequence(40), sequence(1)]
    made = scheduler(*some)
    assert plan(made, 5, among=some) == []
    assert list(made.waiting) == some


def test_pages_that_admitted_prompts_will_take_are_not_given_twice() -> None:
    some = [sequence(16), sequence(16)]
    made = scheduler(*some, prompt_rows=4)
    assert plan(made, 8, among=some) == [(0, 4)]
    some[0].num_computed = 4  # one page is taken, four are still to come
    assert plan(made, 7, among=some) == [(0, 4)]
    assert len(made.running) == 1


def test_no_more_than_max_sequences_run() -> None:
    some = [sequence(2) for _ in range(3)]
    made = scheduler(*some, max_sequences=2)
    assert plan(made, among=some) == [(0, 2), (1, 2)]
    made.retire(some[0])
    assert plan(made, among=some) == [(1, 2), (2, 2)]


def test_what_retires_is_to_be_freed_once() -> None:
    one = sequence(2)
    one.attachment = 7
    made = scheduler(one)
    plan(made, among=[one])
    made.retire(one)
    assert made.has_work
    assert made.take_closes() == [Close(one.id, 7)]
    assert made.take_closes() == []
    assert not made.has_work


def test_cancelled_sequences_leave() -> None:
    some = [sequence(2) for _ in range(4)]
    made = scheduler(*some, max_sequences=2)
    plan(made, among=some)
    some[0].cancelled = some[2].cancelled = True
    assert plan(made, among=some) == [(1, 2), (3, 2)]
    assert made.take_closes() == [Close(some[0].id, 0)]  # the one in the queue held nothing


def test_preemption_takes_the_youngest_and_keeps_its_text() -> None:
    some = [sequence(2), sequence(5, 4), sequence(3)]
    made = scheduler(*some, max_sequences=2)
    plan(made, among=some)
    young = some[1]
    young.opened, young.attachment, young.num_slots, young.drafts = True, 3, 4, [1, 2]
    assert made.preempt_youngest() is young
    assert made.take_closes() == [Close(young.id, 3)]
    assert list(made.waiting) == [young, some[2]]
    assert (young.epoch, young.opened, young.attachment) == (1, False, 0)
    assert (young.num_computed, young.num_slots, young.drafts) == (0, 0, [])
    assert len(young.tokens) == 5
    assert plan(made, among=some) == [(0, 2), (1, 5)]


def test_dropping_all_frees_what_ran() -> None:
    some = [sequence(2), sequence(2)]
    made = scheduler(*some, max_sequences=1)
    plan(made, among=some)
    assert made.drop_all() == some
    assert made.take_closes() == [Close(some[0].id, 0)]
    assert not made.has_work
