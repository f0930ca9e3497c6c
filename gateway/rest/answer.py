"""Bodies of the responses: whole answers and chunks, for chats and for plain completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gateway.request import CommittedToken, Delta, GenerationRequest, GenerationStats, ModelCard, RoundTimes
from gateway.text import TextStream, Tokenizer

Json = dict[str, Any]


@dataclass(frozen=True)
class Style:
    """What differs between the two routes."""

    id_prefix: str
    whole: str  # "object" of a whole answer
    chunk: str  # "object" of a chunk
    is_chat: bool

    def whole_choice(self, text: str) -> Json:
        """The choice of a whole answer."""
        return {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}

    def chunk_choice(self, text: str) -> Json:
        """The choice of a chunk."""
        return {"delta": {"content": text}} if self.is_chat else {"text": text}

    def first_choice(self) -> Json | None:
        """The choice of the chunk that comes before the first text, where there is one."""
        return {"delta": {"role": "assistant", "content": ""}} if self.is_chat else None

    def last_choice(self) -> Json:
        """The choice of the chunk that has the reason of the finish."""
        return {"delta": {}} if self.is_chat else {"text": ""}


CHAT = Style("chatcmpl-", "chat.completion", "chat.completion.chunk", is_chat=True)
COMPLETION = Style("cmpl-", "text_completion", "text_completion", is_chat=False)


class _Choice:
    """One answer as far as it has come."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self.request = request
        self.text: list[str] = []
        self.tokens: list[Json] = []
        self.finish_reason: str | None = None
        self.stats: GenerationStats | None = None
        self.token_text = TextStream(tokenizer)
        self.begun = False

    def take(self, delta: Delta) -> None:
        self.text.append(delta.text)
        if delta.finish_reason is not None:
            self.finish_reason, self.stats = delta.finish_reason.value, delta.stats


class Answer:
    """The answer to one HTTP request, made of the deltas of its choices.

    Provenance, where it is asked for, lists every token with who proposed it (`source`), its `round`, its
    `choice`, and the `text` that it completed: the part of the answer that became whole characters with it,
    before a stop string is cut off.
    """

    def __init__(
        self,
        style: Style,
        requests: Sequence[GenerationRequest],
        card: ModelCard,
        tokenizer: Tokenizer,
        *,
        include_usage: bool,
        provenance: bool,
    ) -> None:
        self._style = style
        self._card = card
        self._choices = [_Choice(request, tokenizer) for request in requests]
        self._include_usage = include_usage
        self._provenance = provenance
        self._head: Json = {
            "id": style.id_prefix + requests[0].request_id,
            "created": int(time.time()),
            "model": card.model,
        }

    def take(self, index: int, delta: Delta) -> None:
        """Adds what a round gave to choice `index`, for `body`."""
        choice = self._choices[index]
        choice.take(delta)
        if self._provenance:
            choice.tokens += self._tokens(index, delta.tokens)

    def body(self) -> Json:
        """The whole answer, once every choice is finished."""
        choices = [
            self._choice(i, self._style.whole_choice("".join(choice.text)), choice.finish_reason)
            for i, choice in enumerate(self._choices)
        ]
        eyas = self._summary()
        if self._provenance:
            eyas["tokens"] = [token for choice in self._choices for token in choice.tokens]
        head = {**self._head, "object": self._style.whole}
        return {**head, "choices": choices, "usage": self._usage(), "eyas": eyas}

    def chunks(self, index: int, delta: Delta) -> list[Json]:
        """The chunks for what a round gave to choice `index`; none where all its text is held back."""
        choice, style, chunks = self._choices[index], self._style, []
        choice.take(delta)
        if not choice.begun and (first := style.first_choice()) is not None:
            chunks.append(self._chunk([self._choice(index, first, None)]))
        choice.begun = True
        if delta.text or self._provenance:
            chunks.append(self._chunk([self._choice(index, style.chunk_choice(delta.text), None)]))
        if self._provenance:
            chunks[-1]["eyas"] = {"tokens": self._tokens(index, delta.tokens)}
        if delta.finish_reason is not None:
            chunks.append(self._chunk([self._choice(index, style.last_choice(), choice.finish_reason)]))
            if all(choice.stats for choice in self._choices):
                self._end(chunks)
        return chunks

    def _end(self, chunks: list[Json]) -> None:
        if self._include_usage:
            chunks.append(self._chunk([]) | {"usage": self._usage()})
        chunks[-1]["eyas"] = self._summary()

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._head, "object": self._style.chunk, "choices": choices}
        return {**chunk, "usage": None} if self._include_usage else chunk

    def _choice(self, index: int, content: Json, finish_reason: str | None) -> Json:
        return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}

    def _tokens(self, index: int, tokens: Sequence[CommittedToken]) -> list[Json]:
        stream, eos = self._choices[index].token_text, self._card.eos_token_ids
        return [
            {
                "id": token.id,
                "source": token.source.value,
                "round": token.round,
                "choice": index,
                "text": "" if token.id in eos else stream.push(token.id),
            }
            for token in tokens
        ]

    def _usage(self) -> Json:
        """A prompt counts once, however many choices it has."""
        asked_once = [choice for choice in self._choices if choice.request.sampling.choice_index == 0]
        num_prompt = sum(len(choice.request.prompt_ids) for choice in asked_once)
        num_completion = sum(stats.completion_tokens for stats in self._stats)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        }

    @property
    def _stats(self) -> list[GenerationStats]:
        return [choice.stats for choice in self._choices if choice.stats is not None]

    def _summary(self) -> Json:
        """Sums over the choices."""
        return {
            "seed": self._choices[0].request.sampling.seed,
            "speculation": _speculation(self._stats),
            "times_ms": _times_ms(self._stats),
        }


def _speculation(stats: Sequence[GenerationStats]) -> Json:
    num_drafts = sum(s.num_drafts for s in stats)
    num_accepted = sum(s.num_accepted_tokens for s in stats)
    return {
        "num_rounds": sum(s.num_rounds for s in stats),
        "num_drafts": num_drafts,
        "num_draft_tokens": sum(s.num_draft_tokens for s in stats),
        "num_accepted_tokens": num_accepted,
        "acceptance_length": 1 + num_accepted / num_drafts if num_drafts else None,
    }


def _times_ms(stats: Sequence[GenerationStats]) -> Json:
    times = sum((s.times for s in stats), RoundTimes())
    seconds = {"queue": sum(s.queue_seconds for s in stats), **asdict(times)}
    return {part: round(1000 * value, 3) for part, value in seconds.items()}
