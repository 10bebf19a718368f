"""`breakpoint()` in a task waits for a debugger; time limits stand still meanwhile.

The tests speak the protocol of `aiogpu debug`, whose terminal `tests/cli` tests.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu.types import Node, Why
from tests.contract import debug_tasks as tasks

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.needs("processes"),
    pytest.mark.aiogpu(num_cpus=2, log_to_driver=False),
]


async def waiting(handle: Any) -> Why:
    """Return the state of a task or actor once it waits for a debugger."""
    while not (why := await state(handle)).debugger:
        await asyncio.sleep(0)
    return why


async def state(handle: Any) -> Why:
    """Return the state of a task by its handle, or of an actor by its number."""
    if isinstance(handle, int):
        return await aiogpu.why(handle)
    why: Why = await handle.why()
    return why


class Terminal:
    """What `aiogpu debug` does, without a person."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.reader = reader
        self.writer = writer

    def tell(self, **message: object) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def hear(self) -> str:
        """Return the text up to the next prompt, or to the end."""
        text = ""
        while line := await self.reader.readline():
            message = json.loads(line)
            text += message.get("text", "") + message.get("error", "")
            if "prompt" in message:
                return text + str(message["prompt"])
        return text

    async def ask(self, line: str) -> str:
        self.tell(line=line)
        return await self.hear()


@asynccontextmanager
async def attached(
    why: Why, listen: tuple[str, int] | None = None
) -> AsyncIterator[Terminal]:
    reader, writer = await asyncio.open_unix_connection(why.debugger)
    terminal = Terminal(reader, writer)
    terminal.tell(listen=listen)
    try:
        yield terminal
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_task_is_debugged_from_stop_to_stop(node: Node) -> None:
    handle = tasks.stops.options(max_calls=0).remote(3)
    why = await waiting(handle)
    assert why.halted == "debug_tasks.py:17 in stops"
    assert "waits for a debugger at debug_tasks.py:17 in stops" in str(why)
    assert f"`aiogpu debug {why.task}` attaches one" in str(why)
    (status,) = (await aiogpu.status()).tasks
    assert status.reason == "waits for a debugger at debug_tasks.py:17 in stops"
    async with attached(why) as terminal:
        assert (await terminal.hear()).endswith("-> total += number + 1\n(Pdb) ")
        why = await state(handle)
        assert (why.debugger, why.halted) == ("", "debug_tasks.py:17 in stops")
        assert "is in a debugger" in str(why)
        assert await terminal.ask("p total, number") == "(0, 0)\n(Pdb) "
        assert "total += number + 1" in await terminal.ask("c")
        assert "for number" in await terminal.ask("n")
        shown = await terminal.ask("w")
        assert "aiogpu/" not in shown.replace("aiogpu/tests", ""), "no code of ours"
        assert await terminal.ask("total = 10") == "(Pdb) "
        assert "cannot be started again" in await terminal.ask("run")
        assert "takes statements too" in await terminal.ask("interact")
        assert "breakpoint()" in await terminal.ask("n"), "the next round"
        assert "total += number + 1" in await terminal.ask("n"), "not in pdb itself"
        terminal.tell(line="c")
        assert await handle == 13
    assert not await tasks.is_traced.options(max_calls=0).remote()


@pytest.mark.parametrize("how", ["end of file", "q", "terminal's death"])
async def test_a_task_that_is_let_go_passes_all_breakpoints(
    node: Node, how: str
) -> None:
    handle = tasks.stops.remote(3)
    async with attached(await waiting(handle)) as terminal:
        await terminal.hear()
        if how == "q":
            terminal.tell(line="b inner")
            terminal.tell(line="q")
        elif how == "end of file":
            terminal.writer.write_eof()
        else:
            terminal.writer.transport.abort()
        assert await handle == 6


async def test_steps_beyond_the_end_of_the_code(node: Node) -> None:
    reused = tasks.stops.options(max_calls=0)
    handle = reused.remote()
    async with attached(await waiting(handle)) as terminal:
        await terminal.hear()
        for line in ("n", "n", "n", "s"):
            terminal.tell(line=line)
        assert await handle == 1
        assert not await tasks.is_traced.options(max_calls=0).remote()
        again = reused.remote()
        async with attached(await waiting(again)) as second:
            await second.hear()
            second.tell(line="q")
            assert await again == 1


