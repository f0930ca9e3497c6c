"""Eyas on the CPU at batch 1, against transformers and against itself without speculation, in one run.

For every prompt, one after the other: transformers' `generate` (KV cache, greedy), Eyas with k = 0, Eyas with
speculation; all in bfloat16 on all cores. Prints medians over the prompts of tokens a second and of ratios within
a prompt, so that a machine that slows down in between does no harm.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import (
    Answer,
    Client,
    describe_machine,
    median,
    read_prompts,
    running_stack,
    target_folder,
)


def serve_transformers(folder: Path, threads: int) -> None:
    """Child process: answers prompts, one JSON line each way. It sleeps while Eyas is measured."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    for line in sys.stdin:
        request = json.loads(line)
        chat = [{"role": "user", "content": request["prompt"]}]
        inputs = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        began = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=request["max_tokens"], do_sample=False)
        seconds = time.perf_counter() - began
        num_tokens = output.shape[1] - inputs["input_ids"].shape[1]
        print(json.dumps({"tokens_per_second": num_tokens / seconds}), flush=True)


class Transformers:
    """The baseline, in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def tokens_per_second(self, prompt: str, max_tokens: int) -> float:
        """Of one greedy answer, prompt included."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._process.stdout.readline())["tokens_per_second"])


@contextmanager
def transformers_process(threads: int) -> Iterator[Transformers]:
    """Starts the baseline, and ends it."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.cpu",
        "--serve-transformers",
        str(target_folder()),
        "--threads",
        str(threads),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        yield Transformers(process)
        assert process.stdin is not None
        process.stdin.close()


async def measure(options: argparse.Namespace) -> None:
    """Runs everything and prints the table."""
    with transformers_process(options.threads) as baseline:
        async with running_stack(dtype="bfloat16") as client:
            warm_up = read_prompts(1)[0]
            baseline.tokens_per_second(warm_up, 16)
            await client.ask(warm_up, 16, options.k)
            rows = [
                await measure_prompt(baseline, client, prompt, options)
                for prompt in read_prompts(options.prompts)
            ]
    report(rows, options)


Row = tuple[float, Answer, Answer]


async def measure_prompt(
    baseline: Transformers, client: Client, prompt: str, options: argparse.Namespace
) -> Row:
    """Transformers' tokens a second, and Eyas's answers without and with speculation."""
    theirs = baseline.tokens_per_second(prompt, options.max_tokens)
    plain = await client.ask(prompt, options.max_tokens, 0)
    speculated = await client.ask(prompt, options.max_tokens, options.k)
    return theirs, plain, speculated


def report(rows: list[Row], options: argparse.Namespace) -> None:
    """Prints machine, medians and ratios."""
    theirs = [row[0] for row in rows]
    plain = [row[1].tokens_per_second for row in rows]
    speculated = [row[2].tokens_per_second for row in rows]
    drafts = sum(row[2].speculation["num_drafts"] for row in rows)
    accepted = sum(row[2].speculation["num_accepted_tokens"] for row in rows)
    same = sum(row[1].text == row[2].text for row in rows)
    print(describe_machine())
    print(
        f"SmolLM2-135M-Instruct, bfloat16, batch 1, {len(rows)} prompts, up to {options.max_tokens} new tokens, medians"
    )
    print(f"  transformers generate     {median(theirs):7.1f} tokens/s")
    print(f"  eyas, k = 0               {median(plain):7.1f} tokens/s   {ratio(plain, theirs)} x transformers")
    print(
        f"  eyas, k = {options.k}               {median(speculated):7.1f} tokens/s   {ratio(speculated, plain)} x k = 0"
    )
    print(f"  acceptance length         {1 + accepted / drafts:7.2f}")
    for k, answers in ((0, [row[1] for row in rows]), (options.k, [row[2] for row in rows])):
        print(f"  a round at k = {k}: {round_parts(answers)}")
    print(f"  same text with and without speculation: {same} of {len(rows)}")


def ratio(ours: list[float], theirs: list[float]) -> str:
    return f"{median([a / b for a, b in zip(ours, theirs, strict=True)]):.2f}"


def round_parts(answers: list[Answer]) -> str:
    """Milliseconds of a round, by where they went; medians over the prompts."""
    parts = {
        part: median([answer.times_ms[part] / answer.speculation["num_rounds"] for answer in answers])
        for part in ("draft", "target", "wire", "gateway")
    }
    outside = parts["wire"] + parts["gateway"]
    listed = ", ".join(f"{part} {value:.2f}" for part, value in parts.items())
    return f"{listed} ms; outside of computing {outside:.2f} ms"


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=10, help="how many of the 40 prompts (default 10)")
    parser.add_argument("--max-tokens", type=int, default=128, help="new tokens a prompt (default 128)")
    parser.add_argument("--k", type=int, default=3, help="draft tokens a round (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of transformers (default 2)")
    parser.add_argument("--serve-transformers", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_transformers is not None:
        serve_transformers(options.serve_transformers, options.threads)
    else:
        asyncio.run(measure(options))


if __name__ == "__main__":
    main()
