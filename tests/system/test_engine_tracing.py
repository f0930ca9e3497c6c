"""Traces and metrics of real rounds: every round has its span, every request its trace, and all counts agree."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from eyas.telemetry import parse_traceparent
from tests.helpers.engine import Answer, Gateway, ask, running_gateway
from tests.helpers.services import running_draft, running_target
from tests.helpers.standins import StandIn, running_stand_in, scripted
from tests.helpers.tiny_models import make_head

pytest_plugins = ("tests.helpers.tiny_fixtures",)

Span = Any  # of a ReadableSpan, every part is optional
FIRST = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECOND = "00-11111111111111111111111111111111-2222222222222222-01"
NOT_SAMPLED = "00-33333333333333333333333333333333-4444444444444444-00"


@dataclass(frozen=True)
class Traces:
    """Finished spans of all three services."""

    exporter: InMemorySpanExporter

    def named(self, name: str, among: Iterable[Span] | None = None) -> list[Span]:
        spans = self.exporter.get_finished_spans() if among is None else among
        return [span for span in spans if span.name == name]

    def children(self, parent: Span) -> list[Span]:
        return [
            span
            for span in self.exporter.get_finished_spans()
            if span.parent is not None
            and (span.parent.trace_id, span.parent.span_id) == (parent.context.trace_id, parent.context.span_id)
        ]

    def request(self, traceparent: str) -> Span:
        """The gateway's span for the request that came with this."""
        remote = parse_traceparent(traceparent)
        [span] = [span for span in self.named("generate tiny") if span.parent == remote]
        return span


