"""Proxies of a `multiprocessing.Manager` that bring the manager's key along."""

from __future__ import annotations

from multiprocessing.managers import SyncManager
from typing import Any

from aiogpu.serialization.managers import rebuild, reduce_proxy


class OwnForm:
    """A proxy of the user, who says how it is pickled."""

    def __reduce__(self) -> str:
        return "own"


def again(proxy: Any) -> Any:
    make, arguments = reduce_proxy(proxy)
    assert make is rebuild
    return rebuild(*arguments)


def test_a_rebuilt_proxy_and_those_that_it_returns_have_the_managers_key() -> None:
    """It is not the key of this process."""
    with SyncManager(authkey=b"own") as manager:
        outer = again(manager.dict(inner=manager.dict(number=1)))
        inner = outer["inner"]
        inner["number"] += 1
        assert dict(outer["inner"]) == {"number": 2}


def test_a_proxy_that_says_how_it_is_pickled_is_left_alone() -> None:
    assert reduce_proxy(OwnForm()) == "own"


def test_a_manager_that_sends_xml_keeps_its_connections() -> None:
    with SyncManager(authkey=b"own", serializer="xmlrpclib") as manager:
        items = again(manager.list([1, 2]))
        assert items.count(2) == 1
