"""Starting and ending a node, and the surroundings of its workers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import aiogpu
from aiogpu import errors
from aiogpu.linux.cgroup import usable_cpus
from aiogpu.testing.leaks import Resources
from aiogpu.wire.connection import CLIENT, Connection
from aiogpu.wire.messages import Refused
from tests.contract import stream_tasks, tasks, value_tasks
from tests.contract.actor_classes import Async
from tests.contract.node_here import Here
from tests.faults.leftovers import wait_until_gone
from tests.support.gate import Gate
from tests.support.program import run, start
from tests.support.waits import LIMIT, no_complaints, until

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.fresh,
]


async def test_num_cpus_defaults_to_those_the_process_may_use() -> None:
    async with aiogpu.init(num_gpus=0):
        assert (await aiogpu.cluster_resources())["CPU"] == usable_cpus()


async def test_tasks_have_the_programs_directory_path_and_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variables = {
        "AIOGPU_TEST_A": "set before init",
        "OMP_NUM_THREADS": "7",
        "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    async with aiogpu.init(num_cpus=1, num_gpus=1, preload=["json"]):
        directory, path = await tasks.surroundings.remote()
        assert directory == str(tmp_path)
        assert str(tmp_path) in path
        environment = tasks.environment.options(num_gpus=1)
        assert await environment.remote(*variables) == variables


async def test_visible_devices_limit_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    async with aiogpu.init(num_cpus=2):
        assert (await aiogpu.cluster_resources())["GPU"] == 2.0
        facts = await tasks.where.options(num_gpus=2).remote()
        assert (facts["ids"], facts["visible"]) == ([1, 3], "1,3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aaaa,GPU-bbbb")
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        facts = await tasks.where.options(num_gpus=0.5).remote()
        assert (facts["ids"], facts["visible"]) == (["GPU-aaaa"], "GPU-aaaa")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(errors.DeviceError, match="num_gpus=2"):
        await aiogpu.init(num_gpus=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    async with aiogpu.init(num_cpus=1):
        assert (await aiogpu.cluster_resources())["GPU"] == 0.0


async def test_accelerator_type_restricts_tasks() -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1, accelerator_type="A100"):
        total = await aiogpu.cluster_resources()
        assert total["accelerator_type:A100"] == 1.0
        typed = tasks.where.options(num_gpus=0.5, accelerator_type="A100")
        facts = await typed.remote()
        assert facts["ids"] == [0]
        assert facts["resources"]["accelerator_type:A100"] == 0.001
        with pytest.raises(aiogpu.InfeasibleError, match="H100"):
            typed.options(accelerator_type="H100").remote()


async def test_preload_imports_the_named_modules_alone() -> None:
    async with aiogpu.init(num_cpus=1, preload=["numpy", "json"]):
        loaded = await tasks.modules.remote("numpy", "json")
        assert loaded == {"numpy": True, "json": True}
    async with aiogpu.init(num_cpus=1):
        assert await aiogpu.remote(_loaded).remote("numpy", "asyncio") == []


def _loaded(*names: str) -> list[str]:
    import sys

    return [name for name in names if name in sys.modules]


_loaded.__module__ = "__main__"  # sent by value, so that no module is imported for it


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory from which modules are imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "endless.py").write_text("import threading\nthreading.Event().wait()\n")
    return tmp_path


WITH_THREAD = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


async def test_init_refuses_a_module_that_cannot_be_imported(modules: Path) -> None:
    (modules / "raising.py").write_text("1 / 0\n")
    with pytest.raises(errors.PreloadError, match="no_such_module"):
        await aiogpu.init(preload=["no_such_module"])
    with pytest.raises(errors.PreloadError, match=r"'raising'.*ZeroDivisionError"):
        await aiogpu.init(preload=["raising", "auto"])
    async with aiogpu.init(num_cpus=1):
        assert await tasks.add.remote(1) == 2


async def test_preload_leaves_out_modules_with_threads_or_devices(
    modules: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = modules / "nvidia0"
    device.touch()
    with_device = (
        "from aiogpu.worker.zygote import preload as fitness\n"
        f"fitness.DEVICE_FILES = ({str(device)!r},)\n"
        f"file = open({str(device)!r})\n"
    )
    sources = {"with_thread": WITH_THREAD, "with_device": with_device, "good": ""}
    for name, source in sources.items():
        (modules / f"{name}.py").write_text(source)
    async with aiogpu.init(num_cpus=1, preload=[*sources]):
        loaded = await tasks.modules.remote(*sources)
        assert loaded == {"with_thread": False, "with_device": False, "good": True}
    for name, reason in {
        "with_thread": "it left 1 threads",
        "with_device": device,
    }.items():
        assert f"{name} is not preloaded: " in caplog.text
        assert str(reason) in caplog.text


async def test_a_zygotes_last_message_is_read_on_a_busy_loop(modules: Path) -> None:
    (modules / "with_thread.py").write_text(WITH_THREAD)
    me = psutil.Process()
    for preload in ("no_such_module", "with_thread"):
        others = set(me.children())
        opening = asyncio.ensure_future(_open(preload))
        await until(lambda others=others: set(me.children()) - others)
        (zygote,) = set(me.children()) - others
        # Block the loop until the zygote has sent all its messages and has ended.
        deadline = time.monotonic() + 60
        while zygote.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
        if preload == "with_thread":
            assert await opening == 2
        else:
            with pytest.raises(errors.PreloadError, match="no_such_module"):
                await opening


async def _open(preload: str) -> int:
    async with aiogpu.init(num_cpus=1, preload=[preload]):
        return await tasks.add.remote(1)


@pytest.mark.usefixtures("modules")
async def test_init_gives_up_an_import_that_never_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = Resources.take()
    monkeypatch.setattr("aiogpu.runtime.zygote.process.IMPORT_LIMIT", 0.2)
    with pytest.raises(errors.PreloadError, match=r"names 'endless', .* did not end"):
        await aiogpu.init(preload=["endless"])
    assert Resources.take().since(before) == []


async def test_what_a_preloaded_module_prints_is_shown(
    modules: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (modules / "talkative.py").write_text("print('hello', flush=True)\n")
    async with aiogpu.init(num_cpus=1, preload=["talkative"]):
        assert await tasks.add.remote(1) == 2
    assert "(zygote pid=" in (err := capsys.readouterr().err)
    assert err.endswith(") hello\n")


async def test_init_refuses_what_is_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for executable, message in (
        ("/bin/false", "status 1"),
        ("", r"sys\.executable"),
        ("/no/such/python", "/no/such/python"),
    ):
        monkeypatch.setattr("sys.executable", executable)
        with pytest.raises(errors.NodeStartError, match=message):
            await aiogpu.init(num_cpus=1)


async def test_the_first_remote_opens_a_node() -> None:
    handles = [tasks.add.remote(i) for i in range(3)]
    cancelled = tasks.add.remote(1)
    cancelled.cancel()
    assert await asyncio.gather(*handles) == [1, 2, 3]
    assert (await aiogpu.status()).tasks == ()
    assert [number async for number in tasks.double.map([1, 2])] == [2, 4]
    with pytest.raises(errors.NodeRunningError):
        await aiogpu.init()
    impossible = tasks.add.options(num_cpus=10_000)
    with pytest.raises(aiogpu.InfeasibleError):
        impossible.remote(1)
    await aiogpu.shutdown()
    early = impossible.remote(1)
    with pytest.raises(aiogpu.InfeasibleError):
        await early
    await aiogpu.shutdown()


IMPLICIT = """
    import asyncio, sys, uvloop, aiogpu
    from tests.contract import tasks
    async def main():
        print(await tasks.add.remote(1))
    way = sys.argv[1]
    if way == "asyncio.run":
        asyncio.run(main())
    elif way == "aiogpu.run":
        aiogpu.run(main())
    elif way == "bare loop":
        # Never closed: the node ends with the interpreter.
        asyncio.new_event_loop().run_until_complete(main())