@asynccontextmanager
async def traced(
    model: Path, folder: Path, *, head: bool = True, num_pages: int = 64
) -> AsyncIterator[tuple[Gateway, Traces]]:
    """The three services in one process, and their spans."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(1)))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    async with running_target(model, folder, tracer=tracer, num_pages=num_pages, page_size=4) as target:
        if not head:
            async with running_gateway(target.address, tracer=tracer) as gateway:
                yield gateway, Traces(exporter)
            return
        path = make_head(folder / "head", "eagle3", model, imitate=True)
        async with (
            running_draft(path, folder, target.address, tracer=tracer) as draft,
            running_gateway(target.address, draft.address, tracer=tracer) as gateway,
        ):
            yield gateway, Traces(exporter)


def check_rounds(traces: Traces, traceparent: str, answer: Answer, k: int) -> None:
    """One span under the request for every round of it, with what that round did."""
    request = traces.request(traceparent)
    rounds = traces.named("round", traces.children(request))
    rounds.sort(key=lambda span: span.attributes["eyas.round"])
    assert answer.stats is not None
    assert answer.finish_reason is not None
    assert len(rounds) == answer.stats.num_rounds == len(answer.blocks)
    assert [span.attributes["eyas.committed"] for span in rounds] == [len(block) for block in answer.blocks]
    assert [span.attributes["eyas.accepted"] for span in rounds] == answer.accepted
    assert sum(span.attributes["eyas.k"] for span in rounds) == answer.stats.num_draft_tokens
    assert max(span.attributes["eyas.k"] for span in rounds) == k
    position = 0
    for span in rounds:
        assert span.attributes["eyas.position"] == position
        position += span.attributes["eyas.num_fed"] + span.attributes["eyas.accepted"]
        parts = {child.name: child for child in traces.children(span)}
        assert parts.keys() == ({"draft", "verify"} if k else {"verify"})
        for child in parts.values():
            assert span.start_time <= child.start_time <= child.end_time <= span.end_time
        timed = sum(span.attributes[f"eyas.{part}_us"] for part in ("draft", "target", "wire", "gateway"))
        assert abs(timed - (span.end_time - span.start_time) / 1000) <= 5
        assert request.start_time <= span.start_time
        assert span.end_time <= request.end_time
    assert request.attributes["eyas.num_accepted_tokens"] == answer.stats.num_accepted_tokens
    assert request.attributes["gen_ai.usage.output_tokens"] == len(answer.ids)
    assert request.attributes["gen_ai.response.finish_reasons"] == (answer.finish_reason.value,)


async def test_two_requests_stay_in_their_own_traces(mild_target: Path, tmp_path: Path) -> None:
    async with traced(mild_target, tmp_path) as (gateway, traces):
        answers = await gateway.answers(
            [
                ask("an eyas", 30, k=3, traceparent=FIRST),
                ask("hunts at dawn", 40, k=2, traceparent=SECOND),
            ]
        )
    for traceparent, answer, k in zip((FIRST, SECOND), answers, (3, 2), strict=True):
        check_rounds(traces, traceparent, answer, k)
        request = traces.request(traceparent)
        for service in ("target.sequence", "draft.sequence"):
            [span] = traces.named(service, traces.children(request))
            assert request.start_time <= span.start_time
    spans: list[Span] = [*traces.exporter.get_finished_spans()]
    assert {f"{span.context.trace_id:032x}" for span in spans} == {FIRST[3:35], SECOND[3:35]}


async def test_counters_agree_with_traces_and_answers(mild_target: Path, tmp_path: Path) -> None:
    async with traced(mild_target, tmp_path) as (gateway, traces):
        answers = await gateway.answers([ask(prompt, 30, k=3) for prompt in ("an eyas", "hunts", "at dawn")])
        stats = [answer.stats for answer in answers if answer.stats]
        rounds = traces.named("round")
        for name, counted, attribute in (
            ("num_drafts", sum(s.num_drafts for s in stats), None),
            ("num_draft_tokens", sum(s.num_draft_tokens for s in stats), "eyas.k"),
            ("num_accepted_tokens", sum(s.num_accepted_tokens for s in stats), "eyas.accepted"),
        ):
            assert gateway.counter(f"eyas_spec_decode_{name}_total") == counted > 0
            if attribute:
                assert sum(span.attributes[attribute] for span in rounds) == counted
        numbers = {span.attributes["eyas.round"] for span in rounds}
        assert gateway.counter("eyas_rounds_total") >= len(numbers)
        assert gateway.counter("eyas_generation_tokens_total") == sum(len(a.ids) for a in answers)
        assert gateway.counter("eyas_prompt_tokens_total") == len("an eyas" + "hunts" + "at dawn")


async def test_every_block_of_a_round_is_in_its_batch_size(mild_target: Path, tmp_path: Path) -> None:
    async with traced(mild_target, tmp_path) as (gateway, traces):
        await gateway.answers([ask("an eyas", 20, k=1), ask("hunts", 10), ask("at dawn", 15, k=2)])
    sizes: dict[int, list[int]] = {}
    for span in traces.named("round"):
        sizes.setdefault(span.attributes["eyas.round"], []).append(span.attributes["eyas.batch_size"])
    assert all(batch == [len(batch)] * len(batch) for batch in sizes.values())
    assert max(map(len, sizes.values())) == 3


async def test_without_a_draft(mild_target: Path, tmp_path: Path) -> None:
    async with traced(mild_target, tmp_path, head=False) as (gateway, traces):
        answer = await gateway.answer(ask("an eyas", 12, traceparent=FIRST))
    check_rounds(traces, FIRST, answer, 0)
    assert traces.named("draft") == traces.named("draft.sequence") == []


async def test_a_trace_that_the_client_does_not_sample_costs_nothing(mild_target: Path, tmp_path: Path) -> None:
    async with traced(mild_target, tmp_path) as (gateway, traces):
        await gateway.answer(ask("an eyas", 12, k=2, traceparent=NOT_SAMPLED))
        assert gateway.counter("eyas_spec_decode_num_drafts_total") > 0
    assert traces.exporter.get_finished_spans() == ()


async def test_a_request_without_a_trace_begins_one(mild_target: Path, tmp_path: Path) -> None:
    async with traced(mild_target, tmp_path) as (gateway, traces):
        await gateway.answers([ask("an eyas", 5, k=2), ask("hunts", 5, k=2)])
    requests = traces.named("generate tiny")
    assert [request.parent for request in requests] == [None, None]
    assert len({request.context.trace_id for request in requests}) == 2


async def test_an_abandoned_request_is_marked(mild_target: Path, tmp_path: Path) -> None:
    async with traced(mild_target, tmp_path) as (gateway, traces):
        await gateway.answer(ask("an eyas", 100, k=2, traceparent=FIRST), cancel_after=4)
        request = traces.request(FIRST)
        assert request.attributes["gen_ai.response.finish_reasons"] == ("aborted",)
        assert not request.status.is_ok
        assert len(traces.named("round", traces.children(request))) >= 4
        assert gateway.counter("eyas_requests_total", reason="aborted") == 1


async def test_preemption_shows_as_a_second_sequence_in_the_same_trace(
    mild_target: Path, tmp_path: Path
) -> None:
    async with traced(mild_target, tmp_path, num_pages=14) as (gateway, traces):
        await gateway.answers([ask("an eyas", 30, k=2, traceparent=parent) for parent in (FIRST, SECOND)])
    epochs = [
        sorted(
            span.attributes["eyas.epoch"]
            for span in traces.named("target.sequence", traces.children(traces.request(parent)))
        )
        for parent in (FIRST, SECOND)
    ]
    assert epochs[0] == [0]
    assert epochs[1] == list(range(len(epochs[1])))
    assert len(epochs[1]) > 1


async def test_metrics_of_a_scripted_run(tiny_target: Path, tmp_path: Path) -> None:
    """k = 3 over 20 tokens, accepted 3, 0, 1, 2 and over again: the numbers as vLLM defines them."""
    request = ask("an eyas", 20, k=3)
    async with running_target(tiny_target, tmp_path) as target:
        async with running_gateway(target.address) as gateway:
            plain = await gateway.answer(replace(request, num_draft_tokens=0))
        stand_in = StandIn(scripted([[*request.prompt_ids, *plain.ids]], [3, 0, 1, 2]))
        async with (
            running_stand_in(stand_in, tmp_path) as draft,
            running_gateway(target.address, draft.address) as gateway,
        ):
            answer = await gateway.answer(request)
            # 1 from the prompt, then 4 + 1 + 2 + 3 twice, but only 9 are left: 4 + 1 + 2, and 2 with one draft.
            assert [len(block) for block in answer.blocks] == [1, 4, 1, 2, 3, 4, 1, 2, 2]
            assert answer.accepted == [0, 3, 0, 1, 2, 3, 0, 1, 1]
            counters = {
                name: gateway.counter(f"eyas_spec_decode_{name}_total")
                for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
            }
            assert counters == {"num_drafts": 8, "num_draft_tokens": 22, "num_accepted_tokens": 11}
            per_position = [
                gateway.counter("eyas_spec_decode_num_accepted_tokens_per_pos_total", position=str(i))
                for i in range(4)
            ]
            assert per_position == [6, 3, 2, 0]
            assert gateway.counter("eyas_requests_total", reason="length") == 1
            assert gateway.counter("eyas_time_to_first_token_seconds_count") == 1
            assert gateway.counter("eyas_request_seconds_count") == 1
    assert answer.stats is not None
    assert (answer.stats.num_rounds, answer.stats.num_drafts) == (9, 8)
    assert (answer.stats.num_draft_tokens, answer.stats.num_accepted_tokens) == (22, 11)
