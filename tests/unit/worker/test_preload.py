"""Imports of a zygote: their costs, edited files, variables read, and unfit modules."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from aiogpu.worker.zygote.preload import Files, recorded_reads
from tests.support.program import run, start
from tests.unit.worker.conftest import DriverEnd

WATCHING = """
    import sys, threading, traceback
    sys.path[:0] = sys.argv[1:3]
    from aiogpu.worker.zygote import preload as watching
    # On a busy machine, an empty module may take milliseconds.
    watching.NOISE = 15_000
    imports = watching.Imports()
    assert imports.watch()
    def costs():
        taken = imports.take()
        assert len(taken.names) == len(taken.microseconds)
        assert imports.take().names == ()
        return {
            name: cost for name, cost in zip(*taken) if name.startswith(("lib", "own"))
        }
    SLOW = 20_000
"""
LIBRARY = "import time\nt = time.perf_counter()\nwhile time.perf_counter() < t + 0.02:"
LIBRARY += " pass\n"


@pytest.fixture
def directories(tmp_path: Path) -> tuple[str, str]:
    """A directory of installed packages and a directory of the user's modules."""
    installed, own = tmp_path / "site-packages", tmp_path / "project"
    installed.mkdir()
    own.mkdir()
    (installed / "lib_a.py").write_text("import lib_b\n" + LIBRARY)
    (installed / "lib_b.py").write_text(LIBRARY)
    (installed / "lib_quick.py").write_text("")
    (installed / "lib_pack").mkdir()
    (installed / "lib_pack" / "__init__.py").write_text(LIBRARY)
    (installed / "lib_pack" / "part.py").write_text("")
    (installed / "lib_bad.py").write_text("import lib_b\nraise ValueError('bad')\n")
    (own / "own_a.py").write_text("import own_b, lib_quick\n")
    (own / "own_b.py").write_text("import lib_a\nimport lib_b\n" + LIBRARY)
    (own / "own_bad.py").write_text("import lib_a\n1 / 0\n")
    return str(installed), str(own)


STORIES = {
    "the topmost installed module counts": """
import lib_a
cost, = costs().values()
print("lib_a" in sys.modules, cost >= 2 * SLOW)
import lib_a, lib_b, lib_quick
print(costs())
""",
    "imports of a user's module count": """
import own_a
print(list(costs()))
""",
    "a part of a package brings the package": """
import lib_pack.part
(name, cost), = costs().items()
print(name, cost >= SLOW)
""",
    "imports of a module that fails count, and its traceback is unchanged": """
for name in ("lib_bad", "own_bad", "no_such_module"):
    try:
        exec(f"import {name}")
    except Exception as error:
        files = [f.filename for f in traceback.extract_tb(error.__traceback__)]
        print(type(error).__name__, [file.split("/")[-1] for file in files])
print(list(costs()))
""",
    "threads import at the same time": """
def load(name):
    __import__(name)
names = "lib_pack", "own_b"
threads = [threading.Thread(target=load, args=(name,)) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(sorted(costs()))
""",
    "is_installed tells installed modules from others": """
from aiogpu.worker.zygote.preload import is_installed
import json.decoder, _struct, zipimport, lib_a, own_a, types, importlib
for module in (json.decoder, _struct, sys, zipimport, lib_a):
    assert is_installed(module), module
odd = types.ModuleType("odd")
for module in (own_a, odd, object()):
    assert not is_installed(module), module
""",
}
"""Each story runs in a fork of an interpreter without these modules."""


def test_import_costs_belong_to_installed_modules(directories: tuple[str, str]) -> None:
    source = f"""{WATCHING}
    import os
    for name, story in {STORIES!r}.items():
        print(name, flush=True)
        if os.fork() == 0:
            exec(story)
            sys.stdout.flush()
            os._exit(0)
        assert os.wait()[1] == 0, name
    """
    titles = iter(STORIES)
    assert run(source, *directories).splitlines() == [
        next(titles),
        "True True",
        "{}",
        next(titles),
        "['lib_a']",
        next(titles),
        "lib_pack.part True",
        next(titles),
        "ValueError ['<string>', '<string>', 'lib_bad.py']",
        "ZeroDivisionError ['<string>', '<string>', 'own_bad.py']",
        "ModuleNotFoundError ['<string>', '<string>']",
        "['lib_b', 'lib_a']",
        next(titles),
        "['lib_a', 'lib_pack']",
        next(titles),
    ]


