"""What `aiogpu doctor` tries: each mechanism well, and each as it may be missing."""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from aiogpu.accelerators.base import Health, Sample
from aiogpu.accelerators.visible import Inventory, MigGpu
from aiogpu.cli import checks
from aiogpu.cli.checks import (
    ADJUST,
    CHECKS,
    LIBRARIES,
    PIDFD,
    SUBREAPER,
    Check,
    CheckError,
    Finding,
    Level,
    _process_limits,
    check_cgroup,
    check_cpus,
    check_descriptors,
    check_directory,
    check_gpus,
    check_import,
    check_kernel_log,
    check_memory,
    check_node,
    check_processes,
    check_python,
    check_visible,
    examine,
    import_checks,
    try_mechanism,
    try_out,
)
from aiogpu.core.model.request import Device
from aiogpu.errors import NodeStartError
from aiogpu.linux.cgroup import Place, find_cgroup

OK, WARN, MISSING = Level
FALSE = "/bin/false"


def one(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    return finding


def tried(name: str, check: Callable[..., Any], *args: Any, **named: Any) -> Finding:
    """What the doctor finds where a check of its table is given these."""
    (row,) = (each for each in CHECKS if each.name == name)
    return one(examine([replace(row, run=partial(check, *args, **named))]))


def bad(finding: Finding, level: Level) -> Finding:
    """A finding that is not well says so, and says what it means."""
    assert finding.level is level, finding
    assert finding.found
    assert finding.means.endswith(".")
    assert finding.advice == "" or finding.advice.endswith(".")
    return finding


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


# Checks are bounded, and their failures are findings.


def test_a_check_that_raises_is_a_finding() -> None:
    def fail() -> Iterator[Finding]:
        yield Finding("a", OK, "so far")
        raise ZeroDivisionError("what?")

    first, second = examine([Check("b", fail)])
    assert first.found == "so far"
    assert (second.name, second.level, second.found) == (
        "b",
        WARN,
        "ZeroDivisionError: what?",
    )
    assert not second.is_fatal
    *_, fatal = examine([Check("b", fail, is_essential=True)])
    assert fatal.is_fatal


def test_a_check_that_hangs_is_given_up() -> None:
    gate = threading.Event()

    def hang() -> Iterator[Finding]:
        gate.wait(20)
        yield from ()

    found = list(examine([Check("a", hang, limit=0.01), Check("b", list)]))
    gate.set()
    assert one(found).found == "no answer within 0.01 s"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import sys; sys.exit('no luck')", "exit code 1: no luck"),
        ("raise ValueError(3)", "exit code 1: ValueError: 3"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV: it says nothing"),
        ("print('no json')", "exit code 0: it says nothing"),
        ("import signal; signal.pause()", "no answer within 0.3 s"),
    ],
)
def test_a_trial_that_fails_says_why(source: str, said: str) -> None:
    with pytest.raises(CheckError) as caught:
        try_out(source, limit=0.3 if "pause" in source else 20)
    assert str(caught.value) == said


def test_a_trial_that_hangs_is_ended_with_what_it_started() -> None:
    source = (
        "import subprocess, sys; "
        "subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])"
    )
    with pytest.raises(CheckError, match="no answer"):
        try_out(source, limit=0.5)


def test_a_trial_without_an_interpreter() -> None:
    with pytest.raises(CheckError, match=r"/no/such/python: .*No such file"):
        try_out("", limit=1, executable="/no/such/python")


# Processes.


def test_this_python() -> None:
    assert check_python().endswith(sys.executable)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": (3, 10, 4)},
        {"platform": "darwin"},
        {"executable": ""},
        {"executable": "/no/such/python"},
    ],
)
def test_a_python_that_does_not_do(changes: dict[str, Any]) -> None:
    assert bad(tried("python", check_python, **changes), MISSING).is_fatal


def test_a_node_starts(runtime_directory: Path) -> None:
    assert "started in " in check_node()


def test_a_node_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, runtime_directory: Path
) -> None:
    assert bad(tried("node", check_node, executable=FALSE), MISSING).is_fatal
    monkeypatch.setattr(checks, "NODE", "import aiogpu; aiogpu.nothing")
    with pytest.raises(CheckError, match="AttributeError"):
        check_node()


@pytest.mark.parametrize("source", [SUBREAPER, PIDFD])
def test_the_kernel_adopts_orphans_and_shows_ends(source: str) -> None:
    assert try_mechanism(source, "works") == "works"


