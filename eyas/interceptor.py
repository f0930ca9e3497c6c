"""Stands around every call: turns errors into statuses, counts open calls; a drain refuses new ones and ends the
streams of requests."""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
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
        self._reading: set[asyncio.Timeout] = set()  # streams that wait for their client's next request
        self._idle = asyncio.Event()
        self._idle.set()

    def drain(self) -> None:
        """From now on new calls end with UNAVAILABLE, and so do streams of requests: at once where they wait for
        the next one, else behind the answers to those that have been taken."""
        self._draining = True
        for reading in self._reading:
            reading.reschedule(0)

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
                if handler.request_streaming:
                    requests = self._until_drain(requests)
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

    async def _until_drain(self, requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
        """The requests of one stream. Raises StatusError in place of the next one once the server drains."""
        stream = aiter(requests)
        while not self._draining:
            try:
                async with asyncio.timeout(None) as reading:
                    self._reading.add(reading)
                    request = await anext(stream)
            except StopAsyncIteration:
                return
            except TimeoutError:
                break
            finally:
                self._reading.discard(reading)
            yield request
        raise unavailable(f"the {self._name} is draining")

    @asynccontextmanager
    async def _call(self, method: str, context: Context) -> AsyncIterator[None]:
        self._open_calls += 1
        self._idle.clear()
        try:
            if self._draining:
                raise unavailable(f"the {self._name} is draining")
            yield
        except StatusError as error:
            await context.abort_with_status(error.to_status())
        except asyncio.CancelledError as error:
            # Where the client has gone this is for nobody. But a handler that was cancelled from within would leave
            # its client waiting for ever.
            with suppress(grpc.aio.BaseError):
                await context.abort_with_status(self._ended(error).to_status())
            raise
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

    def _ended(self, error: asyncio.CancelledError) -> StatusError:
        """Whoever cancels a call may say why: `task.cancel(reason)`."""
        return unavailable(str(error) or f"the {self._name} ended the call")
