"""One question to a running gateway, its answer with the drafted tokens marked, and a summary."""

from __future__ import annotations

from rich.console import Console

from eyas.client.render import Painter, paint, table
from eyas.client.rest import Client, Settings


async def ask(url: str, question: str, settings: Settings) -> None:
    """Prints it all to standard output. Raises RestError."""
    console = Console()
    painter = Painter(console)
    async with Client(url) as client:
        model = await client.model()
        console.print(f"{model['id']} with the head {model['eyas']['head'] or '(none)'}", highlight=False)
        painter.legend()
        console.print(f"\n> {question}\n", highlight=False, markup=False)
        summary = await paint(client.chat([{"role": "user", "content": question}], settings), painter)
    console.print()
    console.print(table(summary))
