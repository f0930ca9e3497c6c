"""What the benchmarks share: the machine's description, prompts, and the three services as `eyas up` runs them."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from eyas.launch import find_models, make_stack
from eyas.models import DEFAULT_HEAD, DEFAULT_TARGET, default_home, resolve_target
from eyas.supervisor import run_services

PROMPTS = Path(__file__).parent / "prompts" / "mt_bench.jsonl"
PACKAGES = ("eyas", "torch", "transformers", "grpcio")


def describe_machine() -> str:
    """One paragraph: when, where, and with which versions this ran."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        "?",
    )
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return (
        f"{datetime.date.today()}, {len(os.sched_getaffinity(0))} cores of {cpu},"
        f" Python {platform.python_version()}, {versions}"
    )


def _lines(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(path).read_text().splitlines()
    return []


def read_prompts(count: int) -> list[str]:
    """The first turns of that many MT-Bench questions, taken evenly over the categories' order."""
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    return [prompts[i * len(prompts) // count] for i in range(count)]


def target_folder() -> Path:
    """The default target, fetched if need be."""
    return resolve_target(DEFAULT_TARGET, default_home(os.environ), progress=print)


@dataclass(frozen=True)
class Answer:
    """One answer: its text, how long it took the client, and what the gateway says of it."""

    text: str
    num_tokens: int
    seconds: float
    speculation: dict[str, Any]
    times_ms: dict[str, float]
    tokens: list[dict[str, Any]]  # with provenance only: id, source and round of each

    @property
    def tokens_per_second(self) -> float:
        """Of the whole request, prompt included."""
        return self.num_tokens / self.seconds


class Client:
    """Asks the gateway for greedy chat answers."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=None, trust_env=False)

    async def ask(
        self, prompt: str, max_tokens: int, num_draft_tokens: int, provenance: bool = False
    ) -> Answer:
        """One chat answer at temperature 0."""
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "eyas": {"num_draft_tokens": num_draft_tokens, "provenance": provenance},
        }
        began = time.perf_counter()
        response = await self._http.post("/v1/chat/completions", json=body)
        seconds = time.perf_counter() - began
        response.raise_for_status()
        answer = response.json()
        return Answer(
            answer["choices"][0]["message"]["content"],
            answer["usage"]["completion_tokens"],
            seconds,
            answer["eyas"]["speculation"],
            answer["eyas"]["times_ms"],
            answer["eyas"].get("tokens", []),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()


@contextlib.asynccontextmanager
async def running_stack(**values: Any) -> AsyncIterator[Client]:
    """The three services with the default models; `values` are fields of their configurations."""
    stack = find_models(
        make_stack(DEFAULT_TARGET, DEFAULT_HEAD, {"port": 0, **values}), default_home(os.environ), print
    )
    serving, done = asyncio.Event(), asyncio.Event()

    async def body() -> None:
        serving.set()
        await done.wait()

    running = asyncio.create_task(
        run_services(stack.services, body, folder=None, say=print, echo=lambda line: None)
    )
    started = asyncio.create_task(serving.wait())
    await asyncio.wait((running, started), return_when=asyncio.FIRST_COMPLETED)
    started.cancel()
    try:
        if not running.done():
            async with Client(stack.url) as client:
                yield client
    finally:
        done.set()
        await running  # raises what stopped the services


def median(values: Sequence[float]) -> float:
    """The median, as a plain float."""
    return float(statistics.median(values))
