"""The limit on descriptors: raised while a node is open, and put back."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator

import pytest

from aiogpu.errors import NodeStartError
from aiogpu.memory.control_page import SLOTS
from aiogpu.runtime.descriptors import (
    NOFILE,
    PER_SLOT,
    RESERVE,
    DescriptorLimit,
    raised,
    slots_within,
    soft_limit,
    used_descriptors,
)

ALL = RESERVE + PER_SLOT * SLOTS
ENDLESS = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "becomes"),
    [
        (1024, 1 << 20, 100 + ALL),
        (1024, 4096, 4096),
        (1024, 1024, 1024),
        (1024, ENDLESS, 100 + ALL),
        (100 + ALL, 1 << 20, 100 + ALL),
        (1 << 19, 1 << 20, 1 << 19),
        (ENDLESS, ENDLESS, ENDLESS),
    ],
)
def test_what_a_limit_is_raised_to(soft: int, hard: int, becomes: int) -> None:
    assert raised(soft, hard, used=100) == becomes


@pytest.mark.parametrize(
    ("soft", "slots"),
    [(1024, 178), (100 + ALL, SLOTS), (1 << 20, SLOTS), (ENDLESS, SLOTS), (90, 0)],
)
def test_for_how_many_slots_there_is_room(soft: int, slots: int) -> None:
    assert slots_within(soft, used=100) == slots


@pytest.fixture
def low() -> Iterator[int]:
    """A soft limit that is too low for anything, in this process."""
    soft, hard = resource.getrlimit(NOFILE)
    low = used_descriptors() + RESERVE
    resource.setrlimit(NOFILE, (low, hard))
    yield low
    resource.setrlimit(NOFILE, (soft, hard))


def child_limit(limit: DescriptorLimit) -> int:
    """The soft limit of a child that was handed down what the program had."""
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    limit.hand_down(child.pid)
    soft, _ = resource.prlimit(child.pid, NOFILE)
    child.communicate()
    limit.hand_down(child.pid)  # it has ended: nothing to be done
    return soft


def test_it_is_raised_for_the_first_node_and_put_back_after_the_last(low: int) -> None:
    _, hard = resource.getrlimit(NOFILE)
    limit = DescriptorLimit()
    assert child_limit(limit) == low
    slots = limit.acquire()
    ours = raised(low, hard, used_descriptors())
    assert (soft_limit(), slots) == (ours, slots_within(ours, used_descriptors()))
    limit.acquire()
    assert child_limit(limit) == low
    assert repr(limit) == f"<DescriptorLimit {low} -> {ours}, 2 nodes>"
    limit.release()
    assert soft_limit() == ours
    limit.release()
    assert soft_limit() == low
    assert child_limit(limit) == low


def test_what_the_program_sets_meanwhile_stands(low: int) -> None:
    _, hard = resource.getrlimit(NOFILE)
    limit = DescriptorLimit()
    limit.acquire()
    resource.setrlimit(NOFILE, (low + 100, hard))
    limit.release()
    assert soft_limit() == low + 100
    limit.acquire()
    limit.release()
    assert soft_limit() == low + 100


def test_a_limit_that_is_high_enough_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = soft_limit()
    monkeypatch.setattr("aiogpu.runtime.descriptors.raised", lambda soft, *_: soft)
    limit = DescriptorLimit()
    limit.acquire()
    assert child_limit(limit) == soft_limit() == before
    limit.release()
    assert soft_limit() == before


def test_one_that_cannot_be_raised_must_do(
    low: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not in this sandbox")

    _, hard = resource.getrlimit(NOFILE)
    resource.setrlimit(NOFILE, (low + PER_SLOT, hard))
    limit = DescriptorLimit()
    with monkeypatch.context() as patch:
        patch.setattr("aiogpu.runtime.descriptors.resource.setrlimit", refuse)
        assert limit.acquire() == 1
        limit.release()
    assert "not in this sandbox" in caplog.text
    assert soft_limit() == low + PER_SLOT


def test_no_room_for_a_single_worker_is_an_error(
    low: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiogpu.runtime.descriptors.raised", lambda soft, *_: soft)
    with pytest.raises(NodeStartError) as caught:
        DescriptorLimit().acquire()
    told = str(caught.value)
    assert f"may have {low} descriptors open" in told
    assert "`ulimit -Hn`" in told
