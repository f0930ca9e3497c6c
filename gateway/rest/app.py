"""The REST application: routes over a Generator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.telemetry import TelemetryConfig
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.request import Delta, GenerationError, GenerationRequest, Generator, ModelCard
from gateway.resolve import ContextLengthError, InvalidRequestError, UnknownModelError, resolve
from gateway.rest.answer import CHAT, COMPLETION, Answer, Style
from gateway.rest.envelope import Envelope
from gateway.rest.errors import ApiError, add_error_handlers, as_api_error
from gateway.rest.schema import ChatRequest, CompletionBase, CompletionRequest
from gateway.rest.streams import EventStream, merged, until_disconnect
from gateway.text import Tokenizer

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 2**20

Deltas = AsyncGenerator[tuple[int, Delta], None]


def create_app(
    generator: Generator,
    tokenizer: Callable[[], Tokenizer],
    *,
    is_healthy: Callable[[], bool],
    metrics: Callable[[], bytes],
    version: str,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    """OpenAI's API over `generator`. `tokenizer` raises TargetUnavailable while the target has not been
    reached; `metrics` gives Prometheus's text format."""
    # The gateway makes spans of its own.
    off = TelemetryConfig(tracing=False, metrics=False, logs=False)
    app = FastAPI(title="Eyas", version=version, telemetry=off)
    app.add_middleware(Envelope, max_body_bytes=max_body_bytes)
    add_error_handlers(app)
    _add_generation(app, _Completions(generator, tokenizer))
    _add_models(app, generator)

    @app.get("/health")
    async def health() -> dict[str, str]:
        if not is_healthy():
            raise ApiError(503, "the target cannot be reached", code="service_unavailable")
        return {"status": "ok"}

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def get_version() -> dict[str, str]:
        return {"version": version}

    return app


def _add_generation(app: FastAPI, completions: _Completions) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await completions.respond(CHAT, body, request)

    @app.post("/v1/completions")
    async def text_completions(body: CompletionRequest, request: Request) -> Response:
        return await completions.respond(COMPLETION, body, request)


def _add_models(app: FastAPI, generator: Generator) -> None:
    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(generator.card)]}

    @app.get("/v1/models/{model:path}")
    async def get_model(model: str) -> dict[str, Any]:
        card = generator.card
        if model != card.model:
            raise _unknown_model(UnknownModelError(model))
        return _model(card)


class _Completions:
    """What the two routes share: from a body to a response."""

    def __init__(self, generator: Generator, tokenizer: Callable[[], Tokenizer]) -> None:
        self._generator = generator
        self._tokenizer = tokenizer

    async def respond(self, style: Style, body: CompletionBase, request: Request) -> Response:
        """A whole answer or a stream of chunks. An error before the first chunk has a status of its own."""
        card, tokenizer = self._generator.card, self._tokenizer()
        requests = await self._resolve(body, request, card, tokenizer)
        answer = Answer(
            style,
            requests,
            card,
            tokenizer,
            include_usage=body.include_usage,
            provenance=body.eyas.provenance,
        )
        deltas: Deltas = merged([self._generator.generate(resolved) for resolved in requests])
        if body.stream:
            events = _events(answer, deltas)
            return EventStream(await until_disconnect(request.receive, anext(events)), events)
        whole = await until_disconnect(request.receive, _whole(answer, deltas))
        return Response(orjson.dumps(whole), media_type="application/json")

    async def _resolve(
        self, body: CompletionBase, request: Request, card: ModelCard, tokenizer: Tokenizer
    ) -> list[GenerationRequest]:
        request_id = request.state.request_id
        traceparent = request.headers.get("traceparent", "")
        try:
            return await asyncio.to_thread(
                resolve, body.ask(), card, tokenizer, request_id=request_id, traceparent=traceparent
            )
        except UnknownModelError as error:
            raise _unknown_model(error) from error
        except InvalidRequestError as error:
            param = body.param(error.field)
            code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
            raise ApiError(400, f"{param}: {error}", param=param, code=code) from error


async def _whole(answer: Answer, deltas: Deltas) -> dict[str, Any]:
    async with aclosing(deltas):
        async for index, delta in deltas:
            answer.take(index, delta)
    return answer.body()


async def _events(answer: Answer, deltas: Deltas) -> AsyncGenerator[bytes, None]:
    """Server-sent events, those of one delta together. Once the status is out, an error is an event too."""
    begun = False
    try:
        async with aclosing(deltas):
            async for index, delta in deltas:
                if chunks := answer.chunks(index, delta):
                    begun = True
                    yield _encode(chunks)
    except Exception as error:
        if not begun:
            raise
        if not isinstance(error, GenerationError):
            log.exception("a stream failed")
        yield _encode([as_api_error(error).body])
    else:
        yield b"data: [DONE]\n\n"


def _encode(chunks: list[dict[str, Any]]) -> bytes:
    return b"".join(b"data: %b\n\n" % orjson.dumps(chunk) for chunk in chunks)


def _unknown_model(error: UnknownModelError) -> ApiError:
    return ApiError(404, str(error), param="model", code="model_not_found")


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.model,
        "object": "model",
        "created": card.created,
        "owned_by": "eyas",
        "max_model_len": card.context_length,
        "eyas": {
            "head": card.head,
            "default_draft_tokens": card.default_draft_tokens,
            "max_draft_tokens": card.max_draft_tokens,
        },
    }
