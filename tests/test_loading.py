"""While aiogpu imports, the collector of garbage rests; afterwards it is as it was."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from weakref import ref

import pytest

from aiogpu.loading import Loading
from tests.program import run

MANY = 100_000


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """The tests have frozen what they began with."""
    gc.unfreeze()
    yield
    sys.modules.pop("made_up_by_a_test", None)
    gc.freeze()
    gc.enable()


class Cycle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


def load() -> None:
    """Have one module more; the fixture takes it away."""
    sys.modules["made_up_by_a_test"] = sys


def young() -> int:
    return sum(len(gc.get_objects(generation)) for generation in (0, 1))


def test_nothing_is_collected_in_the_block_nor_right_after_it() -> None:
    seen = []
    gc.callbacks.append(lambda phase, _info: seen.append(phase))
    try:
        with Loading():
            load()
            made: list[list[int]] = [[] for _ in range(MANY)]
            assert not gc.isenabled()
        assert gc.isenabled()
        assert young() < MANY
        assert seen == []
    finally:
        gc.callbacks.pop()
    assert len(made) == MANY


def test_garbage_from_before_is_found_later() -> None:
    cycle = Cycle()
    is_there = ref(cycle)
    del cycle
    with Loading():
        load()
    assert is_there()
    gc.collect()
    assert not is_there()


def test_a_block_in_a_block() -> None:
    with Loading():
        with Loading():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_block_that_begins_as_one_in_another_thread_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ending, beginning = Loading(), Loading()
    ending.__enter__()
    is_enabled = gc.isenabled

    def ask_late() -> bool:
        answer = is_enabled()
        ending.__exit__()
        return answer

    monkeypatch.setattr(gc, "isenabled", ask_late)
    beginning.__enter__()
    monkeypatch.undo()
    beginning.__exit__()
    assert gc.isenabled()


def test_a_ctrl_c_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def press() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "get_freeze_count", press)
    with pytest.raises(KeyboardInterrupt), Loading():
        load()
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off_also_after_an_error() -> None:
    gc.disable()
    with pytest.raises(ImportError), Loading():
        raise ImportError
    assert not gc.isenabled()


def test_what_a_program_has_frozen_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with Loading():
        load()
    assert gc.get_freeze_count() == frozen > 0
    assert gc.isenabled()


def test_where_all_is_there_already_nothing_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The frozen are counted one by one, and a large program may have millions."""
    for name in ("freeze", "unfreeze", "get_freeze_count"):
        monkeypatch.delattr(gc, name)
    with Loading():
        pass
    monkeypatch.undo()
    assert gc.isenabled()


def test_a_node_s_start_is_not_searched() -> None:
    told = run(
        """
        import asyncio, gc
        found = []
        async def main():
            import aiogpu
            aiogpu.init, aiogpu.remote
            gc.callbacks.append(lambda phase, info: found.append(info))
            async with aiogpu.init(num_cpus=1):
                pass
            full = [info for info in found if info["generation"] == 2]
            print(gc.isenabled(), gc.get_freeze_count(), len(full))
        asyncio.run(main())
        """
    )
    assert told.split() == ["True", "0", "0"]
