"""What ends an actor or its process, in each phase of the actor's life."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

import aiogpu
from aiogpu import errors
from tests.contract import tasks
from tests.contract.actor_classes import Closing, Counter, Slow
from tests.support.errors import raises
from tests.support.gate import Gate
from tests.support.waits import until_free

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine", "node"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=2, num_gpus=1, log_to_driver=False),
]


@dataclass
class Begun:
    """An actor in some phase of its life.

    Attributes:
        actor: the actor; it holds the only GPU, or waits for it.
        call: a call of `add`, which has not begun.
        go_on: ends the phase, so that the actor serves calls.
    """

    actor: Any
    call: Any
    go_on: Callable[[], Awaitable[None]]


async def nothing() -> None:
    """Do nothing."""


async def waiting_for_a_gpu(gate: Gate, **options: Any) -> Begun:
    holder = await Counter.options(num_gpus=1).remote()
    actor = Counter.options(num_gpus=1, **options).remote()

    async def go_on() -> None:
        aiogpu.kill(holder)

    return Begun(actor, actor.add.remote(), go_on)


async def waiting_for_an_argument(gate: Gate, **options: Any) -> Begun:
    argument = tasks.gated.remote(gate.path, "argument")
    await gate.entered("argument")
    actor = Slow.options(num_gpus=1, **options).remote(gate.path, argument)

    async def go_on() -> None:
        await gate.let_pass("argument")
        assert await argument == "argument"
        gate.forget("argument")
        await gate.let_pass("argument")

    return Begun(actor, actor.add.remote(), go_on)


async def starting(gate: Gate, **options: Any) -> Begun:
    actor = Counter.options(num_gpus=1, **options).remote()
    return Begun(actor, actor.add.remote(), nothing)


async def constructing(gate: Gate, **options: Any) -> Begun:
    actor = Slow.options(num_gpus=1, **options).remote(gate.path)
    await gate.entered("constructor")

    async def go_on() -> None:
        await gate.let_pass("constructor")

    return Begun(actor, actor.add.remote(), go_on)


async def ready(gate: Gate, **options: Any) -> Begun:
    actor = await Counter.options(num_gpus=1, **options).remote()
    running = actor.gated.remote(gate.path, "running")
    await gate.entered("running")
    running.add_done_callback(lambda call: call.cancelled() or call.exception())
    return Begun(actor, actor.add.remote(), nothing)


async def restarting(gate: Gate, **options: Any) -> Begun:
    options["max_restarts"] += 1
    begun = await constructing(gate, **options)
    aiogpu.kill(begun.actor, no_restart=False)
    gate.forget("constructor")
    await gate.entered("constructor")
    return begun


needs_processes = pytest.mark.needs("processes")
PHASES = [
    waiting_for_a_gpu,
    pytest.param(waiting_for_an_argument, marks=needs_processes),
    starting,
    *(
        pytest.param(p, marks=needs_processes)
        for p in (constructing, ready, restarting)
    ),
]
each_phase = pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)


@each_phase
async def test_kill_ends_an_actor(phase: Any, gate: Gate) -> None:
    begun = await phase(gate, max_restarts=1)
    aiogpu.kill(begun.actor)
    await raises(errors.ActorDiedError, begun.call, begun.actor, match="was killed")
    await begun.actor._link.ended()


@each_phase
async def test_kill_uses_up_a_restart(phase: Any, gate: Gate) -> None:
    """Calls that have not begun are for the next process."""
    begun = await phase(gate, max_restarts=1)
    aiogpu.kill(begun.actor, no_restart=False)
    if phase in (constructing, restarting):
        gate.forget("constructor")  # it comes again
    await begun.go_on()
    assert await begun.call == 1
    assert await begun.actor is begun.actor
    aiogpu.kill(begun.actor, no_restart=False)
    call = begun.actor.add.remote()
    await raises(errors.ActorDiedError, call, begun.actor, match="killed")


@each_phase
async def test_kill_without_restarts_left_ends_an_actor(phase: Any, gate: Gate) -> None:
    begun = await phase(gate, max_restarts=0)
    aiogpu.kill(begun.actor, no_restart=False)
    await raises(errors.ActorDiedError, begun.call, begun.actor, match="killed")
    await begun.actor._link.ended()


@pytest.mark.parametrize("kills", [1, 2, 3])
async def test_each_kill_of_an_actor_that_waits_counts(kills: int, gate: Gate) -> None:
    begun = await waiting_for_a_gpu(gate, max_restarts=2)
    for _ in range(kills):
        aiogpu.kill(begun.actor, no_restart=False)
    await begun.go_on()
    if kills == 3:
        await raises(errors.ActorDiedError, begun.call, match="no restarts left")
    else:
        assert await begun.call == 1


@each_phase
async def test_cancel_of_a_call_leaves_the_actor_alone(phase: Any, gate: Gate) -> None:
    begun = await phase(gate, max_restarts=0)
    begun.call.cancel()
    await asyncio.gather(begun.call, return_exceptions=True)
    if phase is ready:
        gate.release("running")
    else:
        await begun.go_on()
    assert await begun.actor.add.remote() == 1


@pytest.mark.parametrize("no_restart", [True, False])
@pytest.mark.needs("processes")
async def test_kill_cuts_the_end_of_an_actor_short(
    no_restart: bool, gate: Gate
) -> None:
    """An actor that is ending does not restart."""
    actor = Closing.options(num_gpus=1, max_restarts=5).remote(
        gate.path, "it", "endless"
    )
    await actor
    leave = actor.leave_later.remote()
    await gate.entered("it-closing")
    aiogpu.kill(actor, no_restart=no_restart)
    await actor._link.ended()
    late = actor.add.remote()
    await raises(errors.ActorDiedError, leave, late)
    assert await Counter.options(num_gpus=1).remote().add.remote() == 1


@each_phase
async def test_an_actor_without_handles_ends(phase: Any, gate: Gate) -> None:
    begun = await phase(gate, max_restarts=3)
    begun.call.cancel()
    go_on = begun.go_on
    del begun
    gc.collect()
    if phase is ready:
        gate.release("running")
    elif phase is waiting_for_an_argument:
        gate.release("argument")  # the constructor never begins
    else:
        await go_on()
    del go_on
    await until_free()
