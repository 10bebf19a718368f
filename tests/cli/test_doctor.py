"""`aiogpu doctor`: the command, and each of its checks."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pexpect
import psutil
import pytest
from click.testing import CliRunner

from aiogpu import __version__
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
    check_service,
    check_visible,
    examine,
    import_checks,
    try_mechanism,
    try_out,
)
from aiogpu.cli.doctor import doctor as doctor_command
from aiogpu.cli.doctor import line, run
from aiogpu.core.model.request import Device
from aiogpu.daemon.place import Record, start_time
from aiogpu.errors import NodeStartError
from aiogpu.linux.cgroup import ParentCgroup, find_cgroup
from tests.support.program import clean_environment, run_command

COMMAND = [sys.executable, "-m", "aiogpu", "doctor"]
PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
LINE = re.compile(r"(ok|warn|missing) +(.+?)  +(\S.*)")
OK, WARN, MISSING = Level
FALSE = "/bin/false"


def one(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    return finding


def run_check(
    name: str, check: Callable[..., Any], *args: Any, **named: Any
) -> Finding:
    """Run a check of the doctor's table with these arguments; return the finding."""
    (row,) = (each for each in CHECKS if each.name == name)
    return one(examine([replace(row, run=partial(check, *args, **named))]))


def checked_advice(finding: Finding, level: Level) -> Finding:
    """Check that a bad finding has its level and advice."""
    assert finding.level is level, finding
    assert finding.found
    assert finding.means.endswith(".")
    assert finding.advice == "" or finding.advice.endswith(".")
    return finding


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


# The command.


def names(lines: list[str]) -> list[str]:
    """The mechanisms in the lines; all GPUs count as one."""
    matches = [LINE.fullmatch(line) for line in lines]
    assert all(matches), lines
    mechanisms = [match[2] for match in matches if match]
    return [name for name in mechanisms if not name.startswith("gpu ")]


@pytest.fixture(scope="module")
def variables() -> Iterator[dict[str, str]]:
    """Variables of a user without a node."""
    with tempfile.TemporaryDirectory(prefix="agt-", dir="/tmp") as place:
        yield clean_environment(TERM="xterm-256color", XDG_RUNTIME_DIR=place)


def in_pipe(variables: dict[str, str], *options: str) -> str:
    ran = run_command(*COMMAND, *options, env=variables)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


@pytest.fixture(scope="module")
def printed(variables: dict[str, str]) -> str:
    """The output in a pipe; exit code 0: all essential mechanisms work."""
    return in_pipe(variables)


def test_doctor_in_a_pipe_prints_plain_lines(printed: str) -> None:
    assert "\x1b" not in printed
    *lines, end = printed.splitlines()
    assert names(lines)[:3] == ["python", "directory", "node"]
    assert re.fullmatch(r"Nodes can start here: \d+ ok, \d+ warn, \d+ missing\.", end)
    for name, fact in (
        ("python", re.escape(sys.executable)),
        ("directory", ", mode 700"),
        ("node", "started in "),
        ("subreaper", ""),
        ("pidfd", ""),
        ("descriptors", "; room for"),
        ("processes", "room for about|no limit"),
        ("cpus", "usable"),
        ("memory", "GiB by "),
    ):
        wanted = rf"^(ok|warn) +{name} .*({fact})"
        assert re.search(wanted, printed, re.MULTILINE), (name, printed)


def test_the_page_matches_the_output(printed: str) -> None:
    """The page explains each mechanism; its example has some, with the same texts."""
    page = PAGE.read_text()
    example = re.findall(r"```text\n(.*?)```", page, re.DOTALL)[0]
    *lines, end = example.splitlines()
    *real, real_end = printed.splitlines()
    assert set(names(lines)) <= set(names(real))
    assert re.sub(r"\d+", "1", end) == re.sub(r"\d+", "1", real_end)
    table = page.partition("| line |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.+?`) \| ", table, re.MULTILINE)
    assert {n for row in rows for n in re.findall("`(.+?)`", row)} == set(names(real))