def test_a_kernel_that_refuses() -> None:
    refused = (
        "import os\n"
        "def refuse(_): raise OSError(38, 'Function not implemented')\n"
        "os.pidfd_open = refuse\n"
    )
    finding = bad(tried("pidfd", try_mechanism, refused + PIDFD, ""), MISSING)
    assert finding.found.endswith("[Errno 38] Function not implemented")
    assert finding.is_fatal
    finding = tried("subreaper", try_mechanism, SUBREAPER, "", executable=FALSE)
    assert bad(finding, MISSING).is_fatal


# Limits.


def test_a_directory_for_sockets(runtime_directory: Path) -> None:
    assert check_directory() == f"{runtime_directory}, mode 700"


def test_no_directory_for_sockets(tmp_path: Path) -> None:
    def refuse() -> str:
        raise NodeStartError("no place")

    assert bad(tried("directory", check_directory, refuse), MISSING).is_fatal
    # Too long a path for a socket.
    long = tmp_path / ("x" * 100)
    long.mkdir()
    assert bad(tried("directory", check_directory, lambda: str(long)), MISSING).is_fatal
    assert not long.exists()


def test_a_directory_that_others_may_enter(runtime_directory: Path) -> None:
    def create() -> str:
        place = runtime_directory / "aiogpu-1"
        place.mkdir()
        place.chmod(0o755)
        return str(place)

    assert "mode 755" in bad(tried("directory", check_directory, create), WARN).found


@pytest.mark.parametrize(
    ("soft", "hard", "level", "told"),
    [
        (1024, 1024, OK, "1024 may be open; room for 180 workers"),
        (256, 4096, OK, "256 may be open, 4096 while there is a node; room for 794 w"),
        (64, 256, WARN, "64 may be open, 256 while there is a node; room for 31 work"),
        (40, 40, MISSING, "40 may be open; room for 0 workers at a time, 5 for each"),
        (-1, -1, OK, "no limit; room for 4080 workers at a time, 5 for each"),
    ],
)
def test_descriptors(soft: int, hard: int, level: Level, told: str) -> None:
    finding = tried("descriptors", check_descriptors, (soft, hard), used=10)
    assert (finding.level, finding.is_fatal) == (level, level is MISSING)
    assert finding.found.startswith(told)
    assert (f"limit ({hard})" in finding.advice) is (level is not OK)


def test_descriptors_of_this_process() -> None:
    assert "; room for" in check_descriptors()


@pytest.mark.parametrize(
    ("most", "level", "told"),
    [
        ("max", OK, "no limit"),
        ("1000", OK, "1000 by {file}, 21 are there; room for about 489 workers at a "),
        ("24", WARN, "24 by {file}, 21 are there; room for about 1 workers at a time"),
        ("20", WARN, "20 by {file}, 21 are there; room for about 0 workers at a time"),
    ],
)
@pytest.mark.parametrize(
    ("group", "kind"), [("0::/a", "cgroup2 x rw"), ("4:pids:/a", "cgroup x rw,pids")]
)
def test_processes(
    most: str, level: Level, told: str, group: str, kind: str, tmp_path: Path
) -> None:
    proc, file = tmp_path / "proc", tmp_path / "cgroup/a/pids.max"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(f"{group}\n")
    (proc / "self/mountinfo").write_text(f"1 2 0:1 / {tmp_path}/cgroup rw - {kind}\n")
    file.parent.mkdir(parents=True)
    file.write_text(f"{most}\n")
    file.with_name("pids.current").write_text("21\n")
    finding = tried("processes", check_processes, proc, euid=0)
    assert finding.level is level
    assert finding.found.startswith(told.format(file=file))
    if level is WARN:
        bad(finding, WARN)


def test_processes_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (10**9, 10**9))
    assert "room for about" in check_processes(euid=os.geteuid() or 1)
    assert check_processes()
    (limit, there, source), *_ = _process_limits(Path("/proc"), os.geteuid() or 1)
    assert source == "ulimit -u"
    assert limit == 10**9
    assert there >= (0 if os.geteuid() == 0 else 1)


def test_cpus() -> None:
    assert check_cpus(8, 8, 8) == "8 to share out"
    assert check_cpus(8, 4, 1.5) == (
        "1.5 to share out of 8: affinity allows 4, a cgroup's quota allows less"
    )
    assert "to share out" in check_cpus()