"""


@pytest.mark.parametrize("way", ["asyncio.run", "aiogpu.run", "bare loop"])
def test_an_unclosed_node_ends_with_its_loop(way: str, runtime_directory: Path) -> None:
    """"""
    assert run(IMPLICIT, way, PYTHONWARNINGS="ignore::ResourceWarning") == "2\n"
    wait_until_gone(30, str(runtime_directory))


CANCELLING = """
    import asyncio, contextlib, os, sys, aiogpu
    from tests.contract import stream_tasks, tasks
    from tests.contract.actor_classes import Mortal
    async def main():
        path, way = sys.argv[1:3]
        async with aiogpu.init(num_cpus=4):
            actor = await Mortal.remote(path, "actor")
            task = tasks.gated.remote(path, "task")
            call = actor.gated.remote(path, "call")
            stream = stream_tasks.numbers.remote(3)
            assert await anext(stream) == 0
            waiter = asyncio.create_task(task.coro())
            while (await task.why()).state != "running":
                await asyncio.sleep(0)
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(aiogpu.errors.NodeError):
                    tasks.add.remote(1)
                    os._exit(1)
                if way == "cancel":
                    task.cancel(), call.cancel(), stream.cancel()
                else:
                    waiter.cancel()
                    with contextlib.suppress(BaseException):
                        waiter.get_coro().throw(asyncio.CancelledError)
                actor = task = call = stream = None
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            print("forked", flush=True)
            assert await tasks.add.remote(2) == 3
            results = await asyncio.gather(waiter, call, actor.add.remote())
            print(*results, *[item async for item in stream], flush=True)
    aiogpu.run(main()) if sys.argv[3] == "uvloop" else asyncio.run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("way", ["cancel", "end the asyncio tasks"])