async def test_a_breakpoint_of_the_debugger_holds_until_the_end(node: Node) -> None:
    handle = tasks.stops_in_coroutine.remote(1)
    async with attached(await waiting(handle)) as terminal:
        await terminal.hear()
        assert "Breakpoint 1" in await terminal.ask("b inner")
        assert "-> return number + 1" in await terminal.ask("c")
        assert (await state(handle)).halted.endswith(" in inner")
        assert await terminal.ask("p number") == "1\n(Pdb) "
        terminal.tell(line="c")
        assert await handle == 2
    assert await tasks.inner(1) == 2


async def test_time_limits_stand_still(node: Node) -> None:
    limits: list[dict[str, Any]] = [
        {"run_timeout": 0.2},
        {"timeout": 3, "run_timeout": 3},
    ]
    for limit in limits:
        longer = max(limit.values()) + 0.1
        handle = tasks.stops.options(**limit).remote()
        async with attached(await waiting(handle)) as terminal:
            await terminal.hear()
            await terminal.ask(f"import time; time.sleep({longer})")
            terminal.tell(line="c")
            assert await handle == 1


async def test_a_limit_holds_again_once_the_code_goes_on(node: Node) -> None:
    handle = tasks.stops.options(run_timeout=0.3).remote()
    async with attached(await waiting(handle)) as terminal:
        await terminal.hear()
        forever = (
            "type('', (), {'__add__': lambda *_: __import__('time').sleep(1000)})()"
        )
        await terminal.ask(f"number = {forever}")
        terminal.tell(line="c")
        with pytest.raises(aiogpu.TaskTimeoutError):
            await handle


@pytest.mark.parametrize("is_attached", [False, True])
async def test_a_cancelled_task_clears_up(
    node: Node, tmp_path: Path, is_attached: bool
) -> None:
    path = tmp_path / "cleared"
    handle = tasks.clears_up.options(cancel_grace=30).remote(str(path))
    why = await waiting(handle)
    if is_attached:
        async with attached(why) as terminal:
            await terminal.hear()
            handle.cancel()
            assert "KeyboardInterrupt" in await terminal.hear()
    else:
        handle.cancel()
    while not path.exists() or path.read_text() != "cleared up":
        await asyncio.sleep(0)
    assert not Path(why.debugger).exists()


async def test_a_cancelled_coroutine_does_not_wait(node: Node) -> None:
    handle = tasks.stops_in_coroutine.options(cancel_grace=30).remote(1)
    await waiting(handle)
    handle.cancel()
    while (await aiogpu.status()).tasks:
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("cls", "options", "method"),
    [
        (tasks.Stopper, {}, "stop"),
        (tasks.Stopper, {"max_concurrency": 2}, "stop"),
        (tasks.AsyncStopper, {}, "stop"),
        (tasks.AsyncStopper, {}, "stop_in_coroutine"),
    ],
)
async def test_a_method_of_an_actor(
    node: Node, cls: type, options: dict[str, Any], method: str
) -> None:
    actor: Any = aiogpu.remote(cls).options(**options).remote()
    await actor.plain.remote()
    (status,) = (await aiogpu.status()).actors
    call = getattr(actor, method).remote()
    async with attached(await waiting(status.id)) as terminal:
        assert "return self.calls" in await terminal.hear() or "coroutine" in method
        assert await terminal.ask("p self.calls") == "1\n(Pdb) "
        terminal.tell(line="c")
        assert await call == 1
        assert not (await aiogpu.why(status.id)).halted
        second = getattr(actor, method).remote()  # the terminal stays for the actor
        await terminal.hear()
        await terminal.ask("self.calls = 7")
        terminal.tell(line="c")
        assert await second == 7
    dropped = getattr(actor, method).remote()
    await waiting(status.id)
    dropped.cancel()
    assert await actor.plain.remote() == 8, "a cancelled call does not wait"


@pytest.mark.parametrize("is_async", [False, True])
async def test_limits_of_calls_stand_still(node: Node, is_async: bool) -> None:
    class Timed(tasks.AsyncStopper if is_async else tasks.Stopper):  # type: ignore[misc]
        @aiogpu.method(run_timeout=0.3)
        def timed(self) -> int:
            return self.stop()

    actor: Any = aiogpu.remote(Timed).remote()
    await actor.plain.remote()
    (status,) = (await aiogpu.status()).actors
    call = actor.timed.remote()
    async with attached(await waiting(status.id)) as terminal:
        await terminal.hear()
        await terminal.ask("import time; time.sleep(0.4)")
        terminal.tell(line="c")
        assert await call == 1


