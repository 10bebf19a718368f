"""Placements that several programs know, as their node tells of them."""

from __future__ import annotations

import pytest

from aiogpu.api.lease import placement_site
from aiogpu.core.model.request import PACK, Bundle, PlacementGroupSpec, Request
from aiogpu.core.model.units import CPU
from aiogpu.errors import (
    InfeasibleError,
    NodeClosedError,
    PlacementNameError,
    PlacementRemovedError,
)
from aiogpu.runtime.callers.leases import REMEMBERED, StandingPlacements
from aiogpu.serialization.exceptions import RAISED, pack_failure


def site_of(name: str, key: str):
    bundle = Bundle.of(Request.of({CPU: 10_000}, {}))
    return placement_site(
        PlacementGroupSpec(key, name, PACK, (bundle,)), 0, is_detached=True
    )


class Watcher:
    """Notes what it is told."""

    pid = 1

    def __init__(self) -> None:
        self.told = []

    def receive(self, payload) -> None:
        self.told.append("granted")

    def reject(self, failed) -> None:
        self.told.append("refused")

    def fail(self, error) -> None:
        self.told.append(type(error).__name__)


@pytest.fixture
def standing():
    return StandingPlacements()


def take(standing, name="kept", key="1", task=7):
    """Ask for one; gives who watches it, and its own receiver."""
    watcher, own = Watcher(), []

    def submit(site, receiver):
        own.append(receiver)
        return task

    assert standing.take(site_of(name, key), watcher, submit) == task
    return watcher, *own


def test_all_who_know_it_are_told(standing):
    first, own = take(standing)
    (second,) = take(standing)
    assert repr(own) == "<Standing kept>"
    assert repr(standing) == "<StandingPlacements ['kept']>"
    own.receive(b"")
    (third,) = take(standing)
    assert first.told == second.told == third.told == ["granted"]
    cancelled = []
    standing.leave(7, third)
    standing.leave(7, third)
    assert standing.remove(7, cancelled.append, first)
    assert cancelled == [7]
    assert (first.told, third.told) == (["granted"], ["granted"])
    assert second.told == ["granted", "PlacementRemovedError"]
    assert not standing.remove(7, cancelled.append)
    standing.leave(7, first)


def test_its_name_is_free_when_it_is_no_more(standing):
    _, own = take(standing)
    with pytest.raises(PlacementNameError, match="is there already"):
        take(standing, key="2")
    assert standing.find("kept").key == "1"
    own.fail(NodeClosedError("closed"))
    with pytest.raises(PlacementNameError, match="no placement named 'kept'"):
        standing.find("kept")
    with pytest.raises(PlacementRemovedError, match="was removed before"):
        take(standing)
    take(standing, key="2", task=8)
    assert standing.find("kept").key == "2"


def test_one_that_is_refused_is_none(standing):
    def refuse(site, receiver):
        raise InfeasibleError("never")

    with pytest.raises(InfeasibleError):
        standing.take(site_of("kept", "1"), Watcher(), refuse)

    def reject(site, receiver):
        receiver.reject(pack_failure(0, RAISED, InfeasibleError("never"), ""))
        return 9

    watcher = Watcher()
    assert standing.take(site_of("kept", "2"), watcher, reject) == 9
    assert watcher.told == ["refused"]
    assert not standing.remove(9, print)
    take(standing, key="3")


def test_not_all_that_are_no_more_are_remembered(standing):
    for number in range(REMEMBERED + 2):
        take(standing, key=str(number))
        standing.remove(7, lambda task: None)
    take(standing, key="0")