async def test_a_fork_of_the_driver_is_inert(
    way: str, loop: str, gate: Gate, runtime_directory: Path
) -> None:
    """A fork starts and cancels nothing: not by `cancel()`, nor as its tasks end.

    Closing the loop in a fork breaks the parent's, with or without aiogpu: both share
    one epoll descriptor. So the fork ends its tasks as `asyncio.run` does, and exits.
    """
    program = start(CANCELLING, gate.path, way, loop)
    assert program.stdout is not None
    await gate.entered("task", "call")
    assert await asyncio.to_thread(program.stdout.readline) == "forked\n"
    gate.release("task", "call")
    out, err = await asyncio.to_thread(program.communicate, timeout=60)
    assert "task call 1 1 2\n" in out, (out, err)
    assert program.returncode == 0
    assert "Traceback" not in err, err


KILLED = """
    import asyncio, sys, aiogpu
    from tests.contract import tasks
    async def main():
        async with aiogpu.init(num_cpus=4, num_gpus=1, preload=["json"]):
            path = sys.argv[1]
            await tasks.leave_process.remote(path, "daemon")
            rest = [
                tasks.gated.remote(path, "plain"),
                tasks.gated_coroutine.remote(path, "coroutine"),
                tasks.swallow.options(num_gpus=0.5).remote(path, "deaf"),
            ]
            await asyncio.wait(rest)
    aiogpu.run(main())
"""


async def test_a_killed_driver_leaves_nothing(gate: Gate) -> None:
    """Workers, what they started, and the node's directory are gone."""
    driver = start(KILLED, gate.path)
    try:
        await gate.entered("daemon", "plain", "coroutine", "deaf")
        family = psutil.Process(driver.pid).children(recursive=True)
        assert {process.pid for process in family} >= set(gate.pids.values())
        driver.send_signal(signal.SIGKILL)
    except BaseException:
        driver.kill()
        raise
    finally:
        driver.communicate()
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, 10)
    assert alive == []


async def test_a_node_closes_although_its_closing_was_cancelled_at_once() -> None:
    """So does a loop's runner at the end: it cancels all tasks, begun or not."""
    await aiogpu.init(num_cpus=1, num_gpus=0)
    before = asyncio.all_tasks()
    first = asyncio.ensure_future(aiogpu.shutdown())
    while not (begun := asyncio.all_tasks() - before - {first}):
        await asyncio.sleep(0)
    for task in begun:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await aiogpu.shutdown()


async def test_remote_after_shutdown_opens_another_node() -> None:
    async with aiogpu.init(num_cpus=1) as session:
        pass
    with pytest.raises(errors.NodeClosedError, match="init"):
        await session.status()
    assert await tasks.add.remote(1) == 2
    await aiogpu.shutdown()


async def test_a_variable_may_name_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOGPU_ADDRESS", "nowhere")
    with pytest.raises(aiogpu.OptionError, match="nowhere"):
        await aiogpu.init()
    monkeypatch.setenv("AIOGPU_ADDRESS", "local")
    async with aiogpu.init(num_cpus=1):
        assert await tasks.add.remote(1) == 2


