"""Probe of a container: `python -m eyas.healthcheck ADDRESS` exits with 0 if what serves there can be used."""

from __future__ import annotations

import argparse
import asyncio
import sys
import urllib.request

from eyas.channel import NotServing, open_channel, wait_until_serving

PROBE_SECONDS = 2.0


def probe(address: str) -> str | None:
    """What is wrong with the service at `unix:/path`, `host:port` or an http:// URL; None if it can be used."""
    try:
        if address.startswith("http://"):
            _probe_http(address)
        else:
            asyncio.run(_probe_grpc(address))
    except (NotServing, OSError) as error:
        return str(error)
    return None


async def _probe_grpc(address: str) -> None:
    """Asks grpc.health.v1 about the server as a whole; raises NotServing."""
    async with open_channel(address) as channel:
        await wait_until_serving(channel, "", PROBE_SECONDS, lambda reason: None, peer=address)


def _probe_http(url: str) -> None:
    """Raises OSError unless the URL answers with success. A proxy of the environment is not asked."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=PROBE_SECONDS):
        pass


def main() -> None:
    """Prints what is wrong to standard error."""
    parser = argparse.ArgumentParser(prog="python -m eyas.healthcheck", description=__doc__)
    parser.add_argument("address", help="unix:/path or host:port of a gRPC service, or an http:// URL")
    fault = probe(parser.parse_args().address)
    if fault is not None:
        sys.exit(fault)


if __name__ == "__main__":
    main()
