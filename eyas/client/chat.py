"""An interactive conversation with the served model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

# Importing it gives `input` a history and an editable line.
import readline  # noqa: F401

from rich.console import Console

from eyas.client.render import Painter, one_line, paint
from eyas.client.rest import Client, Json, RestError, Settings

HELP = """\
/speculation on|off   whether tokens are drafted; the text stays the same
/k N                  draft tokens a round; 0 decodes plainly
/reset                forget the conversation
/quit                 leave (so does Ctrl-D)
Ctrl-C stops an answer."""


class Conversation:
    """The turns so far, and how the next answer is made."""

    def __init__(self, url: str, settings: Settings, system: str, console: Console) -> None:
        self._url = url
        self._settings = settings
        self._system = system
        self._console = console
        self._turns: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forgets all turns but the system prompt."""
        self._turns = [{"role": "system", "content": self._system}] if self._system else []

    def take(self, line: str) -> bool:
        """Does what a line says, a command or a turn of the user. False once the user leaves."""
        if line == "/quit":
            return False
        if line.startswith("/"):
            self._console.print(self._command(*line.split()), style="dim", highlight=False, markup=False)
        elif line:
            self._ask(line)
        return True

    def _command(self, name: str, *values: str) -> str:
        match name, values:
            case "/speculation", ["on" | "off" as switch]:
                self._settings = dataclasses.replace(self._settings, speculation=switch == "on")
                return f"speculation is {switch}"
            case "/k", [number] if number.isdecimal():
                self._settings = dataclasses.replace(self._settings, num_draft_tokens=int(number))
                return f"{number} draft tokens a round"
            case "/reset", []:
                self.reset()
                return "the conversation starts anew"
            case _:
                return HELP

    def _ask(self, text: str) -> None:
        """Answers. An answer that fails leaves the conversation as it was; one that is stopped stays in it."""
        turns = [*self._turns, {"role": "user", "content": text}]
        painter = Painter(self._console)
        try:
            # Ctrl-C cancels the answer; the gateway sees the connection close.
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(self._answer(turns, painter))
        except RestError as error:
            self._console.print(f"error: {error}", style="red", highlight=False, markup=False)
        else:
            self._turns = [*turns, {"role": "assistant", "content": painter.text}]

    async def _answer(self, turns: list[dict[str, str]], painter: Painter) -> None:
        async with Client(self._url) as client:
            summary = await paint(client.chat(turns, self._settings), painter)
        self._console.print(one_line(summary), style="dim", highlight=False)


def converse(url: str, settings: Settings, system: str) -> None:
    """Reads lines until the user leaves. Raises RestError where there is no gateway at `url`."""
    console = Console()
    model = asyncio.run(_model(url))
    console.print(f"{model['id']} at {url}; /help lists the commands", highlight=False, markup=False)
    conversation = Conversation(url, settings, system, console)
    while True:
        try:
            if not conversation.take(input("> ").strip()):
                return
        except KeyboardInterrupt:
            console.print()
        except EOFError:
            console.print()
            return


async def _model(url: str) -> Json:
    async with Client(url) as client:
        return await client.model()