HOUR = 3600 * 10**9


@pytest.fixture
def edited_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a loaded module, written an hour ago."""
    path = tmp_path / "edited_module.py"
    path.touch()
    age(path, 1)
    module = ModuleType("edited_module")
    module.__spec__ = ModuleSpec("edited_module", None, origin=str(path))
    monkeypatch.setitem(sys.modules, "edited_module", module)
    return path


def age(path: Path, hours: float) -> None:
    written = time.time_ns() - int(hours * HOUR)
    os.utime(path, ns=(written, written))


def test_edit_of_a_file_is_reported_once(edited_file: Path) -> None:
    files = Files(time.time_ns())
    assert files.edited() == []
    age(edited_file, 0.5)
    assert files.edited() == ["edited_module"]
    assert files.edited() == []
    age(edited_file, 2)
    assert files.edited() == ["edited_module"], "an older file counts as an edit too"


def test_deleted_file_counts_as_an_edit_only_when_it_is_back(edited_file: Path) -> None:
    files = Files(time.time_ns())
    edited_file.unlink()
    assert files.edited() == []
    edited_file.touch()
    assert files.edited() == ["edited_module"]


def test_file_written_during_the_import_counts_as_edited(edited_file: Path) -> None:
    start_of_import = time.time_ns() - 2 * HOUR
    assert "edited_module" in Files(start_of_import).edited()


def test_edits_of_modules_of_aiogpu_do_not_count(edited_file: Path) -> None:
    sys.modules["aiogpu.edited_module"] = sys.modules.pop("edited_module")
    try:
        files = Files(time.time_ns())
    finally:
        sys.modules["edited_module"] = sys.modules.pop("aiogpu.edited_module")
    age(edited_file, 0.5)
    assert files.edited() == []


@pytest.mark.parametrize(
    ("is_recorded", "read"),
    [
        (True, lambda: os.environ["AIOGPU_TEST_A"]),
        (True, lambda: os.environ.get("AIOGPU_TEST_A")),
        (True, lambda: "AIOGPU_TEST_A" in os.environ),
        (True, lambda: os.environ.setdefault("AIOGPU_TEST_A", "2")),
        (True, lambda: os.environ.pop("AIOGPU_TEST_A", None)),
        (False, lambda: dict(os.environ)),
        (False, lambda: os.environ.copy()),
        (False, lambda: list(os.environ.items())),
        (False, lambda: {**os.environ}),
        (False, lambda: os.environ | {}),
        (False, lambda: repr(os.environ)),
        (False, lambda: os.environ.update(AIOGPU_TEST_B="2")),
        (False, lambda: subprocess.run(["true"], env={**os.environ}, check=True)),
    ],
)
def test_reads_of_single_variables_are_recorded(
    is_recorded: bool, read: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOGPU_TEST_A", "1")
    monkeypatch.setenv("AIOGPU_TEST_B", "2")
    with recorded_reads() as names:
        read()
    assert names == ({"AIOGPU_TEST_A"} if is_recorded else set())


def test_read_after_a_listing_is_recorded() -> None:
    with recorded_reads() as names:
        list(os.environ)
        os.environ.get("AIOGPU_TEST_NONE")
    assert names == {"AIOGPU_TEST_NONE"}


PROBING = """
    import os, sys, time
    from aiogpu.worker.zygote import keeper, preload as probe
    left, driver = [], os.pidfd_open(os.getppid())
    sys.path.insert(0, sys.argv[1])
    probe.DEVICE_FILES = (sys.argv[1] + "/fake_nvidia",)
    probe.LIMIT = 0.5
    fit, unfit = probe.probe(sys.argv[2:], lambda: left.append(1), driver)
    print(fit)
    for name, reason in unfit.items():
        print(name, "|", reason)
    assert not left, "only the fork calls the function"
    assert not set(sys.argv[2:]) & set(sys.modules)
    keeper.end_children()
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        print("no child is left")
"""
MODULES = {
    "good": "print('not shown', flush=True)",
    "better": "import good, os\nos.write(2, b'not shown')",
    "raises": "raise ValueError('two\\nlines')",
    "exits": "raise SystemExit(3)",
    "threads": (
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()"
    ),
    "device": "import os\nfile = open(os.path.dirname(__file__) + '/fake_nvidia0')",
    "hangs": "import threading\nthreading.Event().wait()",
    "crashes": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
    "leaves": "import os\nos._exit(7)",
    "looks": "import os\nos.environ.get('CUDA_VISIBLE_DEVICES')",
    "spawns": "import subprocess\nsubprocess.Popen(['sleep', '3'])",
}


@pytest.fixture
def module_directory(tmp_path: Path) -> str:
    for name, source in MODULES.items():
        (tmp_path / f"{name}.py").write_text(source)
    (tmp_path / "fake_nvidia0").touch()
    return str(tmp_path)


REASONS = {
    "raises": "its import raises ValueError: two lines",
    "exits": "its import raises SystemExit: 3",
    "no_such": "its import raises ModuleNotFoundError: No module named 'no_such'",
    "threads": "it left 1 threads running (Thread-1 (wait))",
    "device": "it opened {directory}/fake_nvidia0",
    "hangs": "its import did not end within 0.5 s",
    "crashes": "its import was ended by SIGSEGV",
    "leaves": "its import ended the process with code 7",
    "looks": "it reads CUDA_VISIBLE_DEVICES while it is imported",
}


def test_probe_names_unfit_modules_and_accepts_others(module_directory: str) -> None:
    reasons = {n: r.format(directory=module_directory) for n, r in REASONS.items()}
    out = run(PROBING, module_directory, "good", *REASONS, "better", "spawns")
    assert out.splitlines() == [
        "['good', 'better', 'spawns']",
        *(f"{name} | {reason}" for name, reason in reasons.items()),
        "no child is left",
    ]


def test_probe_dies_with_its_zygote(module_directory: str) -> None:
    """A zygote may be killed while its probe imports a module that hangs."""
    source = """
    import os, sys
    sys.path.insert(0, sys.argv[1])
    from aiogpu.linux import syscalls as kernel
    from aiogpu.worker.zygote import preload as probe
    kernel.adopt_orphans()
    driver = os.pidfd_open(os.getppid())
    middle = os.fork()
    if middle == 0:
        probe.probe(["hangs"], lambda: os.kill(os.getppid(), 9), driver)
        os._exit(0)
    print(os.waitpid(middle, 0)[1])
    print(os.waitpid(-1, 0)[1])
    """
    assert run(source, module_directory) == "9\n9\n"


PRELOAD = """
    import os, sys
    from aiogpu.wire.messages import Setup
    from aiogpu.worker.zygote.preload import Preload
    setup = Setup([], "node", "", 0, 0, sys.argv[2:])
    sys.path.insert(0, sys.argv[1])
    driver = os.pidfd_open(os.getppid())
    preload = Preload(setup, print, list, driver, str)
    print(preload.run(), os.environ.get("OMP_NUM_THREADS", "unset"))
