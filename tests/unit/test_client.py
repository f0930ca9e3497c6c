"""The clients behind `eyas demo` and `eyas chat`, over the real REST API with an engine that has no model."""

from __future__ import annotations

import asyncio
import io
import signal
import socket
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from rich.console import Console

from eyas.client.chat import Conversation
from eyas.client.render import Painter, one_line, paint, table
from eyas.client.rest import Client, Piece, RestError, Settings, Summary
from gateway.request import QueueFull
from tests.helpers.fake_engine import ANSWER
from tests.helpers.processes import ROOT
from tests.helpers.rest_gateway import HELLO, Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
pytest_plugins = ["tests.helpers.rest_fixtures"]

SUMMARY = Summary("length", 30, 10, 27, 18, 2.8, {"draft": 100, "target": 700, "wire": 150, "gateway": 50})


@pytest_asyncio.fixture(loop_scope="module")
async def rest(gateway: Gateway) -> AsyncIterator[Client]:
    async with Client(gateway.url) as client:
        yield client


async def answer(rest: Client, settings: Settings) -> tuple[list[Piece], Summary]:
    *pieces, summary = [item async for item in rest.chat(HELLO, settings)]
    assert isinstance(summary, Summary)
    return [piece for piece in pieces if isinstance(piece, Piece)], summary


class TestRest:
    async def test_answer_comes_token_by_token_with_its_origin(self, rest: Client, gateway: Gateway) -> None:
        gateway.engine.answer = lambda request: list(b"abcdef")
        pieces, summary = await answer(rest, Settings(num_draft_tokens=2, max_tokens=5))
        drafted = [(piece.text, piece.drafted) for piece in pieces]
        assert drafted == [("a", True), ("b", True), ("c", False), ("d", True), ("e", True)]
        assert (summary.finish_reason, summary.completion_tokens, summary.num_rounds) == ("length", 5, 2)
        assert (summary.num_draft_tokens, summary.num_accepted_tokens, summary.acceptance_length) == (4, 4, 3.0)
        assert summary.times_ms == {"draft": 2, "target": 3, "wire": 4, "gateway": 5}
        assert summary.tokens_per_second == pytest.approx(5 / 0.014)

    async def test_characters_of_several_tokens_stay_whole(self, rest: Client) -> None:
        pieces, _ = await answer(rest, Settings())
        assert "".join(piece.text for piece in pieces) == f"{ANSWER}0"

    async def test_settings_reach_the_engine(self, rest: Client, gateway: Gateway) -> None:
        await answer(rest, Settings(temperature=0.5, max_tokens=7, seed=3, num_draft_tokens=4))
        await answer(rest, Settings(speculation=False))
        first, second = gateway.engine.requests
        assert (first.sampling.temperature, first.max_tokens, first.sampling.seed) == (0.5, 7, 3)
        assert (first.num_draft_tokens, second.num_draft_tokens) == (4, 0)

    async def test_model(self, rest: Client) -> None:
        model = await rest.model()
        assert (model["id"], model["eyas"]["head"]) == ("org/tiny", "tiny-head")

    async def test_refusal_has_the_gateways_words(self, rest: Client) -> None:
        with pytest.raises(RestError, match="the gateway refused: max_tokens: "):
            await answer(rest, Settings(max_tokens=-1))

    async def test_refusal_by_a_full_queue(self, rest: Client, gateway: Gateway) -> None:
        gateway.engine.error, gateway.engine.fail_at = QueueFull("4 requests are waiting already"), 0
        with pytest.raises(RestError, match="the gateway refused: 4 requests are waiting already"):
            await answer(rest, Settings())

    async def test_failure_within_the_answer(self, rest: Client, gateway: Gateway) -> None:
        gateway.engine.fail_at = 1
        with pytest.raises(RestError, match="the round went wrong"):
            await answer(rest, Settings())

    async def test_no_gateway(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        async with Client(f"http://127.0.0.1:{port}") as client:
            with pytest.raises(RestError, match=f"no connection to http://127.0.0.1:{port}: "):
                await client.model()
            with pytest.raises(RestError, match=r"did not come up within 0\.2 s"):
                await client.wait_until_healthy(0.2)

    async def test_waits_until_healthy(self, rest: Client, gateway: Gateway) -> None:
        gateway.healthy = False
        waiting = asyncio.ensure_future(rest.wait_until_healthy(60))
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        gateway.healthy = True
        await waiting

    @pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port"])
    async def test_what_is_no_address_is_refused(self, url: str) -> None:
        with pytest.raises(RestError):
            Client(url)


def terminal(colour: bool) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=colour,
        color_system="standard" if colour else None,
        width=80,
        _environ={},
    )


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class TestRender:
    async def test_marks_without_colour_stand_close_to_the_words(self) -> None:
        console = terminal(colour=False)
        painter = Painter(console)
        for text, drafted in [("An", False), (" eagle", True), (" dives", True), (".", False), ("\n", True)]:
            painter.show(Piece(text, drafted))
        painter.show(Piece("[bold]", True))
        painter.end()
        assert shown(console) == "An «eagle dives».\n«[bold]»\n"
        assert painter.text == "An eagle dives.\n[bold]"

    async def test_colour_marks_drafted_tokens_alone(self) -> None:
        console = terminal(colour=True)
        painter = Painter(console)
        painter.show(Piece("An", False))
        painter.show(Piece(" eagle", True))
        painter.end()
        assert shown(console) == "An\x1b[4;32m eagle\x1b[0m\n"

    async def test_long_lines_are_left_to_the_terminal(self) -> None:
        console = terminal(colour=False)
        Painter(console).show(Piece("word " * 100, False))
        assert shown(console) == "word " * 100

    async def test_paint_shows_and_sums_up(self, rest: Client) -> None:
        console = terminal(colour=False)
        summary = await paint(rest.chat(HELLO, Settings(num_draft_tokens=0)), Painter(console))
        assert shown(console) == f"{ANSWER}0\n"
        assert summary.finish_reason == "stop"
        assert summary.acceptance_length is None

    async def test_summary_in_a_line(self) -> None:
        assert (
            one_line(SUMMARY) == "30 tokens, 30.0 tokens/s, 10 rounds, acceptance length 2.80, cut at the limit"
        )

    async def test_summary_as_a_table(self) -> None:
        console = terminal(colour=False)
        console.print(table(SUMMARY))
        rows = [" ".join(line.split()) for line in shown(console).splitlines()]
        assert rows == [
            "tokens 30 in 1.00 s",
            "tokens/s 30.0",
            "rounds 10",
            "draft tokens 18 accepted of 27",
            "acceptance length 2.80",
            "time draft 10.0%, target 70.0%, wire 15.0%, gateway 5.0%",
        ]


