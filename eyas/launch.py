"""The three services as `eyas up` and `eyas demo` run them: one host, Unix sockets, one command line each."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas.channel import open_channel, wait_until_serving
from eyas.config import CommonConfig, ConfigError, DraftConfig, GatewayConfig, TargetConfig
from eyas.listen import check_port_free, free_port
from eyas.models import resolve_head, resolve_target
from eyas.names import DRAFT_SERVICE, TARGET_SERVICE
from eyas.options import arguments, configure
from eyas.supervisor import Say, Service


@dataclass(frozen=True)
class Stack:
    """What runs together; without a draft the gateway decodes plainly. `services` sets the addresses."""

    target: TargetConfig
    draft: DraftConfig | None
    gateway: GatewayConfig

    def _at(self, folder: Path) -> Stack:
        target, draft = f"unix:{folder}/target.sock", f"unix:{folder}/draft.sock"
        return Stack(
            replace(self.target, listen=target),
            replace(self.draft, listen=draft, target=target) if self.draft else None,
            replace(self.gateway, target=target, draft=draft if self.draft else None),
        )

    @property
    def url(self) -> str:
        """Where the gateway serves REST."""
        host = f"[{self.gateway.host}]" if ":" in self.gateway.host else self.gateway.host
        return f"http://{host}:{self.gateway.port}"

    def services(self, folder: Path) -> list[Service]:
        """Their processes in order of dependence, talking over Unix sockets in `folder`.

        Raises ConfigError where its path is too long.
        """
        stack, seconds = self._at(folder), self.gateway.wait_seconds
        services = [_grpc_service("target", stack.target, stack.target.listen, TARGET_SERVICE, seconds)]
        if stack.draft is not None:
            draft = _grpc_service("draft", stack.draft, stack.draft.listen, DRAFT_SERVICE, seconds)
            services.append(replace(draft, restart=True))

        async def until_serving() -> None:
            from eyas.client.rest import Client  # needs httpx, which the images of target and draft lack

            async with Client(self.url) as client:
                await client.wait_until_healthy(seconds)

        return [*services, Service("gateway", _command("gateway", stack.gateway), until_serving)]


def _grpc_service(name: str, config: CommonConfig, address: str, service: str, seconds: float) -> Service:
    async def until_serving() -> None:
        async with open_channel(address) as channel:
            await wait_until_serving(channel, service, seconds, lambda line: None, peer=f"the {name}")

    return Service(name, _command(name, config), until_serving)


def _command(name: str, config: CommonConfig) -> list[str]:
    """`-P`: a folder named like one of our packages, where the user stands, is not ours."""
    return [sys.executable, "-P", "-m", "eyas", name, *arguments(config), "--parent", str(os.getpid())]


def make_stack(target: str, head: str | None, values: Mapping[str, Any]) -> Stack:
    """The services for a target and a head, given as the user names them; `values` are fields of their
    configurations. A port of 0 becomes a free one. Raises ConfigError and ListenError."""
    gateway = configure(GatewayConfig, values)
    gateway = replace(gateway, port=gateway.port or free_port(gateway.host))
    check_port_free(gateway.host, gateway.port)
    draft = None
    if head is not None:
        draft = configure(DraftConfig, values, head=Path(head), head_name=own_name(head))
        if gateway.num_draft_tokens > draft.max_draft_tokens:
            raise ConfigError(f"num_draft_tokens: must be at most max_draft_tokens, {draft.max_draft_tokens}")
    return Stack(
        configure(TargetConfig, values, model=Path(target), served_name=own_name(target)), draft, gateway
    )


def own_name(name: str) -> str:
    """What a model goes by: the last part of a folder's path, or the whole of any other name."""
    folder = Path(name).expanduser()
    return folder.resolve().name if folder.is_dir() else name


def find_models(stack: Stack, home: Path, say: Say) -> Stack:
    """The same with the models' folders, fetched into `home` where need be. Raises ModelError."""
    model = resolve_target(str(stack.target.model), home, progress=say)
    draft = stack.draft
    if draft is not None:
        draft = replace(draft, head=resolve_head(str(draft.head), home, progress=say))
    return replace(stack, target=replace(stack.target, model=model), draft=draft)
