"""A supervisor over echo services: `python -m tests.helpers.supervised FOLDER [--break NAME] [--deaf NAME]`.

It says "ready" once they serve. `--break` has that service fail at its start; `--deaf` has it ignore SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from eyas.channel import open_channel, wait_until_serving
from eyas.errors import EyasError
from eyas.supervisor import Service, run_services
from tests.helpers.echo_service import TARGET_SERVICE

NAMES = ("target", "draft", "gateway")
BROKEN = "print('no weights here'); raise SystemExit(3)"


def service(name: str, folder: Path, *more: str) -> Service:
    """An echo service with its socket in `folder`; the one called draft may be restarted."""
    address = f"unix:{folder}/{name}.sock"

    async def until_serving() -> None:
        async with open_channel(address) as channel:
            await wait_until_serving(channel, TARGET_SERVICE, 60, lambda line: None, peer=name)

    command = [sys.executable, "-m", "tests.helpers.echo_service", address, "--parent", str(os.getpid())]
    return Service(name, [*command, "--name", name, *more], until_serving, restart=name == "draft")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--break", dest="broken")
    parser.add_argument("--deaf")
    options = parser.parse_args()

    def services(sockets: Path) -> list[Service]:
        made = [service(name, sockets, *["--deaf"] * (name == options.deaf)) for name in NAMES]
        return [
            Service(one.name, [sys.executable, "-c", BROKEN], one.until_serving, restart=one.restart)
            if one.name == options.broken
            else one
            for one in made
        ]

    def say(line: str) -> None:
        print(line, flush=True)

    async def body() -> None:
        say("ready")
        await asyncio.Event().wait()

    try:
        asyncio.run(run_services(services, body, folder=options.folder, say=say, echo=say))
    except EyasError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