def test_doctor_in_a_terminal_prints_colours(variables: dict[str, str]) -> None:
    doctor = pexpect.spawn(
        COMMAND[0],
        COMMAND[1:],
        env=variables,  # type: ignore[arg-type]
        dimensions=(50, 60),
        encoding="utf-8",
        timeout=100,
    )
    doctor.expect("\x1b\\[32mok")
    doctor.expect("Nodes can start here")
    doctor.expect(pexpect.EOF)
    doctor.close()
    assert doctor.exitstatus == 0


def test_doctor_as_json_with_imports(
    variables: dict[str, str],
) -> None:
    pytest.importorskip("numpy")
    findings = json.loads(in_pipe(variables, "--json", "--imports"))
    assert {each["level"] for each in findings} <= {"ok", "warn", "missing"}
    keys = {"name", "level", "found", "means", "advice", "is_essential"}
    assert all(set(each) == keys for each in findings)
    (numpy,) = (each for each in findings if each["name"] == "import numpy")
    assert numpy["found"].endswith(" can be preloaded")


ESSENTIAL = Finding("node", Level.MISSING, "no luck", "None.", "Try.", True)


GOOD = Finding("cpus", Level.OK, "2 usable")


POOR = Finding("nvml", Level.MISSING, "not here", "No GPUs.", "Get some.")


def test_the_exit_code_depends_on_essential_mechanisms(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run([Check("a", lambda: [GOOD, POOR])]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok      cpus            2 usable",
        "missing nvml            not here. No GPUs. Get some.",
        "Nodes can start here: 1 ok, 0 warn, 1 missing.",
    ]
    assert run([Check("a", lambda: [GOOD, ESSENTIAL])]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "No node can start here: 1 ok, 0 warn, 1 missing."
    )
    assert run([Check("a", lambda: [ESSENTIAL])], as_json=True) == 1
    (finding,) = json.loads(capsys.readouterr().out)
    assert finding == {
        "name": "node",
        "level": "missing",
        "found": "no luck",
        "means": "None.",
        "advice": "Try.",
        "is_essential": True,
    }


def test_findings_are_not_parsed_as_markup() -> None:
    text = line(Finding("node", Level.WARN, "[Errno 2] [red]no[/red]", "So."))
    assert text.plain == "warn    node            [Errno 2] [red]no[/red]. So."


def test_a_bad_option_of_doctor_is_an_error() -> None:
    ran = CliRunner().invoke(doctor_command, ["--jsn"])
    assert ran.exit_code == 2
    assert "--json" in ran.stderr


# Checks are bounded in time, and their failures are findings.


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


def test_a_check_that_hangs_is_abandoned() -> None:
    gate = threading.Event()

    def hang() -> Iterator[Finding]:
        gate.wait(20)
        yield from ()

    result = list(examine([Check("a", hang, limit=0.01), Check("b", list)]))
    gate.set()
    assert one(result).found == "no answer within 0.01 s"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys; sys.exit('no luck')", "exit code 1: no luck"),
        ("raise ValueError(3)", "exit code 1: ValueError: 3"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV: no error message"),
        ("print('no json')", "exit code 0: no error message"),
    ],
)
def test_a_failed_trial_gives_the_reason(source: str, message: str) -> None:
    with pytest.raises(CheckError) as caught:
        try_out(source, limit=20)
    assert str(caught.value) == message


def test_a_hanging_trial_is_killed_with_its_processes() -> None:
    source = (
        "import subprocess, sys; "
        "subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])"
    )
    with pytest.raises(CheckError, match=r"no answer within 0\.5 s"):
        try_out(source, limit=0.5)


