"""Binding an address: a clear error when it is taken, and the life of a Unix socket's file."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path

import grpc

from eyas.config import socket_path, split_host_port
from eyas.errors import EyasError


class ListenError(EyasError):
    """An address that cannot be listened on."""


class Bound:
    """A server's address in use. A Unix socket is open to its own user alone; `release` removes its file."""

    def __init__(self, server: grpc.aio.Server, address: str) -> None:
        """Binds; raises ListenError."""
        self._path = socket_path(address)
        self._inode: int | None = None
        if self._path is None:
            self.address = _bind_tcp(server, address)
        else:
            _bind_unix(server, self._path)
            self.address, self._inode = address, self._path.stat().st_ino

    def release(self) -> None:
        """Removes the socket file, unless another server has put its own in that place."""
        if self._path is None:
            return
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()


def _bind_tcp(server: grpc.aio.Server, address: str) -> str:
    host, port = split_host_port(address)
    if port != 0:
        check_port_free(host, port)
    return f"{address.rpartition(':')[0]}:{_add_port(server, address)}"


def check_port_free(host: str, port: int) -> None:
    """Raises ListenError, with the system's reason, where nothing can listen on `host`:`port`."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ListenError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    refusals = [refusal for info in found if (refusal := _try_bind(info[0], info[4])) is not None]
    taken = [refusal for refusal in refusals if refusal.errno == errno.EADDRINUSE]
    if taken or len(refusals) == len(found):
        reason = os.strerror((taken or refusals)[0].errno or 0)
        raise ListenError(f"cannot listen on {host}:{port}: {reason}")


def free_port(host: str) -> int:
    """A TCP port on which something could listen just now."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        return int(probe.getsockname()[1])


def _try_bind(family: int, where: tuple[object, ...]) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        return error
    return None


def _bind_unix(server: grpc.aio.Server, path: Path) -> None:
    if not path.parent.is_dir():
        raise ListenError(f"cannot listen on unix:{path}: the folder {path.parent} does not exist")
    _check_socket_free(path)
    # The mask is set around the bind, so that the socket is never open to others, not even for a moment.
    mask = os.umask(0o177)
    try:
        _add_port(server, f"unix:{path}")
    finally:
        os.umask(mask)


def _check_socket_free(path: Path) -> None:
    """Raises ListenError where somebody listens; gRPC would take the address away from them without a word.

    The socket file of a crashed server may stay: gRPC replaces it.
    """
    if not os.path.lexists(path):
        return
    if not path.is_socket():
        raise ListenError(f"cannot listen on unix:{path}: a file that is no socket is in the way")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe,
        contextlib.suppress(ConnectionRefusedError),
    ):
        probe.connect(str(path))
        raise ListenError(f"cannot listen on unix:{path}: another process listens there")


def _add_port(server: grpc.aio.Server, address: str) -> int:
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ListenError(f"cannot listen on {address}: {error}") from None
