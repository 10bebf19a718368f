"""How a zygote is started: interpreter, options, variables, and when."""

from __future__ import annotations

import asyncio
import marshal
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aiogpu.errors import NodeStartError
from aiogpu.runtime.node_cgroup import NodeCgroup
from aiogpu.runtime.zygote.config import (
    Bootstrap,
    early_variables,
    fitting,
    interpreter_flags,
    start_interpreter,
)
from tests.support.program import run

pytestmark = pytest.mark.usefixtures("runtime_directory")


@pytest.mark.parametrize(
    "name",
    [
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "PYTHONHASHSEED",
        "MALLOC_ARENA_MAX",
        "GLIBC_TUNABLES",
        "OMP_PROC_BIND",
        "GOMP_CPU_AFFINITY",
        "KMP_BLOCKTIME",
        "MKL_DYNAMIC",
        "NUMEXPR_MAX_THREADS",
    ],
)
def test_what_is_read_at_exec_or_load(name: str) -> None:
    assert early_variables(((name, "1"),), (), ()) == ((name, "1"),)


@pytest.mark.parametrize(
    "name",
    [
        "MODE",
        "MY_OMP_NUM",
        "HF_HOME",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
    ],
)
def test_what_a_worker_can_set_itself(name: str) -> None:
    assert early_variables(((name, "1"),), (), ()) == ()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "TORCH_LOGS"),
        ("transformers", "HF_HOME"),
        ("numpy", "NUMPY_MADVISE_HUGEPAGE"),
        ("huggingface_hub", "HF_TOKEN"),
        ("jax", "XLA_FLAGS"),
        ("jax", "JAX_PLATFORMS"),
        ("mine", "MINE_DEBUG"),
    ],
)
def test_what_belongs_to_a_preloaded_module(module: str, name: str) -> None:
    environment = (("A", "1"), (name, "2"), ("Z", "3"))
    assert early_variables(environment, ["sys", module], ()) == ((name, "2"),)
    assert early_variables(environment, ["sys"], ()) == ()


def test_what_was_read_while_modules_were_imported() -> None:
    environment = (("A", "1"), ("HOME", "/x"), ("OMP_NUM_THREADS", "2"))
    read = ["HOME", "B", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"]
    assert early_variables(environment, (), read) == (("HOME", "/x"),)
    assert early_variables((("CUDA_VISIBLE_DEVICES", "0"),), (), read) == ()


FLAGS = """
    import subprocess, sys
    from aiogpu.runtime.zygote.config import interpreter_flags
    code = (
        "import sys; f = sys.flags; "
        "print(f.optimize, f.dont_write_bytecode, f.no_user_site, sys.warnoptions, "
        "f.dev_mode, f.utf8_mode, sys._xoptions)"
    )
    options = [*interpreter_flags()]
    mine = [sys.executable, "-c", code]
    child = subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True
    )
    f = sys.flags
    print(
        *(f.optimize, f.dont_write_bytecode, f.no_user_site, sys.warnoptions),
        *(f.dev_mode, f.utf8_mode, sys._xoptions),
    )
    print(child.stdout + child.stderr, end="")
"""


OPTIONS = "-X", "dev", "-X", "utf8=0", "-X", "pycache_prefix=/nowhere"


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("-OO", "-B", "-s", "-Werror::UserWarning", "-Wonce", *OPTIONS),
    ],
    ids=lambda options: "all" if options else "none",
)
def test_the_interpreters_options_are_carried_over(options: tuple[str, ...]) -> None:
    source = f"""
    import subprocess, sys, textwrap
    print(subprocess.run(
        [sys.executable, *{options!r}, "-c", textwrap.dedent({FLAGS!r})],
        capture_output=True, text=True, check=True,
    ).stdout, end="")
    """
    mine, childs = run(source).splitlines()
    assert mine == childs
    for option in options:
        if option.startswith("-W"):
            assert option.removeprefix("-W") in childs


def test_an_interpreter_without_options_carries_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Flags:
        optimize = dont_write_bytecode = no_user_site = 0

    monkeypatch.setattr(sys, "flags", Flags)
    monkeypatch.setattr(sys, "warnoptions", [])
    monkeypatch.setattr(sys, "_xoptions", {})
    assert list(interpreter_flags()) == []


def test_what_prints_at_the_end_is_not_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_xoptions", {"importtime": True, "dev": True})
    flags = list(interpreter_flags())
    assert flags[flags.index("-X") :][:2] == ["-X", "dev"]
    assert "importtime" not in flags


