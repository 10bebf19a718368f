"""Calls that are cancelled as soon as they are sent, and what needs their results."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import aiogpu
from tests.contract import value_tasks as v
from tests.support.gate import Gate

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("rayed")]


async def test_a_program_outlives_what_it_cancels_at_once(gate: Gate) -> None:
    """Ray alone would end it, as soon as the argument comes."""
    async with aiogpu.init(address="ray", num_cpus=4):
        for number in range(10):
            slow = v.gated.remote(gate.path, f"slow-{number}", number)
            for _ in range(10):
                v.give.remote(slow).cancel()
            await gate.entered(f"slow-{number}")
            gate.release(f"slow-{number}")
            assert await slow == number


async def test_cancelling_never_has_the_loop_wait(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While Ray does not say that it has taken a call up, the loop goes on turning."""
    async with aiogpu.init(address="ray", num_cpus=4):
        from aiogpu.engines.ray import cluster

        slow = v.gated.remote(gate.path, "slow", 1)
        await gate.entered("slow")
        when_done, cancel, here = (
            cluster.add_done_callback,
            cluster.cancel,
            threading.get_ident(),
        )
        may_answer, asked, cancelled_in = threading.Event(), [], []

        def answer_late(ref: Any, tell: Callable[[Any], object]) -> None:
            asked.append(ref)

            def come(found: Any) -> None:
                if threading.get_ident() != here:
                    may_answer.wait(60)
                tell(found)

            when_done(ref, come)

        def note_thread(ref: Any, *, force: bool = False) -> None:
            cancelled_in.append(threading.get_ident())
            cancel(ref, force=force)

        calls = [v.give.remote(slow) for _ in range(20)]
        with monkeypatch.context() as patched:
            patched.setattr(cluster, "add_done_callback", answer_late)
            patched.setattr(cluster, "cancel", note_thread)
            for call in calls:
                call.cancel()
                await asyncio.sleep(0)
            assert cancelled_in == []
            # What is cancelled after it was asked, the answer says nothing of.
            questions = len(asked)
            may_answer.set()
            async with asyncio.timeout(30):
                while len(cancelled_in) < len(calls):
                    await asyncio.sleep(0)
            assert len(asked) > questions
            assert here not in cancelled_in
        gate.release("slow")
        assert await slow == 1


async def test_what_is_cancelled_as_it_ends_ends_nobody_else() -> None:
    async with aiogpu.init(address="ray", num_cpus=4):
        for number in range(20):
            calls = [v.give.remote(number) for _ in range(10)]
            for call in calls[::2]:
                await asyncio.sleep(0)
                call.cancel()
            assert await asyncio.gather(*calls[1::2]) == [number] * 5


async def test_a_long_line_of_calls_is_told_of_one_that_came_too_late(
    gate: Gate,
) -> None:
    async with aiogpu.init(address="ray", num_cpus=4):
        last: Any = v.gated.options(timeout=1.0).remote(gate.path, "slow", 1)
        line = [last]
        for _ in range(1500):
            last = v.add.remote(last)
            line.append(last)
        for handle in (last, v.give.remote(line[0])):
            with pytest.raises(aiogpu.TaskTimeoutError, match="gated"):
                await handle
        await asyncio.wait(line)
