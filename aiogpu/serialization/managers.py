"""Proxies of a `multiprocessing.Manager`, in any process of a program.

A proxy connects to its manager by the manager's key. multiprocessing gives the key only
to its own children; elsewhere a proxy, and each proxy that a call of it returns, takes
the key of its process, which the manager refuses. Here a proxy brings its key along and
passes it on to the proxies that it returns.
"""

from __future__ import annotations

import pickle
from functools import partial
from io import BytesIO
from multiprocessing.connection import Client
from multiprocessing.managers import RebuildProxy  # type: ignore[attr-defined]
from typing import Any


def reduce_proxy(proxy: Any) -> str | tuple[Any, ...]:
    """Reduce a proxy with the manager's key."""
    reduced: str | tuple[Any, ...] = proxy.__reduce__()
    if isinstance(reduced, str) or reduced[0] is not RebuildProxy:
        return reduced  # a class of the user that defines how it is pickled
    return rebuild, (bytes(proxy._authkey), *reduced[1])


def rebuild(
    key: bytes, kind: Any, token: Any, serializer: str, options: dict[str, Any]
) -> Any:
    """Make a proxy that uses the key, also for the proxies that its calls return."""
    proxy = RebuildProxy(kind, token, serializer, {**options, "authkey": key})
    if serializer == "pickle":
        proxy._Client = _connect
    return proxy


def _connect(address: Any, authkey: bytes) -> Any:
    connection: Any = Client(address, authkey=authkey)
    connection.recv = partial(_receive, connection.recv_bytes, authkey)
    return connection


def _receive(receive_bytes: Any, key: bytes) -> Any:
    return _Answer(receive_bytes(), key).load()


class _Answer(pickle.Unpickler):
    """An answer of the manager, whose proxies get the key."""

    def __init__(self, pickled: bytes, key: bytes) -> None:
        super().__init__(BytesIO(pickled))
        self._key = key

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return partial(rebuild, self._key) if found is RebuildProxy else found
