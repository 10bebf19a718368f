"""A node that cannot start workers keeps its tasks, says why, and recovers.

It lacks descriptors, processes or zygotes: tasks wait, and none fails.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import re
import tempfile
import textwrap
from pathlib import Path
from types import TracebackType

import psutil
import pytest

import aiogpu
from aiogpu.observe.status import OutageStatus
from tests.contract import tasks
from tests.support.gate import Gate
from tests.support.program import run
from tests.support.waits import until

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

TROUBLE = "tests.contract.preloaded_trouble"
PROGRAM = """
    import asyncio, os, resource, sys, tempfile
    import aiogpu
    NOFILE = resource.RLIMIT_NOFILE
    resource.setrlimit(NOFILE, tuple(map(int, sys.argv[1].split())))
    before = resource.getrlimit(NOFILE)

    @aiogpu.remote
    def limit():
        import resource, subprocess, sys
        source = "import resource as r; print(r.getrlimit(r.RLIMIT_NOFILE)[0])"
        child = subprocess.run([sys.executable, "-c", source], capture_output=True)
        return resource.getrlimit(resource.RLIMIT_NOFILE), int(child.stdout)

    @aiogpu.remote
    def meet(directory, count):
        import os, time
        open(f"{directory}/{os.getpid()}", "w").close()
        while len(os.listdir(directory)) < count:
            time.sleep(0.01)
        return os.getpid()

    @aiogpu.remote
    def pid(variable=None):
        import os
        return os.getpid(), os.environ.get("X")

    @aiogpu.remote
    def size(data):
        return data

    @aiogpu.remote
    async def parent(depth):
        return 1 + await parent.remote(depth - 1) if depth else 1

    async def main():
        preload = ["tests.contract.scarce"] if "SCARCE" in os.environ else []
        async with aiogpu.init(num_cpus=1000, num_gpus=0, preload=preload):
            await body()
        assert resource.getrlimit(NOFILE) == before
        print("ok")