async def test_threads_take_turns(node: Node) -> None:
    actor: Any = aiogpu.remote(tasks.Stopper).options(max_concurrency=2).remote()
    await actor.plain.remote()
    (status,) = (await aiogpu.status()).actors
    calls = [actor.stop.remote(), actor.stop.remote()]
    async with attached(await waiting(status.id)) as terminal:
        for _ in calls:
            await terminal.hear()
            terminal.tell(line="c")
        assert await asyncio.gather(*calls) == [2, 2]


async def test_a_thread_and_a_fork_of_a_task(node: Node) -> None:
    handle = tasks.stops_in_thread.remote()
    async with attached(await waiting(handle)) as terminal:
        await terminal.hear()
        await terminal.ask("number = 5")
        terminal.tell(line="c")
        assert await handle == 5
    assert await tasks.stops_in_fork.remote() == 3


async def test_the_user_decides_what_a_breakpoint_does(node: Node) -> None:
    variables = {"env_vars": {"PYTHONBREAKPOINT": "0"}}
    assert await tasks.stops.options(runtime_env=variables).remote(2) == 3
    variables = {"env_vars": {"PYTHONBREAKPOINT": "os.abort"}}
    with pytest.raises(aiogpu.WorkerDiedError):
        await tasks.stops.options(runtime_env=variables).remote()


async def test_a_terminal_that_asks_for_nothing_is_not_served(node: Node) -> None:
    handle = tasks.stops.remote()
    why = await waiting(handle)
    for sent in (b"", b"nonsense\n", b"[]\n", b"{}\n"):
        reader, writer = await asyncio.open_unix_connection(why.debugger)
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    async with attached(why) as terminal:
        await terminal.hear()
        terminal.tell(line="c")
        assert await handle == 1


class Editor:
    """A client of the Debug Adapter Protocol, as far as an editor needs it to stop."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._number = 0
        self.read: list[dict[str, Any]] = []

    def ask(self, command: str, **arguments: object) -> None:
        self._number += 1
        body = {"seq": self._number, "type": "request", "command": command}
        data = json.dumps({**body, "arguments": arguments}).encode()
        self._writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))

    async def hear(self, name: str) -> dict[str, Any]:
        """Read until an event or the answer to a command."""
        while True:
            head = await self._reader.readuntil(b"\r\n\r\n")
            data = await self._reader.readexactly(int(head.split()[1]))
            message: dict[str, Any] = json.loads(data)
            if name in (message.get("event"), message.get("command")):
                return message

    async def close(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


@pytest.mark.skipif(find_spec("debugpy") is None, reason="needs debugpy")
async def test_an_editor_attaches_by_debugpy(node: Node) -> None:
    handle = tasks.stops.options(run_timeout=2, max_calls=1).remote(2)
    why = await waiting(handle)
    async with attached(why, listen=("127.0.0.1", 0)) as terminal:
        said = json.loads(await terminal.reader.readline())["text"]
        host, _, port = said.split()[3].partition(":")
        assert said.startswith(f"debugpy listens at 127.0.0.1:{port} of pid {why.pid}")
        editor = Editor(*await asyncio.open_connection(host, int(port)))
        editor.ask("initialize", adapterID="test", pathFormat="path")
        editor.ask("attach", justMyCode=False)
        await editor.hear("initialized")
        editor.ask("configurationDone")
        stopped = await editor.hear("stopped")
        thread = stopped["body"]["threadId"]
        editor.ask("stackTrace", threadId=thread)
        frame = (await editor.hear("stackTrace"))["body"]["stackFrames"][0]
        assert frame["name"] == "stops"
        assert (await state(handle)).halted.endswith(" in stops")
        expression = "__import__('time').sleep(2.1) or total"
        editor.ask("evaluate", expression=expression, frameId=frame["id"])
        assert (await editor.hear("evaluate"))["body"]["result"] == "0"
        editor.ask("disconnect", terminateDebuggee=False)
        await editor.hear("disconnect")
        await editor.close()
        assert await terminal.hear() == "", "the command ends with the editor"
    assert await handle == 3


@pytest.mark.skipif(find_spec("debugpy") is None, reason="needs debugpy")
async def test_an_editor_that_does_not_come(node: Node) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        handle = tasks.stops.options(max_calls=1).remote()
        why = await waiting(handle)
        async with attached(why, listen=taken.getsockname()) as terminal:
            assert "debugpy cannot listen at 127.0.0.1:" in await terminal.hear()
    async with attached(why, listen=("127.0.0.1", 0)) as terminal:
        await terminal.reader.readline()
    async with attached(why) as terminal:  # the task has waited again
        await terminal.hear()
        terminal.tell(line="c")
        assert await handle == 1