def test_missing_essential_mechanisms_are_errors(
    monkeypatch: pytest.MonkeyPatch, runtime_directory: Path, tmp_path: Path
) -> None:
    def refuse() -> str:
        raise NodeStartError("no place")

    too_long = tmp_path / ("x" * 100)
    too_long.mkdir()
    no_pidfd = (
        "import os\n"
        "def refuse(_): raise OSError(38, 'Function not implemented')\n"
        "os.pidfd_open = refuse\n"
    )
    for finding in (
        run_check("python", check_python, version=(3, 10, 4)),
        run_check("python", check_python, platform="darwin"),
        run_check("python", check_python, executable=""),
        run_check("python", check_python, executable="/no/such/python"),
        run_check("node", check_node, executable=FALSE),
        run_check("directory", check_directory, refuse),
        run_check("directory", check_directory, lambda: str(too_long)),
        run_check("subreaper", try_mechanism, SUBREAPER, "", executable=FALSE),
        pidfd := run_check("pidfd", try_mechanism, no_pidfd + PIDFD, ""),
    ):
        assert checked_advice(finding, MISSING).is_fatal
    assert pidfd.found.endswith("[Errno 38] Function not implemented")
    assert not too_long.exists()
    with pytest.raises(CheckError, match=r"/no/such/python: .*No such file"):
        try_out("", limit=1, executable="/no/such/python")
    monkeypatch.setattr(checks, "NODE", "import aiogpu; aiogpu.nothing")
    with pytest.raises(CheckError, match="AttributeError"):
        check_node()


# Limits.


def test_the_socket_directory_is_private(runtime_directory: Path) -> None:
    """The mode is 700, whatever the umask."""
    before = os.umask(0)
    try:
        assert check_directory() == f"{runtime_directory}, mode 700"
    finally:
        os.umask(before)
    place = runtime_directory / "aiogpu-1"

    def create() -> str:
        place.mkdir()
        place.chmod(0o755)
        return str(place)

    assert (
        "mode 755"
        in checked_advice(run_check("directory", check_directory, create), WARN).found
    )


@pytest.mark.parametrize(
    ("soft", "hard", "level", "text"),
    [
        (1024, 1024, OK, "limit 1024; room for 180 workers"),
        (256, 4096, OK, "limit 256, a node raises it to 4096; room for 794 w"),
        (64, 256, WARN, "limit 64, a node raises it to 256; room for 31 work"),
        (40, 40, MISSING, "limit 40; room for 0 workers at a time, with 5 for each"),
        (-1, -1, OK, "no limit; room for 4080 workers at a time, with 5 for each"),
    ],
)
def test_a_low_limit_of_descriptors_is_found(
    soft: int, hard: int, level: Level, text: str
) -> None:
    finding = run_check("descriptors", check_descriptors, (soft, hard), used=10)
    assert (finding.level, finding.is_fatal) == (level, level is MISSING)
    assert finding.found.startswith(text)
    assert (f"limit ({hard})" in finding.advice) is (level is not OK)


@pytest.mark.parametrize(
    ("most", "level", "text"),
    [
        ("max", OK, "no limit"),
        ("1000", OK, "limit 1000 by {file}, 21 used; room for about 489 workers at a "),
        ("24", WARN, "limit 24 by {file}, 21 used; room for about 1 workers at a time"),
        ("20", WARN, "limit 20 by {file}, 21 used; room for about 0 workers at a time"),
    ],
)
@pytest.mark.parametrize(
    ("group", "kind"), [("0::/a", "cgroup2 x rw"), ("4:pids:/a", "cgroup x rw,pids")]
)
def test_a_low_limit_of_processes_is_found(
    most: str, level: Level, text: str, group: str, kind: str, tmp_path: Path
) -> None:
    proc, file = tmp_path / "proc", tmp_path / "cgroup/a/pids.max"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(f"{group}\n")
    (proc / "self/mountinfo").write_text(f"1 2 0:1 / {tmp_path}/cgroup rw - {kind}\n")
    file.parent.mkdir(parents=True)
    file.write_text(f"{most}\n")
    file.with_name("pids.current").write_text("21\n")
    finding = run_check("processes", check_processes, proc, euid=0)
    assert finding.level is level
    assert finding.found.startswith(text.format(file=file))
    if level is WARN:
        checked_advice(finding, WARN)


def test_processes_of_the_user_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (10**9, 10**9))
    assert "room for about" in check_processes(euid=os.geteuid() or 1)
    (limit, there, source), *_ = _process_limits(Path("/proc"), os.geteuid() or 1)
    assert source == "ulimit -u"
    assert limit == 10**9
    assert there >= (0 if os.geteuid() == 0 else 1)