"""


def test_import_sees_one_thread_and_no_devices_until_its_end(tmp_path: Path) -> None:
    (tmp_path / "curious.py").write_text(
        "import os\n"
        "print(os.environ['OMP_NUM_THREADS'], repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    )
    out = run(PRELOAD, str(tmp_path), "curious", OMP_NUM_THREADS="7")
    assert out.splitlines() == [
        "1 ''",
        "Ready(modules=('curious',), "
        "variables=('CUDA_VISIBLE_DEVICES', 'OMP_NUM_THREADS')) 7",
    ]


ZYGOTE = """
    import os, sys
    from aiogpu.memory.control_page import ControlPage
    from aiogpu.wire.messages import Setup
    from aiogpu.worker.zygote.main import Zygote
    page = ControlPage.create()
    Zygote(Setup([], "node", sys.argv[1], os.getppid(), page, [])).run()
"""


@pytest.mark.parametrize("exists", [False, True], ids=["removed", "closed"])
def test_zygote_of_closed_node_is_quiet(exists: bool, runtime_directory: Path) -> None:
    """Its driver may live: the user knows the error, or the driver called exec."""
    directory = runtime_directory / "node"
    if exists:
        directory.mkdir()
        DriverEnd(str(directory)).close_listener()
    zygote = start(ZYGOTE, str(directory))
    out, err = zygote.communicate(timeout=60)
    assert (zygote.returncode, out, err) == (0, "", "")
    assert not directory.exists(), "no other process removes it"
