"""Large values: put, passed by handle, made by tasks, looked at, kept, spilled."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import aiogpu
from benchmarks.soak import tasks
from benchmarks.soak.operation import Operation
from benchmarks.soak.tasks import filled, fingerprint

SIZES: Final = (1 << 10, 1 << 18, 1 << 20, 5 << 20)


async def shared(one: Operation) -> None:
    """One value for several tasks, some of which keep it."""
    view = filled(one.hand.choice(SIZES), one.number)
    mark = fingerprint(view)
    value = one.begin("put", await aiogpu.put(view))
    handles: list[Any] = []
    for _ in range(one.hand.randrange(1, 6)):
        task = one.hand.choice((tasks.measure, tasks.keep))
        handles.append(one.begin(f"{task}", task.remote(value)))
    handles.append(one.begin("inside", tasks.measure_inside.remote([value, value])))
    del value, view
    for handle in handles[:-1]:
        await one.end(handle, mark)
    await one.end(handles[-1], [mark, mark])


async def passed_on(one: Operation) -> None:
    """From task to task; the last one comes here, and stays what it is."""
    size = one.hand.choice(SIZES)
    mark = fingerprint(filled(size, one.number))
    made = one.begin("make", tasks.make.remote(size, one.number))
    relayed = one.begin("relay", tasks.relay.remote(made))
    measured = one.begin("measure", tasks.measure.remote(relayed))
    await one.end(measured, mark)
    await one.end(relayed, lambda view: fingerprint(view) == mark)
    if not relayed.exception():
        view = relayed.result()
        del relayed, made
        await asyncio.sleep(one.hand.choice((0, 0.05, 0.3)))
        one.see("a view that was kept", fingerprint(view) == mark)


async def sent_along(one: Operation) -> None:
    """As an argument that is no handle."""
    view = filled(one.hand.choice(SIZES), one.number)
    handle = one.begin("measure", tasks.measure.remote(view))
    await one.end(handle, fingerprint(view))


async def given_up(one: Operation) -> None:
    """Who needs what was cancelled has not run, and is told."""
    made = one.begin("make", tasks.make.remote(SIZES[2], one.number))
    needs = one.begin("measure", tasks.measure.remote(made))
    await asyncio.sleep(one.hand.choice((0, 0, 0.005)))
    made.cancel()
    mark = fingerprint(filled(SIZES[2], one.number))
    await one.end(needs, mark, aiogpu.TaskCancelledError)
    await one.end(made, lambda _: True, asyncio.CancelledError)


async def hoarded(one: Operation) -> None:
    """More than the object memory has room for."""
    views = [filled(8 << 20, each) for each in range(6)]
    marks = [fingerprint(view) for view in views]
    values = [one.begin("put", await aiogpu.put(view)) for view in views]
    del views
    handle = one.begin("inside", tasks.measure_inside.remote(values))
    await one.end(handle, marks)
    for value, mark in zip(values, marks, strict=True):
        await one.end(one.begin("measure", tasks.measure.remote(value)), mark)
