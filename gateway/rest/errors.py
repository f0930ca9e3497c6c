"""Every failure in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from eyas.errors import EyasError
from gateway.request import GenerationError, QueueFull, TargetUnavailable
from gateway.resolve import RETRY_AFTER_SECONDS
from gateway.rest.streams import ClientGone

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
CLIENT_GONE_STATUS = 499  # nobody reads it; the access log does


class ApiError(EyasError):
    """A refusal with its HTTP status; `param` is the field at fault, `code` one that programs compare with."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """What the client reads."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer."""
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if self.status == 429 else None
        return Response(orjson.dumps(self.body), self.status, headers, media_type="application/json")


def as_api_error(error: Exception) -> ApiError:
    """The refusal that stands for `error`; one that is nobody's plan says nothing about itself."""
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="rate_limit_exceeded")
    if isinstance(error, TargetUnavailable):
        return ApiError(503, str(error), code="service_unavailable")
    if isinstance(error, GenerationError):
        return ApiError(500, str(error), code="generation_failed")
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def add_error_handlers(app: FastAPI) -> None:
    """Gives every error of the application OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(GenerationError)
    async def failed(request: Request, error: GenerationError) -> Response:
        return as_api_error(error).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _validation_error(error.errors()[0]).response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path}"
        response = ApiError(error.status_code, f"{where}: {error.detail}").response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE_STATUS)

    @app.exception_handler(Exception)
    async def crashed(request: Request, error: Exception) -> Response:
        # Answered outside of the middleware that names the request, and logged by the server.
        response = as_api_error(error).response()
        response.headers[REQUEST_ID_HEADER] = request.state.request_id
        return response


def _validation_error(details: dict[str, Any]) -> ApiError:
    param = ".".join(str(part) for part in details["loc"][1:])
    if details["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {details['ctx']['error']}")
    if not param:
        return ApiError(400, "a JSON object is expected, sent with Content-Type: application/json")
    message = details["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}", param=param)