async def test_the_socket_directory_is_private(runtime_directory: Path) -> None:
    async with aiogpu.init(num_cpus=1):
        assert await tasks.add.remote(1) == 2
        (directory,) = runtime_directory.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        # Pipes lose their names.
        assert sorted(os.listdir(directory)) == ["memory.sock", "node.sock"]


async def test_garbage_closes_its_own_connection_alone(
    runtime_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with aiogpu.init(num_cpus=1):
        (directory,) = runtime_directory.iterdir()
        path = str(directory / "node.sock")
        http = b"GET / HTTP/1.1\r\n\r\n"
        for garbage in (b"\xff" * 100, b"\x02\x00\x00\x00ab", http):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(garbage)
            (answer,) = Connection(CLIENT).receive(await reader.read())
            assert isinstance(answer, Refused)
            writer.close()
        assert await tasks.add.remote(1) == 2
    assert len(caplog.records) == 3


@pytest.mark.usefixtures("modules")
async def test_cancel_ends_an_init_that_hangs_in_an_import() -> None:
    before = Resources.take()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await aiogpu.init(preload=["endless"])
    assert Resources.take().since(before) == []


async def test_keepers_and_zygotes_ignore_sigint(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        running = tasks.gated.remote(gate.path, "a")
        await gate.entered("a")
        for process in psutil.Process(gate.pids["a"]).parents()[:2]:
            assert process.name().startswith("aiogpu-")
            os.kill(process.pid, signal.SIGINT)
        gate.release("a")
        assert await running == "a"
        assert await tasks.add.remote(1) == 2


async def test_a_silent_connection_ends_with_the_node(runtime_directory: Path) -> None:
    """A keeper may be silent, too, if its zygote died during the fork."""
    async with aiogpu.init(num_cpus=1):
        assert await tasks.add.remote(1) == 2
        (directory,) = runtime_directory.iterdir()
        path = str(directory / "node.sock")
        reader, writer = await asyncio.open_unix_connection(path)
        assert await tasks.add.remote(1) == 2
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()


# The end


async def test_a_closing_node_logs_no_lost_errors(address: str, gate: Gate) -> None:
    """Neither of running or waiting tasks, nor of results, calls and items."""
    async with no_complaints():
        async with aiogpu.init(address=address, num_cpus=1):
            running = tasks.gated_coroutine.remote(gate.path, "running")
            await gate.entered("running")
            actor = Async.remote()
            split = value_tasks.split.options(num_returns=2)
            dropped: list[Any] = [
                running,
                *(tasks.add.remote(number) for number in range(3)),
                *split.remote([1, 2]),
                actor.add.remote(),
                stream_tasks.numbers.remote(3),
            ]
            awaited = tasks.add.remote(running)
        with pytest.raises(errors.NodeClosedError):
            await awaited
        del actor, running, dropped


async def test_a_draining_node_admits_no_program(here: Here, gate: Gate) -> None:
    async with here.join():
        assert (await aiogpu.status()).draining is None
        running = tasks.gated.remote(gate.path, "a")
        await gate.entered("a")
        draining = asyncio.create_task(here.engine.drain(LIMIT))
        await until(lambda: here.engine._supervisor.clients.is_draining)
        remaining = (await aiogpu.status()).draining
        assert remaining is not None
        assert 0 < remaining <= LIMIT
        gate.release("a")
        assert await running == "a"
        assert await draining == ""
    async with here.looks() as looker:
        assert "is being stopped: no new work" in str(await looker.status())
    with pytest.raises(
        errors.NodeError, match="is being stopped, and no program can join"
    ):
        await here.join()


async def test_a_drain_waits_for_leases(
    here: Here, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiogpu")
    async with here.join():
        lease = await aiogpu.lease(num_gpus=1)
        assert await here.engine.drain(0.01) == "1 lease"
        draining = asyncio.create_task(here.engine.drain(LIMIT))
        with pytest.raises(errors.NodeClosedError, match="grants no new leases"):
            await aiogpu.lease(num_cpus=1)
        assert not draining.done()
        await lease.release()
        assert await draining == ""
    assert "unfinished: 1 lease" in caplog.text