class TestConversation:
    """`take` runs an event loop of its own, as the prompt does; the gateway's loop is this test's."""

    @staticmethod
    async def say(gateway: Gateway, *lines: str, system: str = "") -> tuple[str, list[bool]]:
        console = terminal(colour=False)
        conversation = Conversation(gateway.url, Settings(num_draft_tokens=2), system, console)
        going_on = [await asyncio.to_thread(conversation.take, line) for line in lines]
        return shown(console), going_on

    async def test_turns_add_up(self, gateway: Gateway) -> None:
        output, _ = await self.say(gateway, "one", "two", system="be brief")
        first, second = (gateway.tokenizer().decode(list(r.prompt_ids)) for r in gateway.engine.requests)
        assert "be brief" in first
        assert "one" in first
        assert second.index("be brief") < second.index("one") < second.index(f"{ANSWER}0") < second.index("two")
        assert output.count("tokens/s") == 2

    async def test_commands(self, gateway: Gateway) -> None:
        lines = ("/k 5", "one", "/speculation off", "two", "/speculation on", "/reset", "three", "/quit")
        output, going_on = await self.say(gateway, *lines)
        assert [request.num_draft_tokens for request in gateway.engine.requests] == [5, 0, 5]
        assert "one" not in gateway.tokenizer().decode(list(gateway.engine.requests[2].prompt_ids))
        assert going_on == [True] * 7 + [False]
        for said in ("5 draft tokens a round", "speculation is off", "speculation is on", "starts anew"):
            assert said in output

    @pytest.mark.parametrize("line", ["/help", "/k", "/k many", "/speculation maybe", "/nonsense"])
    async def test_help(self, gateway: Gateway, line: str) -> None:
        output, _ = await self.say(gateway, line)
        assert "/speculation on|off" in output
        assert gateway.engine.requests == []

    async def test_failed_turn_is_forgotten(self, gateway: Gateway) -> None:
        console = terminal(colour=False)
        conversation = Conversation(gateway.url, Settings(), "", console)
        gateway.engine.fail_at = 1
        await asyncio.to_thread(conversation.take, "one")
        gateway.engine.fail_at = None
        await asyncio.to_thread(conversation.take, "two")
        assert "error: the round went wrong" in shown(console)
        assert "one" not in gateway.tokenizer().decode(list(gateway.engine.requests[1].prompt_ids))

    async def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(self, gateway: Gateway) -> None:
        gateway.engine.hang_at = 1
        chat = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "eyas", "chat", "--url", gateway.url),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write(b"one\n")
        # The legend-free answer begins with what the first round brought.
        await chat.stdout.readuntil(b"Hel")
        chat.send_signal(signal.SIGINT)
        await gateway.engine.wait_for(num_open=0)
        gateway.engine.hang_at = None
        output, _ = await chat.communicate(b"two\n/quit\n")
        assert chat.returncode == 0
        assert output.count(b"tokens/s") == 1
        # What had come of the stopped answer stays in the conversation.
        second = gateway.tokenizer().decode(list(gateway.engine.requests[1].prompt_ids))
        assert second.index("one") < second.index("Hel") < second.index("two")
