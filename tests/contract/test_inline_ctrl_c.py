"""A Ctrl-C ends the program, whatever code it finds; a task's own exception does not.

Each program sends the signal to itself from inside a task.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal

import pytest

import aiogpu
from aiogpu.engines.inline.execution import InlineExecutor, TaskHost
from aiogpu.engines.inline.jobs import Job
from tests.contract import tasks
from tests.support.program import start

PROGRAM = """
    import asyncio, os, signal, sys
    import aiogpu

    kind, start, times = sys.argv[1], sys.argv[2], int(sys.argv[3])

    anything = aiogpu.remote(max_retries=3, retry_exceptions=True)

    def press():
        print("pressed", flush=True)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        print("went on", flush=True)

    @anything
    def plain():
        press()

    @anything
    async def coroutine():
        await asyncio.sleep(0)
        press()

    @aiogpu.remote
    def parent():
        try:
            aiogpu.get(plain.remote())
        finally:
            print("parent ends", flush=True)

    @aiogpu.remote
    def parent_of_coroutine():
        try:
            aiogpu.get(coroutine.remote())
        finally:
            print("parent ends", flush=True)

    @aiogpu.remote
    class Actor:
        def __init__(self, presses=False):
            if presses:
                press()

        def method(self):
            press()

    @aiogpu.remote
    class AsyncActor:
        async def method(self):
            await asyncio.sleep(0)
            press()

    @aiogpu.remote
    class Closing:
        async def close(self):
            press()

    async def closing():
        async with Closing.remote() as actor:
            await actor

    async def constructor():
        await Actor.remote(True)

    async def method():
        await Actor.remote().method.remote()

    async def async_method():
        await AsyncActor.remote().method.remote()

    async def main():
        try:
            async with aiogpu.init(address="inline", num_cpus=1):
                found = globals()[kind]
                await getattr(found, "remote", found)()
                await asyncio.sleep(60)
        finally:
            print("cleaned up", "CUDA_VISIBLE_DEVICES" in os.environ, flush=True)

    if start == "aiogpu":
        aiogpu.run(main())
    elif start == "asyncio":
        asyncio.run(main())
    else:
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(main())
        finally:
            asyncio.set_event_loop(loop)
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0.1))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
"""


# asyncio's rule: the first cancels the main task, which is heard when the code that
# blocks has ended; the second is heard at once. Without a runner the first is.
@pytest.mark.parametrize(
    ("kind", "by", "times"),
    [
        ("plain", "aiogpu", 1),
        ("plain", "loop", 1),
        ("coroutine", "asyncio", 2),
        ("parent", "asyncio", 1),
        ("parent_of_coroutine", "aiogpu", 2),
        ("constructor", "loop", 1),
        ("method", "aiogpu", 2),
        ("async_method", "asyncio", 1),
        ("closing", "asyncio", 2),
    ],
)
def test_it_ends_the_program(kind: str, by: str, times: int) -> None:
    """Nothing is tried again, though `retry_exceptions` names all."""
    goes_on = times == 1 and by != "loop"
    program = start(PROGRAM, kind, by, str(times), CUDA_VISIBLE_DEVICES="")
    out, err = program.communicate(timeout=60)
    assert program.returncode in (-signal.SIGINT, 130), (out, err)
    assert re.search(r"^KeyboardInterrupt$", err, re.MULTILINE), err
    assert out.count("pressed") == 1
    assert ("went on" in out) == goes_on
    assert ("parent ends" in out) == kind.startswith("parent")
    assert "cleaned up True" in out
    assert "never retrieved" not in err
    assert "destroyed" not in err


def test_it_may_find_code_that_is_no_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program ends all the same, and does not wait for what never ran."""

    def press(executor: InlineExecutor, job: Job, host: TaskHost) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(InlineExecutor, "begin", press)
    handles: list[aiogpu.Handle[int]] = []

    async def main() -> None:
        async with aiogpu.init(address="inline", num_cpus=1):
            handles.append(tasks.add.remote(1))
            await handles[0]

    before = dict(os.environ)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert isinstance(handles[0].exception(), aiogpu.errors.NodeClosedError)
    assert dict(os.environ) == before


def test_a_handler_of_the_programs_own_is_asked_and_put_back() -> None:
    program = start(
        """
        import os, signal
        import aiogpu

        def handle(number, frame):
            print("handled", frame.f_code.co_name)

        @aiogpu.remote
        def plain():
            os.kill(os.getpid(), signal.SIGINT)
            return "its result"

        async def main():
            signal.signal(signal.SIGINT, handle)
            async with aiogpu.init(address="inline", num_cpus=1):
                print(await plain.remote())
            assert signal.getsignal(signal.SIGINT) is handle

        aiogpu.run(main())
        """
    )
    out, err = program.communicate(timeout=60)
    assert (program.returncode, out, err) == (0, "handled plain\nits result\n", "")


def test_a_debugger_may_take_the_handler_over() -> None:
    """As `pdb` does when it is told to continue."""
    program = start(
        """
        import signal
        import aiogpu

        def handle(number, frame):
            raise KeyboardInterrupt

        before = []

        @aiogpu.remote
        def take():
            from __main__ import before, handle
            before.append(signal.signal(signal.SIGINT, handle))

        @aiogpu.remote
        def put_back():
            from __main__ import before
            signal.signal(signal.SIGINT, before.pop())

        @aiogpu.remote
        def press():
            signal.raise_signal(signal.SIGINT)

        async def main():
            first = signal.getsignal(signal.SIGINT)
            async with aiogpu.init(address="inline", num_cpus=1):
                await take.remote()
                assert signal.getsignal(signal.SIGINT) is handle
                await put_back.remote()
                await press.remote()
                print("cancelled after this")
                import asyncio
                await asyncio.sleep(60)

        aiogpu.run(main())
        """
    )
    out, err = program.communicate(timeout=60)
    assert program.returncode in (-signal.SIGINT, 130), (out, err)
    assert "RecursionError" not in err
    assert out == ""
