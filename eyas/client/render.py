"""How an answer looks on a terminal, and in a file: drafted tokens are marked, a table sums up."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eyas.client.rest import Piece, RestError, Summary

DRAFTED_STYLE = "green underline"
# Where there are no colours.
BEGIN_DRAFTED, END_DRAFTED = "«", "»"


class Painter:
    """Prints an answer as it comes, and keeps its text."""

    def __init__(self, console: Console) -> None:
        self.text = ""
        self._console = console
        self._in_colour = console.is_terminal and console.color_system is not None
        self._within_drafted = False

    def legend(self) -> None:
        """Says what the marks mean."""
        self.show(Piece("drafted by the head and accepted by the target", drafted=True))
        self.show(Piece(", all else drawn by the target", drafted=False))
        self.end()
        self.text = ""

    def show(self, piece: Piece) -> None:
        """Prints the text of one token."""
        self.text += piece.text
        if self._in_colour:
            self._print(Text(piece.text, style=DRAFTED_STYLE if piece.drafted else ""))
        else:
            self._show_marked(piece)

    def end(self) -> None:
        """Ends the answer, however far it came."""
        self._mark(False)
        self._print("\n")

    def _show_marked(self, piece: Piece) -> None:
        """Marks stand close to the words: white space around drafted text stays outside of them."""
        words = piece.text.lstrip()
        space = piece.text[: len(piece.text) - len(words)]
        if not piece.drafted:
            self._mark(False)
        self._print(space)
        if words:
            self._mark(piece.drafted)
        self._print(words)

    def _mark(self, drafted: bool) -> None:
        if not self._in_colour and drafted is not self._within_drafted:
            self._print(BEGIN_DRAFTED if drafted else END_DRAFTED)
            self._within_drafted = drafted

    def _print(self, text: Text | str) -> None:
        self._console.print(text, end="", soft_wrap=True, highlight=False, markup=False)


async def paint(items: AsyncGenerator[Piece | Summary, None], painter: Painter) -> Summary:
    """Shows an answer while it comes; its summary."""
    try:
        async with aclosing(items):
            async for item in items:
                if isinstance(item, Summary):
                    return item
                painter.show(item)
    finally:
        painter.end()
    raise RestError("the answer has no summary")


def one_line(summary: Summary) -> str:
    """The summary for a conversation."""
    words = [f"{summary.completion_tokens} tokens", f"{summary.tokens_per_second:.1f} tokens/s"]
    words.append(f"{summary.num_rounds} rounds")
    if summary.acceptance_length is not None:
        words.append(f"acceptance length {summary.acceptance_length:.2f}")
    if summary.finish_reason == "length":
        words.append("cut at the limit")
    return ", ".join(words)


def table(summary: Summary) -> Table:
    """The summary in full."""
    rows = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows.add_row("tokens", f"{summary.completion_tokens} in {summary.seconds:.2f} s")
    rows.add_row("tokens/s", f"{summary.tokens_per_second:.1f}", style="bold")
    rows.add_row("rounds", str(summary.num_rounds))
    rows.add_row("draft tokens", f"{summary.num_accepted_tokens} accepted of {summary.num_draft_tokens}")
    length = "nothing was drafted" if summary.acceptance_length is None else f"{summary.acceptance_length:.2f}"
    rows.add_row("acceptance length", length)
    total = sum(summary.times_ms.values()) or 1.0
    shares = [f"{part} {ms / total:.1%}" for part, ms in summary.times_ms.items()]
    rows.add_row("time", ", ".join(shares))
    return rows