"""


def program(body: str, limits: str, loop: str = "asyncio.run", **variables: str) -> str:
    """Run `body` on a node of a program with these soft and hard limits."""
    source = textwrap.dedent(PROGRAM) + "async def body():\n"
    source += textwrap.indent(textwrap.dedent(body), "    ") + f"\n{loop}(main())\n"
    return run(source, limits, **variables)


def test_few_workers_run_hundreds_of_tasks() -> None:
    body = """
        handles = [pid.remote() for _ in range(300)]
        handles += [pid.options(max_calls=1).remote() for _ in range(30)]
        for number in range(60):
            env = {"env_vars": {"X": str(number % 3)}}
            handles.append(pid.options(runtime_env=env).remote())
        results = await asyncio.gather(*handles)
        assert [x for _, x in results[-60:]] == [str(n % 3) for n in range(60)]
        assert len({pid for pid, _ in results[300:330]}) == 30
        assert len(os.listdir("/proc/self/fd")) < 128
    """
    output = program(body, "128 128", "sys.stderr = sys.stdout; aiogpu.run")
    assert output == "ok\n", "the node has room enough to say nothing"


def test_the_soft_limit_is_raised_for_the_node_and_not_for_tasks() -> None:
    body = """
        assert resource.getrlimit(NOFILE) == (1024, 1024)
        assert await limit.remote() == ((128, 1024), 128)
        env = {"env_vars": {"PYTHONHASHSEED": "1"}}
        later = limit.options(runtime_env=env)
        assert await later.remote() == ((128, 1024), 128), "a later zygote's limits"
        with tempfile.TemporaryDirectory() as directory:
            together = [meet.remote(directory, 40) for _ in range(40)]
            assert len(set(await asyncio.gather(*together))) == 40
    """
    assert program(body, "128 1024") == "ok\n"


def test_init_warns_if_there_is_room_for_very_few_workers() -> None:
    """An actor needs a worker for its life: the next task might wait for ever."""
    body = "assert (await pid.remote())[0]"
    output = program(body, "64 64", "sys.stderr = sys.stdout; asyncio.run")
    warning = (
        r"have only \d workers at a time.* may have 64 .*limit \(64\): `ulimit -Hn`"
    )
    assert re.search(warning, output)
    assert output.endswith("ok\n")


def test_why_names_the_lack_of_room_for_workers() -> None:
    body = """
        with tempfile.TemporaryDirectory() as directory:
            waiting = [meet.remote(directory, 1000) for _ in range(100)]
            while len(os.listdir(directory)) < 10:
                await asyncio.sleep(0.01)
            print(str(await waiting[-1].why()).splitlines()[1])
            print((await aiogpu.status()).shapes[0].reason)
            for handle in waiting:
                handle.cancel()
            assert (await pid.remote())[0]
    """
    first, second, ok = program(body, "128 128").splitlines()
    workers = re.match(
        r"  workers: (\d+), and no room for more at a time; `aiogpu", first
    )
    assert workers, first
    assert "`aiogpu doctor` says " in first
    reason = f"waits for a worker: there are {workers[1]}, and no room for more"
    assert (second, ok) == (reason, "ok")


def test_too_deep_a_tree_of_tasks_raises_a_deadlock_error() -> None:
    body = """
        assert await parent.remote(5) == 6
        try:
            await parent.remote(100)
        except aiogpu.errors.DeadlockError as error:
            print(error)
        assert await parent.remote(5) == 6
    """
    error, ok = program(body, "128 128").splitlines()
    assert "needs a worker process, but this node can have only" in error
    assert ok == "ok"


@pytest.mark.slow
def test_two_hundred_levels_run_with_the_usual_limit() -> None:
    """Each level costs four or five descriptors."""
    body = "assert await parent.remote(200) == 201"
    assert program(body, "1024 4096", "aiogpu.run") == "ok\n"


def test_a_program_may_take_descriptors_itself() -> None:
    body = """
        await asyncio.gather(*(pid.remote() for _ in range(3)))
        files = [open(os.devnull) for _ in range(50)]
        await asyncio.gather(*(pid.remote() for _ in range(200)))
        assert len(os.listdir("/proc/self/fd")) < 128
        while files:
            files.pop().close()
        with tempfile.TemporaryDirectory() as directory:
            await asyncio.gather(*(meet.remote(directory, 11) for _ in range(11)))
    """
    assert program(body, "128 128") == "ok\n"


def test_tasks_share_workers_if_forks_fail() -> None:
    body = """
        handles = [pid.remote() for _ in range(100)]
        handles += [pid.options(max_calls=1).remote() for _ in range(20)]
        await asyncio.gather(*handles)
    """
    assert program(body, "1024 4096", SCARCE="15") == "ok\n"


@pytest.mark.parametrize("most", ["0", "1"])
def test_tasks_stay_queued_while_every_fork_fails(most: str) -> None:
    body = """
        handles = [pid.remote(), pid.remote()]
        while not (found := (await aiogpu.status()).outages) or found[0].failures < 5:
            await asyncio.sleep(0)
        print(found[0].reason)
        print(str(await handles[0].why()).splitlines()[1].partition("fork")[0])
        assert not any(handle.done() for handle in handles)
        open(os.environ["MORE_ROOM"], "w").close()
        assert len(set(await asyncio.gather(*handles))) >= 1
        assert (await aiogpu.status()).outages == ()
    """
    with tempfile.TemporaryDirectory() as directory:
        variables = {"SCARCE": most, "MORE_ROOM": f"{directory}/more"}
        output = program(body, "1024 4096", **variables)
    assert output.splitlines() == [
        "no process can be forked: Resource temporarily unavailable; processes are "
        "limited by `ulimit -u`, a cgroup's pids.max, and memory",
        "  no worker can be started: no process can be ",
        "ok",
    ]


def test_tasks_stay_queued_without_a_descriptor_for_a_zygote() -> None:
    """The zygote once was never started: each task waited for a minute and failed."""
    body = """
        handle = pid.remote()
        await handle.why(), await aiogpu.status(), await handle  # import modules now
        await aiogpu.shutdown()
        await aiogpu.init(num_cpus=4, num_gpus=0)
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            (zygote,) = map(int, file.read().split())
        taken = []
        while True:
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        os.kill(zygote, 9)
        handle = pid.options(max_calls=1, max_retries=0).remote()
        while not (found := (await aiogpu.status()).outages) or found[0].failures < 3:
            await asyncio.sleep(0)
        print(found[0].reason)
        assert not handle.done()
        while taken:
            os.close(taken.pop())
        assert (await handle)[0]
        assert (await aiogpu.status()).outages == ()
        await aiogpu.shutdown()
    """
    reason, ok = program(body, "128 128", "aiogpu.run").splitlines()
    assert "Too many open files" in reason
    assert ok == "ok"


def test_large_results_are_copied_without_descriptors() -> None:
    """No worker ends, and no result is lost."""
    body = """
        import numpy as np
        @aiogpu.remote
        def large(number):
            return os.getpid(), np.full(1 << 19, number % 256, np.uint8)
        @aiogpu.remote
        def total(several):
            return int(several[1].sum())
        @aiogpu.remote
        def many(count):
            return [np.full(1 << 19, number, np.uint8) for number in range(count)]

        handles = [large.options(num_cpus=250).remote(i) for i in range(280)]
        results = await asyncio.gather(*handles)
        assert [int(array[-1]) for _, array in results] == [i % 256 for i in range(280)]
        assert len({pid for pid, _ in results}) <= 4, "no worker had to be replaced"
        assert len(os.listdir("/proc/self/fd")) < 256
        for number in (0, 201, 279):
            assert await total.remote(handles[number]) == number % 256 << 19
        assert [int(array[0]) for array in await many.remote(60)] == list(range(60))
        assert (await pid.options(max_calls=1).remote())[0], "other workers have room"
    """
    assert program(body, "256 256") == "ok\n"


FIND_DIRECTORY = """
    import shutil
    path = next(
        line.split()[7] for line in open("/proc/net/unix")
        if line.rstrip().endswith("/node.sock") and line.split()[6] in {
            os.readlink(f"/proc/self/fd/{fd}")[8:-1]
            for fd in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{fd}")
        }
    )
    directory = os.path.dirname(path)
