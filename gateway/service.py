"""The gateway process: REST and gRPC front doors over one round engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import version

import uvicorn
from fastapi import FastAPI
from opentelemetry.trace import Tracer

from eyas.channel import open_channel, wait_until_serving
from eyas.config import GatewayConfig
from eyas.listen import check_port_free
from eyas.names import GENERATION_SERVICE, TARGET_SERVICE
from eyas.runtime import run_until, stop_signals
from eyas.server import Server
from eyas.telemetry import start_tracing
from eyas.v1 import gateway_pb2_grpc
from gateway.draft_client import DraftClient
from gateway.drafting import Drafting
from gateway.engine import Engine
from gateway.grpc_service import GenerationService
from gateway.metrics import Metrics
from gateway.observer import Observer
from gateway.rest.app import create_app
from gateway.target_client import TargetClient

log = logging.getLogger(__name__)

DRAFT_SECONDS = 15.0
"""How long a start waits for the draft; after that, rounds go on without it until it comes."""
GRACE_SECONDS = 10
POLL_SECONDS = 0.02


async def run(config: GatewayConfig) -> None:
    """Waits for the target, then serves until a signal says stop; answers under way may finish within the grace.
    Raises EyasError for what the user can mend."""
    check_port_free(config.host, config.port)
    provider = start_tracing("eyas-gateway", config, config.trace_share)
    metrics = Metrics()
    tracer = provider.get_tracer("eyas") if provider is not None else None
    try:
        with stop_signals(lambda number: os._exit(128 + number)) as stop:
            async with running_engine(config, metrics, tracer) as engine:
                if await run_until(stop, asyncio.ensure_future(wait_for_services(config, engine))):
                    async with _grpc_server(config, engine):
                        await _serve_rest(config, rest_app(engine, metrics), stop)
    finally:
        if provider is not None:
            provider.shutdown()


@contextlib.asynccontextmanager
async def running_engine(
    config: GatewayConfig, metrics: Metrics, tracer: Tracer | None
) -> AsyncIterator[Engine]:
    """An engine that makes rounds, and tends its connections, inside the block."""
    target = TargetClient(config.target)
    draft = DraftClient(config.draft, config.draft_timeout_ms / 1000) if config.draft is not None else None
    engine = Engine(config, target, Drafting(draft), Observer(metrics, tracer))
    metrics.gauge("eyas_requests_running", "Requests that step", lambda: engine.num_running)
    metrics.gauge("eyas_requests_waiting", "Requests in the queue", lambda: engine.num_waiting)
    metrics.gauge("eyas_kv_usage", "Share of the target's KV pages in use", lambda: engine.kv_usage)
    metrics.gauge("eyas_degraded", "1 while a configured draft is away", lambda: engine.is_degraded)
    tasks = [asyncio.create_task(engine.run())]
    if draft is not None:
        tasks.append(asyncio.create_task(draft.keep_attached()))
    try:
        yield engine
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await target.close()
        if draft is not None:
            await draft.close()


async def wait_for_services(config: GatewayConfig, engine: Engine) -> None:
    """Returns once the engine is connected. Raises NotServing when the target does not come up in time, EyasError
    when it cannot be served; the draft may come later."""
    async with open_channel(config.target) as channel:
        peer = f"the target at {config.target}"
        await wait_until_serving(channel, TARGET_SERVICE, config.wait_seconds, log.info, peer=peer)
    while not engine.is_connected:
        if engine.fault is not None:
            raise engine.fault
        await asyncio.sleep(POLL_SECONDS)
    if not engine.is_degraded:
        return
    log.info("waiting for the draft at %s", config.draft)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(min(DRAFT_SECONDS, config.wait_seconds)):
            while engine.is_degraded:
                await asyncio.sleep(POLL_SECONDS)
            return
    log.warning("the draft at %s is not there yet: rounds go on without it", config.draft)


def rest_app(engine: Engine, metrics: Metrics) -> FastAPI:
    """The REST application over an engine."""
    return create_app(
        engine,
        engine.tokenizer,
        is_healthy=lambda: engine.is_connected,
        metrics=metrics.render,
        version=version("eyas"),
    )


@contextlib.asynccontextmanager
async def _grpc_server(config: GatewayConfig, engine: Engine) -> AsyncIterator[None]:
    if config.grpc_listen is None:
        yield
        return
    async with Server("gateway", config.grpc_listen) as server:
        service = GenerationService(engine, engine.tokenizer)
        gateway_pb2_grpc.add_GenerationServiceServicer_to_server(service, server.grpc)
        await server.start([GENERATION_SERVICE])
        await server.set_serving(True)
        log.info("gRPC API on %s", server.address)
        yield


class _RestServer(uvicorn.Server):
    """uvicorn without signal handlers of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve_rest(config: GatewayConfig, app: FastAPI, stop: asyncio.Event) -> None:
    server = _RestServer(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )
    serving = asyncio.ensure_future(server.serve())
    stopping = asyncio.ensure_future(stop.wait())
    log.info("REST API on http://%s:%d", config.host, config.port)
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    stopping.cancel()
    await serving
