"""Stands around every call: turns errors into statuses, counts open calls, refuses new ones while draining."""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, TypeAlias

import grpc

from eyas.errors import StatusError, internal, unavailable

log = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

# Health and reflection answer to the very end, and their open streams hold nothing up.
_STANDARD_SERVICES = "/grpc."


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of one server: coroutines and async generators, no synchronous ones."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open_calls = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def refuse_calls(self) -> None:
        """From now on new calls end with UNAVAILABLE."""
        self._draining = True

    async def wait_idle(self, seconds: float) -> bool:
        """Waits until no call is open; False if some still are after `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        return self._idle.is_set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Called by gRPC for every call."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_STANDARD_SERVICES):
            return handler
        wrap = self._wrap_stream if handler.response_streaming else self._wrap_unary
        return wrap(handler, method)

    def _wrap_unary(self, handler: Handler, method: str) -> Handler:
        behaviour: Any = handler.stream_unary or handler.unary_unary

        async def run(request: Any, context: Context) -> Any:
            async with self._call(method, context):
                return await behaviour(request, context)

        make = (
            grpc.stream_unary_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(run, handler.request_deserializer, handler.response_serializer)

    def _wrap_stream(self, handler: Handler, method: str) -> Handler:
        behaviour: Any = handler.stream_stream or handler.unary_stream

        async def run(requests: Any, context: Context) -> None:
            async with self._call(method, context):
                if not inspect.isasyncgenfunction(behaviour):
                    await behaviour(requests, context)
                    return
                # A lease ends with its stream; gRPC would leave the generator to the garbage collector.
                async with aclosing(behaviour(requests, context)) as responses:
                    async for response in responses:
                        await context.write(response)

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_stream_rpc_method_handler
        )
        return make(run, handler.request_deserializer, handler.response_serializer)

    @asynccontextmanager
    async def _call(self, method: str, context: Context) -> AsyncIterator[None]:
        self._open_calls += 1
        self._idle.clear()
        try:
            if self._draining:
                raise unavailable(f"the {self._name} is shutting down")
            yield
        except StatusError as error:
            await context.abort_with_status(error.to_status())
        except grpc.aio.BaseError:
            # gRPC's own: the handler aborted, the client has gone, or the server was stopped.
            raise
        except Exception:
            request_id = secrets.token_hex(8)
            log.exception("request %s: %s failed", request_id, method)
            await context.abort_with_status(internal(request_id).to_status())
        finally:
            self._open_calls -= 1
            if self._open_calls == 0:
                self._idle.set()