def test_a_childs_own_filters_of_warnings_go_first() -> None:
    flags, before = ["-O", "-Werror"], {"PYTHONWARNINGS": "error"}
    assert fitting(flags, before, {}) == flags
    assert fitting(flags, before, before) == flags
    assert fitting(flags, before, {"PYTHONWARNINGS": "ignore"}) == ["-O"]
    assert fitting(flags, {}, {"PYTHONWARNINGS": "ignore"}) == ["-O"]


@contextmanager
def make_pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        yield reading, writing
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("program", ["", "/no/such/python", "/etc/passwd"])
def test_a_program_that_cannot_be_started(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    before = sorted(os.listdir("/proc/self/fd"))
    with make_pipe() as (page, output), pytest.raises(NodeStartError) as caught:
        start_interpreter({"sys_path": []}, page, output)
    assert (program or "sys.executable") in str(caught.value)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_the_child_reads_its_fields_and_reports_by_its_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    boot = "import marshal, os; print(marshal.loads(os.read(0, 1 << 24)), os.getsid(0))"
    monkeypatch.setattr("aiogpu.runtime.zygote.config._BOOT", boot)
    fields: dict[str, object] = {"path": "caf\udce9", "page": 3}
    with make_pipe() as (reading, writing):
        child = start_interpreter(fields, reading, writing)
        assert child.wait(60) == 0
        assert os.read(reading, 1000).decode() == f"{fields} {child.pid}\n"
    assert marshal.loads(marshal.dumps(fields)) == fields


EARLY = """
    import asyncio, subprocess, sys
    import aiogpu
    start = subprocess.Popen
    def noting(*args, **options):
        global before
        before = set(sys.modules)
        return start(*args, **options)
    subprocess.Popen = noting
    async def main():
        async with aiogpu.init(num_cpus=1):
            late = set(sys.modules) - before
        print(*sorted(late & set(sys.argv[1:])))
    asyncio.run(main())
"""
LATE = (
    *(
        "aiogpu.core.resources.ledger",
        "aiogpu.core.scheduler.scheduler",
        "aiogpu.runtime.driver",
    ),
    *("aiogpu.runtime.workers.pool", "aiogpu.wire.codec", "msgpack"),
)
FIRST = """
    import aiogpu, sys
    @aiogpu.remote
    def noop():
        return None
    async def main():
        async with aiogpu.init(num_cpus=1, num_gpus=0):
            await noop.remote()
        print(*sorted(set(sys.modules) & set(sys.argv[1:])))
    aiogpu.run(main())
"""
FOR_OTHERS = (
    "aiogpu.core.scheduler.placement_groups",
    "aiogpu.core.scheduler.reservation",
    "aiogpu.core.scheduler.invariants",
    "aiogpu.observe.snapshot",
    "aiogpu.runtime.devices.monitor",
    *(
        "aiogpu.runtime.callers.leases",
        "aiogpu.runtime.callers.requests",
        "aiogpu.accelerators.base",
    ),
)
"""Of devices, placement groups, leases, status, and of tasks that start tasks."""


def test_a_first_call_imports_no_more_than_it_needs() -> None:
    assert run(FIRST, "aiogpu.core.scheduler.scheduler", *FOR_OTHERS).split() == [
        "aiogpu.core.scheduler.scheduler"
    ]


def test_the_rest_is_imported_while_the_zygote_starts() -> None:
    assert run(EARLY, *LATE).split() == sorted(LATE)


async def test_a_bootstrap_that_is_cleared_leaves_nothing(
    runtime_directory: Path,
) -> None:
    before = os.listdir("/proc/self/fd")
    bootstrap = Bootstrap(NodeCgroup(asyncio.get_running_loop()), [], False)
    assert os.listdir(runtime_directory) == [
        os.path.basename(bootstrap.config.directory)
    ]
    bootstrap.clear()
    assert os.listdir(runtime_directory) == []
    assert bootstrap.first.child.returncode is not None
    assert os.listdir("/proc/self/fd") == before


async def test_a_bootstrap_that_fails_leaves_nothing(
    runtime_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with pytest.raises(NodeStartError, match="/no/such/python"):
        Bootstrap(NodeCgroup(asyncio.get_running_loop()), [], False)
    assert os.listdir(runtime_directory) == []
    assert os.listdir("/proc/self/fd") == before