def test_the_cpu_quota_is_shown() -> None:
    assert check_cpus(8, 8, 8) == "8 usable"
    assert check_cpus(8, 4, 1.5) == (
        "1.5 usable of 8: affinity allows 4, a cgroup's quota allows less"
    )


@pytest.mark.parametrize(
    ("group", "kind", "file"),
    [
        ("0::/a/b", "cgroup2 x rw", "a/memory.max"),
        ("0::/a/b", "cgroup2 x rw", "a/b/memory.max"),
        ("4:memory:/a", "cgroup x rw,memory", "a/memory.limit_in_bytes"),
        ("4:memory:/a", "cgroup x rw,memory", "memory.limit_in_bytes"),
    ],
)
def test_memory_is_the_tightest_limit(
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


def test_unreadable_memory_and_kernel_log_are_findings(tmp_path: Path) -> None:
    checked_advice(run_check("memory", check_memory, tmp_path), WARN)
    (tmp_path / "kmsg").write_text("")
    assert check_kernel_log(str(tmp_path / "kmsg")) == f"{tmp_path}/kmsg is readable"
    finding = run_check("kernel log", check_kernel_log, str(tmp_path / "no"))
    assert (
        checked_advice(finding, WARN).found
        == f"{tmp_path}/no: No such file or directory"
    )


def test_a_worker_can_raise_its_oom_score() -> None:
    (row,) = (each for each in CHECKS if each.name == "oom_score_adj")
    assert one(examine([row])).found == "a worker can raise its own value"
    finding = run_check("oom_score_adj", try_mechanism, ADJUST, "", executable=FALSE)
    assert "exit code" in checked_advice(finding, WARN).found
    refused = ADJUST.replace("before + 1", "before")
    if int(Path("/proc/self/oom_score_adj").read_text()) < 1000:
        finding = run_check("oom_score_adj", try_mechanism, refused, "")
        assert (
            checked_advice(finding, WARN).found == "a write does not change the value"
        )


def test_a_cgroup_can_be_killed() -> None:
    place = find_cgroup()
    if place.directory is None:
        pytest.skip(f"this machine has no cgroup2 for us: {place.reason}")
    assert "was killed in" in check_cgroup()
    remaining = Path(place.directory).glob("aiogpu-doctor-*")
    assert list(remaining) == []


def test_a_cgroup_that_kills_no_process_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sleeper ends all the same, as `no_process_left` checks."""
    monkeypatch.setattr(checks, "LIMIT", 0.05)
    monkeypatch.setattr(checks.Cgroup, "kill", lambda _: None)
    with pytest.raises(CheckError, match=r"did not end its process within 0\.05 s"):
        check_cgroup(lambda: ParentCgroup(str(tmp_path)))


def test_a_forbidden_cgroup_is_found(tmp_path: Path) -> None:
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    for place, text in (
        (ParentCgroup(str(nowhere)), "Not a directory"),
        (ParentCgroup(None, "none here"), "none here"),
        # A plain folder, unlike a cgroup, cannot be removed while it has files.
        (ParentCgroup(str(tmp_path)), "cannot be removed"),
    ):
        result = run_check("cgroup2", check_cgroup, lambda place=place: place)
        assert checked_advice(result, WARN).found.endswith(text)


# GPUs.


class FakeNvml:
    """A fake of NVML."""

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
    there, watch = Inventory(devices, len(on), problem), FakeNvml(*on, action=action)
    result = list(check_gpus(lambda: there, lambda: watch))
    assert watch.calls == ["open", "close"]
    return result


def test_gpus_with_all_readings() -> None:
    nvml, first, second = gpu_findings(
        Sample({7: 5}, frozenset(), True, 3 << 29), Sample({}, frozenset(), True, 0)
    )
    assert (nvml.level, nvml.found) == (OK, "driver 570.00, 2 GPUs")
    assert (first.name, first.level) == ("gpu 0", OK)
    assert first.found == f"{A100}, 1.5 GiB in use, 1 processes listed"
    assert second.found == f"{A100}, 0.0 GiB in use, 0 processes listed"


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Sample(problem="GPU is lost", is_lost=True), "It is set aside."),
        (Sample(problem="Unknown Error"), "`unverified`"),
        (Sample(used=5), "`unverified`"),
        (Sample(), "`unverified`"),
        (Sample({}, used=5), "`unverified`"),
    ],
)
def test_gpus_with_missing_readings(sample: Sample, message: str) -> None:
    _, gpu = gpu_findings(sample)
    assert message in checked_advice(gpu, WARN).means


def test_unhealthy_gpus_are_found() -> None:
    well = Sample({}, frozenset(), True, 0)
    _, gpu = gpu_findings(well, action="GPU reset")
    assert "the driver asks for this: GPU reset" in checked_advice(gpu, WARN).found
    _, gpu = gpu_findings(well, action=None)
    assert gpu.level == OK
    there = Inventory((), 1, mig=(MigGpu(Device(0, uuid="GPU-0", name=A100)),))
    nvml, gpu = check_gpus(lambda: there, FakeNvml)
    assert nvml.level == OK
    assert (
        checked_advice(gpu, WARN).found == f"{A100}: in MIG mode, without an instance"
    )
    nvml, *_ = gpu_findings(problem="GPU 0 does not answer: GPU is lost")
    assert "GPU is lost" in checked_advice(nvml, WARN).found
    nvml = run_check(
        "nvml", lambda: list(check_gpus(lambda: Inventory(problem="gone")))
    )
    assert not checked_advice(nvml, MISSING).is_fatal


def test_cuda_visible_devices_is_read_as_by_a_node() -> None:
    text = "CUDA_VISIBLE_DEVICES='': a node uses none"
    assert check_visible({"CUDA_VISIBLE_DEVICES": ""}) == text
    assert check_visible({}).startswith("CUDA_VISIBLE_DEVICES is not set: ")
    result = run_check("visible gpus", check_visible, {"CUDA_VISIBLE_DEVICES": "0,0"})
    assert "'0'" in checked_advice(result, WARN).found


def test_libraries_are_imported_as_by_a_zygote(
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
    (tmp_path / "torch.py").write_text(
        "class cuda:\n"
        "    is_initialized = staticmethod(lambda: False)\n"
        "    _is_in_bad_fork = staticmethod(lambda: True)\n"
    )
    with pytest.raises(CheckError, match="CUDA"):
        check_import("torch")


def test_installed_libraries_are_suggested() -> None:
    there = [name for name in LIBRARIES if find_spec(name) is not None]
    assert len(import_checks()) == len(there)


# The shared node of a user.


class SharedNode:
    """A node's directory.

    Attributes:
        path: of the node's socket.
    """

    def __init__(self, root: Path) -> None:
        self.path = str(root / "aiogpu" / "node.sock")
        self._root = root
        os.mkdir(root / "aiogpu", 0o700)

    def note(self, pid: int, version: str = __version__, *, is_alive: bool) -> None:
        """Write a pidfile for a process, or for an earlier one with the same pid."""
        started = start_time(pid) or 0
        record = Record(pid, started - (not is_alive), self.path, "", 0, 0, version)
        Path(self.path).with_suffix(".pid").write_text(json.dumps(record._asdict()))

    def bind(self) -> socket.socket:
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(self.path)
        return bound

    def found(self) -> list[Finding]:
        run = partial(check_service, self.path, self._root / "linger")
        return list(examine([Check("service", run)]))

    def one(self, level: Level) -> str:
        """The only finding, whose advice is checked."""
        (finding,) = self.found()
        assert finding.level is level, finding
        assert not finding.is_fatal
        assert bool(finding.means) is bool(finding.advice) is (level is not Level.OK)
        return " ".join(filter(None, (finding.found, finding.means, finding.advice)))


@pytest.fixture
def place(tmp_path: Path) -> SharedNode:
    return SharedNode(tmp_path)


@pytest.fixture
def listening(place: SharedNode) -> Iterator[None]:
    """A listener on the node's socket."""
    with place.bind() as bound:
        bound.listen()
        yield


@pytest.fixture
def child() -> Iterator[int]:
    """A process in place of a node."""
    pipe = subprocess.PIPE
    with subprocess.Popen(["/bin/cat"], stdin=pipe, stdout=pipe) as cat:
        assert cat.stdin is not None
        assert cat.stdout is not None
        # Before the first output, the loader may still have files open.
        os.write(cat.stdin.fileno(), b"?")
        assert os.read(cat.stdout.fileno(), 1) == b"?"
        yield cat.pid


def test_a_missing_shared_node_is_fine(place: SharedNode, child: int) -> None:
    assert place.one(OK).startswith(
        "no shared node runs, and none is needed; `aiogpu start"
    )
    # Another process with the same pid is not the node.
    place.note(child, is_alive=False)
    assert f"the pidfile of process {child}, which has ended, is left" in place.one(OK)
    pidfile = Path(place.path).with_suffix(".pid")
    pidfile.write_text("garbage")
    assert "none is needed" in place.one(OK)
    pidfile.unlink()
    os.rmdir(os.path.dirname(place.path))
    assert place.one(OK).startswith(
        "no shared node runs, and none is needed; `aiogpu start"
    )


@pytest.mark.usefixtures("listening")
def test_a_running_node_is_shown_with_its_limits(place: SharedNode, child: int) -> None:
    assert place.one(OK) == f"a node runs at {place.path}"
    place.note(child, is_alive=True)
    resource.prlimit(child, resource.RLIMIT_NOFILE, (4096, 4096))
    service, limits = place.found()
    assert service.found == f"a node runs at {place.path}, pid {child}"
    assert (service.name, service.level) == ("service", OK)
    assert (limits.name, limits.level) == ("service limits", OK)
    used = len(os.listdir(f"/proc/{child}/fd"))
    assert limits.found.startswith(
        f"limit of 4096 open files, {used} used; room for 79"
    )
    resource.prlimit(child, resource.RLIMIT_NOFILE, (64, 256))
    _, limits = place.found()
    assert limits.level is WARN
    assert "LimitNOFILE=" in limits.advice
    place.note(8, version="0.9", is_alive=False)
    assert f"with aiogpu 0.9; this is {__version__}" in place.one(WARN)


def test_a_silent_node_is_found(place: SharedNode, child: int) -> None:
    place.note(child, is_alive=True)
    message = "No such file or directory, but process"
    assert f"{message} {child} is alive" in place.one(WARN)
    Path(place.path).with_suffix(".pid").unlink()
    place.bind().close()
    message = "Connection refused; the socket was left by a node"
    assert message in place.one(WARN)


def test_a_full_listen_queue_is_found(
    place: SharedNode, child: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "PATIENCE", 0.01)
    place.note(child, is_alive=True)
    with place.bind() as bound, ExitStack() as waiting:
        bound.listen(0)
        is_full = False
        while not is_full:
            visitor = waiting.enter_context(socket.socket(socket.AF_UNIX))
            visitor.setblocking(False)
            try:
                visitor.connect(place.path)
            except BlockingIOError:
                is_full = True
        text = place.one(WARN)
    assert f"no answer within 0.01 s, but process {child} is alive" in text


def test_a_directory_of_another_user_is_found(
    place: SharedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = os.path.dirname(place.path)
    os.chmod(directory, 0o755)
    text = place.one(WARN)
    assert f"{directory} has mode 0755" in text
    assert f"chmod 700 {directory}" in text
    owner = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 3_000_000_000)
        text = place.one(WARN)
    assert f"belongs to uid {owner}" in text
    assert "and this is uid 3000000000" in text
    os.rmdir(directory)
    Path(directory).write_text("")
    assert "is a regular file, where a directory is needed" in place.one(WARN)


def test_a_node_that_logout_would_kill_is_found(
    place: SharedNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checks, "RUN_USER", str(tmp_path))
    monkeypatch.setattr("pwd.getpwuid", lambda _uid: type("E", (), {"pw_name": "me"}))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(checks.directories, "unfit_directory", lambda _: None)
    with place.bind() as bound:
        bound.listen()
        _, lingers = place.found()
        assert "loginctl enable-linger me" in lingers.advice
        (tmp_path / "linger").mkdir()
        (tmp_path / "linger" / "me").touch()
        place.one(OK)
