"""What stands around every HTTP request: its id, and the limit on its body."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.rest.errors import REQUEST_ID_HEADER, ApiError

_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class Envelope:
    """ASGI middleware: takes the request's id from X-Request-Id, or makes one, leaves it in
    `request.state.request_id` and returns it; refuses a body of more than `max_body_bytes` with 413."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get(REQUEST_ID_HEADER) or uuid.uuid4().hex
        if not _REQUEST_ID.fullmatch(request_id):
            error = ApiError(400, "1 to 128 visible ASCII characters are expected", param=REQUEST_ID_HEADER)
            await error.response()(scope, receive, send)
            return
        scope.setdefault("state", {})["request_id"] = request_id
        await self._app(scope, self._limited(receive), _with_id(send, request_id))

    def _limited(self, receive: Receive) -> Receive:
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body_bytes:
                raise HTTPException(413, f"the body is larger than {self._max_body_bytes} bytes")
            return message

        return limited


def _with_id(send: Send, request_id: str) -> Send:
    async def with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
        await send(message)

    return with_id