"""
REMOVALS = {
    "the directory": "shutil.rmtree(directory)",
    "its files": "[os.unlink(f'{directory}/{name}') for name in os.listdir(directory)]",
    "a socket": "os.unlink(path)",
    "the socket of values": "os.unlink(f'{directory}/memory.sock')",
}


@pytest.mark.whole
@pytest.mark.parametrize("loop", ["asyncio.run", "aiogpu.run"])
@pytest.mark.parametrize("removal", REMOVALS.values(), ids=REMOVALS)
def test_a_node_goes_on_if_its_directory_is_removed(removal: str, loop: str) -> None:
    body = f"""
        first, _ = await pid.remote()
        {textwrap.indent(textwrap.dedent(FIND_DIRECTORY), " " * 8).strip()}
        {removal}
        async with asyncio.timeout(60):
            fresh = pid.options(max_calls=1)
            print((await fresh.remote())[0] != first)
            with tempfile.TemporaryDirectory() as met:
                print(len(set(await asyncio.gather(
                    *(meet.remote(met, 3) for _ in range(3))
                ))))
            # A zygote of its own, since Python reads the variable at its start.
            env = {{"env_vars": {{"PYTHONHASHSEED": "7"}}}}
            print((await fresh.options(runtime_env=env).remote())[0] != first)
            print(len(await size.options(max_calls=1).remote(bytes(1 << 22))))
        print(oct(os.stat(directory).st_mode & 0o777))
    """
    *lines, ok = program(body, "1024 4096", loop).splitlines()
    assert (lines, ok) == (["True", "3", "True", str(1 << 22), "0o700"], "ok")


def test_a_node_uses_no_directory_of_another_user_in_place_of_its_own() -> None:
    body = f"""
        await pid.remote()
        {textwrap.indent(textwrap.dedent(FIND_DIRECTORY), " " * 8).strip()}
        shutil.rmtree(directory)
        os.mkdir(directory)
        os.chmod(directory, 0o777)
        handle = pid.options(max_calls=1).remote()
        async with asyncio.timeout(60):
            while "was removed" not in str(why := await handle.why()):
                await asyncio.sleep(0)
        print(str(why).splitlines()[-1])
        os.chmod(directory, 0o700)
        print((await handle)[1])
    """
    line, result, ok = program(body, "1024 4096").splitlines()
    assert re.search(r"was removed .* has mode 0777, so other users have access", line)
    assert (result, ok) == ("None", "ok")


async def test_systemd_leaves_the_nodes_directory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """See systemd-tmpfiles(8): it skips a directory that it cannot lock."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    async with aiogpu.init(num_cpus=1, num_gpus=0):
        (directory,) = tmp_path.glob("aiogpu-*")
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)


def test_init_refuses_a_node_without_descriptors() -> None:
    source = """
        import resource
        import aiogpu
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        try:
            aiogpu.run(aiogpu.init(num_cpus=1, num_gpus=0).__aenter__())
        except aiogpu.errors.NodeStartError as error:
            print(error)
    """
    assert "this process may have 40 descriptors open" in run(source)


# Zygotes and interpreters that fail