@pytest.mark.parametrize(
    ("group", "kind", "file"),
    [
        ("0::/a/b", "cgroup2 x rw", "a/memory.max"),
        ("0::/a/b", "cgroup2 x rw", "a/b/memory.max"),
        ("4:memory:/a", "cgroup x rw,memory", "a/memory.limit_in_bytes"),
        ("4:memory:/a", "cgroup x rw,memory", "memory.limit_in_bytes"),
    ],
)
def test_memory_is_what_the_tightest_limit_allows(
    tmp_path: Path, group: str, kind: str, file: str
) -> None:
    proc, limit = tmp_path / "proc", tmp_path / "cgroup" / file
    (proc / "self").mkdir(parents=True)
    limit.parent.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:  8388608 kB\nMemFree: 1 kB\n")
    (proc / "self/cgroup").write_text(f"{group}\n")
    (proc / "self/mountinfo").write_text(f"1 2 0:1 / {tmp_path}/cgroup rw - {kind}\n")
    assert check_memory(proc) == "8.0 GiB by machine"
    for text in ("max\n", f"{2**63 - 4096}\n"):
        limit.write_text(text)
        assert check_memory(proc).startswith("8.0 GiB")
    limit.write_text(f"{3 << 30}\n")
    assert check_memory(proc) == f"3.0 GiB by {limit.parent}"


def test_memory_that_nobody_tells(tmp_path: Path) -> None:
    bad(tried("memory", check_memory, tmp_path), WARN)
    assert "GiB by " in check_memory()


def test_a_worker_offers_itself() -> None:
    (row,) = (each for each in CHECKS if each.name == "oom_score_adj")
    assert one(examine([row])).found == "a worker may raise its own"
    finding = tried("oom_score_adj", try_mechanism, ADJUST, "", executable=FALSE)
    assert "exit code" in bad(finding, WARN).found
    refused = ADJUST.replace("before + 1", "before")
    if int(Path("/proc/self/oom_score_adj").read_text()) < 1000:
        finding = tried("oom_score_adj", try_mechanism, refused, "")
        assert bad(finding, WARN).found == "it stays what it was"


