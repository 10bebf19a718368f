"""No exception in the node's own code leaves the node wedged.

The programs run on a plain loop that is interrupted and used again, as a REPL does.
"""

from __future__ import annotations

import pytest

from tests.cli.sandbox import open_sandbox
from tests.support.program import run

PROGRAM = """
    import asyncio, logging, signal, sys
    import aiogpu
    from aiogpu.errors import NodeClosedError

    @aiogpu.remote
    def give(value):
        return value

    async def work():
        handles = [give.remote(number) for number in range(6)]
        cancelled = give.remote(8)
        cancelled.cancel()
        await asyncio.wait(handles)

    async def again():
        async with asyncio.timeout(30):
            return await give.remote(7)

    async def opened():
        return await aiogpu.init(address=ADDRESS)

    async def limited(work):
        async with asyncio.timeout(30):
            await work

    def interrupt_at(step, packages, interrupt):
        "Call `interrupt` at this bytecode of some packages; return what is left."
        left = [step]

        def trace(frame, event, _argument):
            if not frame.f_globals.get("__name__", "").startswith(packages):
                return trace
            frame.f_trace_opcodes = True
            if event == "opcode":
                left[0] -= 1
                if not left[0]:
                    sys.settrace(None)
                    interrupt(frame)
            return trace

        # Python 3.12 traces opcodes only if a frame has asked for them before.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(trace)
        return left

    if LOOP == "uvloop":
        import uvloop
        loop = uvloop.new_event_loop()
    else:
        loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(opened())
    loop.run_until_complete(work())
"""


@pytest.mark.parametrize(
    ("loop", "address"),
    [("asyncio", "local"), ("uvloop", "local"), ("asyncio", "auto")],
)
def test_ctrl_c_is_raised_outside_of_the_node(loop: str, address: str) -> None:
    """The node or the connection to it goes on, wherever it is interrupted."""
    program = f"""
    LOOP, ADDRESS = {loop!r}, {address!r}
    {PROGRAM}
    def press(frame):
        signal.getsignal(signal.SIGINT)(signal.SIGINT, frame)

    step, caught, left = 0, 0, [0]
    while left[0] <= 0:
        step += 331
        left = interrupt_at(step, ("aiogpu", "asyncio"), press)
        for part in (lambda: limited(work()), again):
            try:
                loop.run_until_complete(part())
            except KeyboardInterrupt:
                caught += 1  # in the second part, if the first was in its last turn
            except RuntimeError as error:
                # asyncio's own race: its callback that stops the loop was still due.
                assert "stopped before" in str(error), error
            sys.settrace(None)
        # That callback may have ended the second part in the turn in which the part was
        # done, and so have left the second part's own callback behind.
        loop.call_soon(loop.stop)
        loop.run_forever()
        assert loop.run_until_complete(again()) == 7, step
    assert caught > 10, (caught, step)
    loop.run_until_complete(aiogpu.shutdown())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print("never wedged")
    """
    with open_sandbox() as sandbox:
        if address == "auto":
            sandbox.run("start", "--head", "--num-cpus=1")
        output = run(program, XDG_RUNTIME_DIR=sandbox.directory)
    assert "never wedged" in output


def test_an_exception_inside_the_node_closes_it_or_leaves_it_usable() -> None:
    """The exception is that of any handler of signals that the program has set."""
    program = f"""
    LOOP, ADDRESS = "asyncio", "local"
    {PROGRAM}
    class Alarm(BaseException): ...

    def sound(_frame):
        raise Alarm

    logging.disable(logging.CRITICAL)
    loop.set_exception_handler(lambda *_: None)
    decisions = "aiogpu.core", "aiogpu.runtime.driver", "aiogpu.runtime.results"
    step, closed, left = 0, 0, [0]
    while left[0] <= 0:
        step += 211
        left = interrupt_at(step, decisions, sound)
        try:
            loop.run_until_complete(limited(work()))
        except (Alarm, NodeClosedError):
            pass
        sys.settrace(None)
        try:
            assert loop.run_until_complete(again()) == 7, step
        except NodeClosedError as error:
            assert "Alarm" in str(error), error
            closed += 1
            loop.run_until_complete(aiogpu.shutdown())
            loop.run_until_complete(opened())
    assert closed > 5, (closed, step)
    loop.run_until_complete(aiogpu.shutdown())
    print("never wedged")
    """
    assert "never wedged" in run(program)


def test_a_second_ctrl_c_leaves_the_node_usable_by_cleanup() -> None:
    """`aiogpu.run` raises it outside of the node, and then awaits all cleanup."""
    program = f"""
    LOOP, ADDRESS = "asyncio", "local"
    {PROGRAM}
    loop.run_until_complete(aiogpu.shutdown())
    loop.close()

    def press(frame):
        signal.getsignal(signal.SIGINT)(signal.SIGINT, frame)

    async def main():
        global left
        async with aiogpu.init(num_cpus=1):
            try:
                signal.raise_signal(signal.SIGINT)
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                left = interrupt_at(step, ("aiogpu.",), press)
                try:
                    await limited(work())
                finally:
                    sys.settrace(None)
                    try:
                        answer = await again()
                    except (asyncio.CancelledError, KeyboardInterrupt):
                        answer = await again()  # the press was among the last steps
                    answers.append(answer)

    step, runs, answers, left = 0, 0, [], [0]
    while left[0] <= 0:
        step += 1009
        runs += 1
        try:
            aiogpu.run(main())
        except KeyboardInterrupt:
            pass
        assert answers == [7] * runs, (step, answers)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert runs > 5, (runs, step)
    print("never wedged", runs)
    """
    assert "never wedged" in run(program)


def test_ctrl_c_cancels_the_run_of_another_loop() -> None:
    """`asyncio.run` sets no handler beside the one of the open node."""
    program = f"""
    LOOP, ADDRESS = "asyncio", "local"
    {PROGRAM}
    async def other():
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            print("cancelled")
            raise

    for run in (asyncio.run, aiogpu.run):
        try:
            run(other())
        except KeyboardInterrupt:
            print("interrupted")
    assert loop.run_until_complete(again()) == 7
    loop.run_until_complete(aiogpu.shutdown())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    """
    assert run(program).split() == ["cancelled", "interrupted"] * 2