@pytest.fixture
def doom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path; while a file exists there, zygotes die importing `preloaded_trouble`."""
    path = tmp_path / "doom"
    monkeypatch.setenv("DOOM", str(path))
    return path


async def end_zygotes() -> None:
    """Kill all zygotes, and wait until the node has noticed."""
    children = psutil.Process().children()
    zygotes = [child for child in children if child.name() == "aiogpu-zygote"]
    for zygote in zygotes:
        zygote.kill()
    await until(lambda: not any(psutil.pid_exists(zygote.pid) for zygote in zygotes))


async def outage(failures: int) -> OutageStatus:
    """Wait until so many starts in a row have failed."""
    async with asyncio.timeout(60):
        while True:
            for outage in (await aiogpu.status()).outages:
                if outage.failures >= failures:
                    return outage
            await asyncio.sleep(0)


async def test_tasks_wait_while_zygotes_die(doom: Path) -> None:
    """Four deaths of the plain environment's zygote once broke the node for good."""
    async with aiogpu.init(num_cpus=4, num_gpus=1, preload=[TROUBLE]):
        assert await tasks.add.remote(1) == 2
        doom.touch()
        await end_zygotes()
        handles = [
            tasks.add.options(max_calls=1, max_retries=0, num_gpus=0.5).remote(n)
            for n in range(10)
        ]
        failing = await outage(4)
        assert "the zygote ended with status -9" in failing.reason
        assert failing.seconds > 0
        assert not any(handle.done() for handle in handles)
        status = await aiogpu.status()
        assert status.waiting_count == len(handles)
        assert status.available["GPU"] == 1, "waiting tasks hold no GPU"
        message = "no worker can be started"
        assert str(failing).startswith(f"{message}: the zygote ended with")
        for text in (str(status), repr(status), status.shapes[0].reason):
            assert message in text
        why = await handles[-1].why()
        assert why.outage is not None
        assert "add (task" in str(why)
        assert "for a worker\n  no worker can be started: the zygote" in str(why)
        doom.unlink()
        assert await asyncio.gather(*handles) == [n + 1 for n in range(10)]
        assert (await aiogpu.status()).outages == ()


async def test_tasks_pass_those_of_a_broken_environment(doom: Path) -> None:
    """Zygotes of one environment die; other tasks, and its own workers, go on."""
    broken = {"env_vars": {"DOOM": str(doom), "PYTHONHASHSEED": "1"}}
    sound = {"env_vars": {"DOOM": "", "PYTHONHASHSEED": "2"}}
    async with aiogpu.init(num_cpus=1, num_gpus=0, preload=[TROUBLE]):
        doom.touch()
        first = tasks.add.options(runtime_env=broken, priority=1)
        waiting = [first.remote(n) for n in range(2)]
        failing = await outage(1)
        assert failing.variables == ("DOOM", "PYTHONHASHSEED")
        assert "for tasks with DOOM, PYTHONHASHSEED: " in str(failing)
        passing = tasks.add.options(runtime_env=sound)
        assert await passing.remote(1) == 2
        assert await asyncio.gather(*(passing.remote(n) for n in range(3))) == [1, 2, 3]
        assert await tasks.add.remote(1) == 2
        assert not any(handle.done() for handle in waiting)
        doom.unlink()
        assert await asyncio.gather(*waiting) == [1, 2]


async def test_a_cancelled_task_leaves_the_queue_of_an_outage(doom: Path) -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=0, preload=[TROUBLE]):
        doom.touch()
        await end_zygotes()
        handle = tasks.add.remote(1)
        expiring = tasks.add.options(timeout=0.2).remote(1)
        await outage(2)
        handle.cancel()
        with pytest.raises(aiogpu.TaskTimeoutError):
            await expiring
        async with asyncio.timeout(60):
            while (await aiogpu.status()).outages:
                await asyncio.sleep(0)


def tracebacks() -> int:
    """Count the traceback objects, each of which keeps a frame."""
    gc.collect()
    return sum(isinstance(item, TracebackType) for item in gc.get_objects())


async def test_an_interpreter_that_never_starts_raises_each_time() -> None:
    """Each error is a new object: an error that is raised again keeps all frames."""
    nowhere = {"env_vars": {"PYTHONHOME": "/nonexistent"}}
    broken = tasks.add.options(runtime_env=nowhere, max_retries=0)

    async def fail() -> int:
        with pytest.raises(aiogpu.WorkerDiedError, match="the zygote ended with st"):
            await broken.remote(1)
        return tracebacks()

    async with aiogpu.init(num_cpus=1, num_gpus=0):
        kept = [await fail() for _ in range(12)]
        assert kept[-1] <= kept[2], kept
        assert await tasks.add.remote(1) == 2


async def test_a_worker_waits_while_its_zygote_imports(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import has its own limit, which is longer than that of a start."""
    limit = 0.2
    monkeypatch.setattr("aiogpu.runtime.workers.pool.START_LIMIT", limit)
    slow = tasks.add.options(runtime_env={"env_vars": {"HOLD": gate.path}})
    async with aiogpu.init(num_cpus=1, num_gpus=0, preload=[TROUBLE]):
        waiting = slow.remote(1)
        await gate.entered("import")
        done, _ = await asyncio.wait({waiting}, timeout=5 * limit)
        assert not done
        monkeypatch.setattr("aiogpu.runtime.workers.pool.START_LIMIT", 60.0)
        gate.release("import")
        assert await waiting == 2