def test_the_kernel_log(tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_text("")
    assert check_kernel_log(str(tmp_path / "kmsg")) == f"{tmp_path}/kmsg is readable"
    finding = tried("kernel log", check_kernel_log, str(tmp_path / "no"))
    assert bad(finding, WARN).found == f"{tmp_path}/no: No such file or directory"


# cgroup2.


def test_a_group_that_is_killed() -> None:
    place = find_cgroup()
    if place.directory is None:
        pytest.skip(f"this machine has no cgroup2 for us: {place.reason}")
    assert "was killed in" in check_cgroup()
    left = Path(place.directory).glob("aiogpu-doctor-*")
    assert list(left) == []


def test_a_group_that_does_not_go(tmp_path: Path) -> None:
    """A folder that is no cgroup cannot be removed while files are in it."""
    found = tried("cgroup2", check_cgroup, lambda: Place(str(tmp_path)))
    assert bad(found, WARN).found.endswith("cannot be removed")


def test_a_group_that_ends_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sleeper ends all the same: `nothing_left` sees to that."""
    monkeypatch.setattr(checks, "LIMIT", 0.05)
    monkeypatch.setattr(checks.Cgroup, "kill", lambda _: None)
    with pytest.raises(CheckError, match=r"ended nobody within 0\.05 s"):
        check_cgroup(lambda: Place(str(tmp_path)))


def test_no_group_may_be_made(tmp_path: Path) -> None:
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    told = tried("cgroup2", check_cgroup, lambda: Place(str(nowhere)))
    assert bad(told, WARN).found.endswith("Not a directory")
    told = tried("cgroup2", check_cgroup, lambda: Place(None, "none here"))
    assert bad(told, WARN).found == "none here"


# GPUs.


class Watch:
    """NVML on paper."""

    driver_version = "570.00"

    def __init__(self, *on: Sample, action: str | None = "") -> None:
        self._on = on
        self._action = action
        self.calls: list[str] = []

    def open(self) -> None:
        self.calls.append("open")

    def look(self, device: Device) -> Sample:
        assert isinstance(device.id, int)
        return self._on[device.id]

    def check(self, device: Device) -> Health:
        return Health(action=self._action)

    def close(self) -> None:
        self.calls.append("close")


A100 = "NVIDIA A100-SXM4-40GB"


def gpu_findings(
    *on: Sample, problem: str | None = None, action: str | None = ""
) -> list[Finding]:
    devices = tuple(Device(i, uuid=f"GPU-{i}", name=A100) for i in range(len(on)))
    there, watch = Inventory(devices, len(on), problem), Watch(*on, action=action)
    found = list(check_gpus(lambda: there, lambda: watch))
    assert watch.calls == ["open", "close"]
    return found


def test_gpus_that_tell_all() -> None:
    nvml, first, second = gpu_findings(
        Sample({7: 5}, frozenset(), True, 3 << 29), Sample({}, frozenset(), True, 0)
    )
    assert (nvml.level, nvml.found) == (OK, "driver 570.00, 2 GPUs")
    assert (first.name, first.level) == ("gpu 0", OK)
    assert first.found == f"{A100}, 1.5 GiB in use, 1 processes listed"
    assert second.found == f"{A100}, 0.0 GiB in use, 0 processes listed"


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (Sample(problem="GPU is lost", is_lost=True), "It is set aside."),
        (Sample(problem="Unknown Error"), "`unverified`"),
        (Sample(used=5), "`unverified`"),
        (Sample(), "`unverified`"),
        (Sample({}, used=5), "`unverified`"),
    ],
)
def test_gpus_that_tell_less(sample: Sample, said: str) -> None:
    _, gpu = gpu_findings(sample)
    assert said in bad(gpu, WARN).means


def test_a_gpu_that_its_driver_wants_reset() -> None:
    well = Sample({}, frozenset(), True, 0)
    _, gpu = gpu_findings(well, action="GPU reset")
    assert "asks for this: GPU reset" in bad(gpu, WARN).found
    _, gpu = gpu_findings(well, action=None)
    assert gpu.level == OK


def test_a_gpu_in_mig_mode_without_an_instance() -> None:
    mig = MigGpu(Device(0, uuid="GPU-0", name=A100))
    there = Inventory((), 1, mig=(mig,))
    nvml, gpu = check_gpus(lambda: there, Watch)
    assert nvml.level == OK
    assert bad(gpu, WARN).found == f"{A100}: in MIG mode, without an instance"


def test_a_gpu_that_does_not_answer_is_told_of() -> None:
    nvml, *_ = gpu_findings(problem="GPU 0 does not answer: GPU is lost")
    assert "GPU is lost" in bad(nvml, WARN).found


def test_without_nvml_nothing_is_fatal() -> None:
    found = tried("nvml", lambda: list(check_gpus(lambda: Inventory(problem="gone"))))
    assert not bad(found, MISSING).is_fatal


def test_the_variable_as_a_node_reads_it() -> None:
    told = "CUDA_VISIBLE_DEVICES='': a node shares out none"
    assert check_visible({"CUDA_VISIBLE_DEVICES": ""}) == told
    assert check_visible({}).startswith("CUDA_VISIBLE_DEVICES is not set: ")
    found = tried("visible gpus", check_visible, {"CUDA_VISIBLE_DEVICES": "0,0"})
    assert "'0'" in bad(found, WARN).found


# Imports.


def test_libraries_are_imported_as_a_zygote_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quiet_one.py").write_text("__version__ = '1.2'\n")
    (tmp_path / "threaded_one.py").write_text(
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    (tmp_path / "broken_one.py").write_text("raise ImportError('no luck')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert check_import("quiet_one").startswith("1.2 in 0.")
    with pytest.raises(CheckError, match="it left 1 threads running"):
        check_import("threaded_one")
    with pytest.raises(CheckError, match="no luck"):
        check_import("broken_one")


def test_a_torch_that_has_touched_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(
        "class cuda:\n"
        "    is_initialized = staticmethod(lambda: False)\n"
        "    _is_in_bad_fork = staticmethod(lambda: True)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CheckError, match="CUDA"):
        check_import("torch")


def test_libraries_that_are_there_are_asked_for() -> None:
    there = [name for name in LIBRARIES if find_spec(name) is not None]
    assert len(import_checks()) == len(there)


def test_modes_are_those_that_the_system_gives(runtime_directory: Path) -> None:
    """`check_directory` says 700 because it is so, whatever the umask."""
    before = os.umask(0)
    try:
        assert check_directory().endswith("mode 700")
    finally:
        os.umask(before)
    assert stat.S_ISDIR(runtime_directory.stat().st_mode)
