"""A block that ends by an exception frees what it held, though the error is kept.

The traceback of a kept error refers to the frames of the block, and so to its objects.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import pytest

from aiogpu import errors, sync
from aiogpu.types import Node
from tests.contract.block_actors import Holder
from tests.support import program
from tests.support.waits import LIMIT, until_free

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=2, num_gpus=1),
]


@pytest.fixture
def plain_node(address: str) -> Iterator[Any]:
    with sync.init(address=address, num_cpus=2, num_gpus=1) as node:
        yield node


BLOCKS: Final[dict[str, Callable[[], AbstractContextManager[Any]]]] = {
    "placement": lambda: sync.placement([{"GPU": 1}]),
    "lease": lambda: sync.lease(num_gpus=1),
    "actor": Holder.remote,
    "pool": lambda: sync.ActorPool(Holder, size=1),
}


def kept_error(make: Callable[[], AbstractContextManager[Any]]) -> BaseException:
    """Raise in the block, or while it is entered; return the error."""
    try:
        with make() as entered:
            raise LookupError(entered)
    except BaseException as error:
        return error
    raise AssertionError(make)


def wait_until_free() -> None:
    ends = time.monotonic() + LIMIT
    while sync.available_resources()["GPU"] != 1:
        assert time.monotonic() < ends, "the GPU is still held"


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_that_raises_frees_its_gpu(plain_node: Any, block: str) -> None:
    kept = kept_error(BLOCKS[block])
    wait_until_free()
    assert isinstance(kept, LookupError)


def test_an_actor_that_fails_on_entry_frees_its_gpu(plain_node: Any) -> None:
    kept = kept_error(lambda: Holder.remote("fail"))
    wait_until_free()
    assert isinstance(kept, errors.ActorDiedError)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_node_that_was_closed_in_the_block_is_no_error(
    plain_node: Any, block: str
) -> None:
    with BLOCKS[block]():
        sync.shutdown()


@pytest.mark.parametrize("block", ["placement", "lease", "actor", "pool"])
def test_ctrl_c_on_entry_frees_what_was_requested(tmp_path: Path, block: str) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    source = f"""
        import os, signal, sys, threading
        from aiogpu import sync
        from tests.contract.block_actors import Holder
        from tests.contract.test_ends_of_blocks import kept_error, wait_until_free

        fifo = {str(fifo)!r}
        makers = {{
            "placement": lambda: sync.placement([{{"GPU": 1}}]),
            "lease": lambda: sync.lease(num_gpus=1),
            "actor": lambda: Holder.remote(fifo),
            "pool": lambda: sync.ActorPool(lambda: Holder.remote(fifo), size=1),
        }}

        def interrupt(waits):
            if waits:
                while not any(task.name == {block!r} for task in sync.status().waiting):
                    pass
            else:
                with open(fifo) as opened:
                    opened.readline()
            os.kill(os.getpid(), signal.SIGINT)

        with sync.init(num_cpus=2, num_gpus=1):
            waits = {block!r} in ("placement", "lease")
            held = sync.lease(num_gpus=1, name="held") if waits else None
            if held:
                held.__enter__()
            threading.Thread(target=interrupt, args=(waits,)).start()
            kept = kept_error(makers[{block!r}])
            if held:
                held.__exit__(None, None, None)
            wait_until_free()
            print(type(kept).__name__)
    """
    assert program.run(source) == "KeyboardInterrupt\n"


@pytest.mark.needs("interrupts")
async def test_an_actor_that_is_not_awaited_to_the_end_frees_its_gpu(
    node: Node, tmp_path: Path
) -> None:
    """A time limit ends the wait for a slow constructor on entry."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    async def enter() -> None:
        async with Holder._wrapped.remote(str(fifo)):
            raise AssertionError

    entering = asyncio.create_task(enter())
    await asyncio.to_thread(_first_line, fifo)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError) as kept:
        await entering
    await until_free(GPU=1)
    del kept


def _first_line(fifo: Path) -> str:
    with fifo.open() as opened:
        return opened.readline()
