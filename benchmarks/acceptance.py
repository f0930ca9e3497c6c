"""Acceptance length of the default head through the whole of Eyas, against a slow reference of the same head.

Both in float32 at temperature 0, on the MT-Bench first turns. The reference keeps no cache: in every round it
computes all slots again from the features of one teacher-forced pass by transformers. Acceptance length is
1 + accepted / rounds that drafted (vLLM's definition, the target's own token included).
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common import Answer, describe_machine, read_prompts, running_stack, target_folder
from eyas.models import DEFAULT_HEAD, resolve_head
from gateway.text import CONFIG_FILE, TOKENIZER_FILE, Tokenizer
from tests.helpers.reference_head import ReferenceHead, acceptance_length, target_features


@dataclass(frozen=True)
class Row:
    """Accepted drafts of every round of one prompt, by both."""

    ours: list[int]
    reference: list[int]


async def ask_all(options: argparse.Namespace) -> list[Answer]:
    """Eyas's answers."""
    async with running_stack(threads=options.threads, dtype="float32") as client:
        return [
            await client.ask(prompt, options.max_tokens, options.k, provenance=True)
            for prompt in read_prompts(options.prompts)
        ]


def compare(answers: list[Answer], options: argparse.Namespace) -> list[Row]:
    """Runs the reference along the same texts."""
    folder = target_folder()
    head = ReferenceHead(resolve_head(DEFAULT_HEAD, Path()), folder)
    tokenizer = Tokenizer({name: (folder / name).read_bytes() for name in (TOKENIZER_FILE, CONFIG_FILE)})
    rows = []
    for prompt, answer in zip(read_prompts(options.prompts), answers, strict=True):
        chat = tokenizer.render_chat([{"role": "user", "content": prompt}])
        prompt_ids = tokenizer.encode(chat, add_special_tokens=False)
        generated = [token["id"] for token in answer.tokens]
        features = target_features(folder, prompt_ids + generated, head.taps)
        reference = head.acceptance_run(prompt_ids, generated, features, options.k, options.max_tokens)
        rows.append(Row(accepted_by_round(answer, options.k), reference))
        print(
            f"  prompt {len(rows)}: eyas {mean(rows[-1].ours)}, reference {mean(rows[-1].reference)}",
            flush=True,
        )
    return rows


def accepted_by_round(answer: Answer, k: int) -> list[int]:
    """Committed drafts of every round that drafted: not the prompt's, and not one that had nothing to draft."""
    rounds: dict[int, list[str]] = {}
    for token in answer.tokens:
        rounds.setdefault(token["round"], []).append(token["source"])
    counts = [sources.count("draft") for number, sources in rounds.items() if number > 0]
    return counts[: answer.speculation["num_drafts"]] if k else []


def mean(counts: list[int]) -> str:
    """An acceptance length, or a dash where nothing was drafted."""
    return f"{acceptance_length(counts):.3f}" if counts else "-"


def report(rows: list[Row], options: argparse.Namespace) -> None:
    """Prints machine and both acceptance lengths."""
    ours = [count for row in rows for count in row.ours]
    reference = [count for row in rows for count in row.reference]
    same = sum(row.ours == row.reference for row in rows)
    print(describe_machine())
    print(
        f"SmolLM2-135M-Instruct and its EAGLE-3 head, float32, temperature 0, {len(rows)} MT-Bench first turns,"
        f" up to {options.max_tokens} new tokens"
    )
    print(f"  acceptance length at k = {options.k}: eyas {mean(ours)}, reference {mean(reference)}")
    ratio = acceptance_length(ours) / acceptance_length(reference)
    print(f"  ratio {ratio:.4f}; every round equal in {same} of {len(rows)} prompts ({len(ours)} rounds)")


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40, help="how many of the 40 prompts (default: all)")
    parser.add_argument("--max-tokens", type=int, default=256, help="new tokens a prompt (default 256)")
    parser.add_argument("--k", type=int, default=3, help="draft tokens a round (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        report(compare(asyncio.run(ask_all(options)), options), options)


if __name__ == "__main__":
    main()
