"""eyas.v1.GenerationService: the gateway for gRPC clients."""

from __future__ import annotations

import secrets
from asyncio import to_thread
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from eyas.errors import StatusError, invalid_argument, not_found, resource_exhausted, unavailable
from eyas.v1 import gateway_pb2 as pb
from eyas.v1 import gateway_pb2_grpc
from gateway.request import (
    Delta,
    FinishReason,
    GenerationError,
    GenerationRequest,
    GenerationStats,
    Generator,
    QueueFull,
    TargetUnavailable,
    TokenSource,
)
from gateway.resolve import (
    RETRY_AFTER_SECONDS,
    Ask,
    Chat,
    InvalidRequestError,
    Prompt,
    UnknownModelError,
    resolve,
)
from gateway.text import Tokenizer

_Context = grpc.aio.ServicerContext[Any, Any]

_SOURCES = {
    TokenSource.TARGET: pb.TOKEN_SOURCE_TARGET,
    TokenSource.DRAFT: pb.TOKEN_SOURCE_DRAFT,
}
_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_PROMPT_FIELDS = {"text": "text", "tokens": "tokens.ids", "chat": "chat.messages", None: "prompt"}
_FIELDS = {"speculation": "speculation.enabled", "num_draft_tokens": "speculation.num_draft_tokens"}


class GenerationService(gateway_pb2_grpc.GenerationServiceServicer):
    """Serves `generator`; runs behind the shared interceptor, which sends a StatusError as a status.

    `tokenizer` raises TargetUnavailable while the target has not been reached.
    """

    def __init__(self, generator: Generator, tokenizer: Callable[[], Tokenizer]) -> None:
        self._generator = generator
        self._tokenizer = tokenizer

    async def GetModel(self, request: pb.GetModelRequest, context: _Context) -> pb.GetModelResponse:
        """The served model."""
        with _as_status(request):
            card = self._generator.card
        return pb.GetModelResponse(
            model=card.model,
            context_length=card.context_length,
            head=card.head,
            default_draft_tokens=card.default_draft_tokens,
            max_draft_tokens=card.max_draft_tokens,
        )

    async def Generate(
        self, request: pb.GenerateRequest, context: _Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """One response for every round; the generation ends with the call, however that ends."""
        with _as_status(request):
            resolved = await self._resolve(request, context)
            async with aclosing(self._generator.generate(resolved)) as deltas:
                async for delta in deltas:
                    yield _response(delta, resolved.sampling.seed)

    async def _resolve(self, request: pb.GenerateRequest, context: _Context) -> GenerationRequest:
        metadata = dict(context.invocation_metadata() or ())
        [resolved] = await to_thread(
            resolve,
            _ask(request),
            self._generator.card,
            self._tokenizer(),
            request_id=str(metadata.get("x-request-id") or secrets.token_hex(16)),
            traceparent=str(metadata.get("traceparent", "")),
        )
        return resolved


def _ask(request: pb.GenerateRequest) -> Ask:
    def given(message: pb.GenerateRequest | pb.Speculation, field: str) -> Any:
        return getattr(message, field) if message.HasField(field) else None

    return Ask(
        prompts=[_prompt(request)],
        model=request.model,
        temperature=given(request, "temperature"),
        top_p=given(request, "top_p"),
        top_k=given(request, "top_k"),
        seed=given(request, "seed"),
        max_tokens=given(request, "max_tokens"),
        stop=tuple(request.stop),
        speculation=given(request.speculation, "enabled"),
        num_draft_tokens=given(request.speculation, "num_draft_tokens"),
    )


def _prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "tokens":
            return tuple(request.tokens.ids)
        case "chat":
            turns = request.chat.messages
            return Chat(tuple({"role": turn.role, "content": turn.content} for turn in turns))
        case _:
            raise InvalidRequestError("prompts", "one of text, tokens and chat is needed")


def _response(delta: Delta, seed: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        tokens=[pb.GeneratedToken(id=t.id, source=_SOURCES[t.source], round=t.round) for t in delta.tokens],
        text=delta.text,
        finished=_finished(delta.finish_reason, delta.stats, seed),
    )


def _finished(reason: FinishReason | None, stats: GenerationStats | None, seed: int) -> pb.Finished | None:
    if reason is None or stats is None:
        return None
    return pb.Finished(
        reason=_REASONS[reason],
        prompt_tokens=stats.prompt_tokens,
        completion_tokens=stats.completion_tokens,
        seed=seed,
        num_rounds=stats.num_rounds,
        num_drafts=stats.num_drafts,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
    )


@contextmanager
def _as_status(request: pb.GenerateRequest | pb.GetModelRequest) -> Iterator[None]:
    try:
        yield
    except UnknownModelError as error:
        raise not_found("model", str(error)) from error
    except InvalidRequestError as error:
        raise invalid_argument(_field(error.field, request), str(error)) from error
    except QueueFull as error:
        raise resource_exhausted(str(error), RETRY_AFTER_SECONDS) from error
    except TargetUnavailable as error:
        raise unavailable(str(error)) from error
    except GenerationError as error:
        raise StatusError(grpc.StatusCode.INTERNAL, "GENERATION_FAILED", str(error)) from error


def _field(field: str, request: pb.GenerateRequest | pb.GetModelRequest) -> str:
    """The proto's path of a field of Ask."""
    if field == "prompts" and isinstance(request, pb.GenerateRequest):
        return _PROMPT_FIELDS[request.WhichOneof("prompt")]
    return _FIELDS.get(field, field)
