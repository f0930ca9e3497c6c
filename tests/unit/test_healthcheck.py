"""The containers' probe against real servers: gRPC on a Unix socket, HTTP on a port."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyas import healthcheck
from eyas.channel import NotServing
from eyas.server import Server


def probe(address: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "eyas.healthcheck", address]
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)


@pytest.fixture
def http_status() -> Iterator[tuple[str, list[int]]]:
    """URL of an HTTP server, and a list whose only item is the status it answers with."""
    status = [200]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status[0])
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/health", status
        server.shutdown()


async def test_grpc_health_decides(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    async with Server("test", address) as server:
        await server.start([])
        with pytest.raises(NotServing, match="not ready"):
            await healthcheck._probe_grpc(address)
        await server.set_serving(True)
        await healthcheck._probe_grpc(address)


def test_nobody_listens(tmp_path: Path) -> None:
    done = probe(f"unix:{tmp_path}/absent.sock")
    assert done.returncode == 1
    assert "absent.sock" in done.stderr
    assert "Traceback" not in done.stderr


def test_http_status_decides(http_status: tuple[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    url, status = http_status
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert probe(url).returncode == 0
    status[0] = 503
    done = probe(url)
    assert done.returncode == 1
    assert "503" in done.stderr
