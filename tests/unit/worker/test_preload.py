"""What a zygote imports: costs, edits, variables read, and whether it can fork."""

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
    # On a busy machine an empty module may take milliseconds.
    watching.NOISE = 15_000
    imports = watching.Imports()
    assert imports.watch()
    def found():
        said = imports.take()
        assert len(said.names) == len(said.microseconds)
        assert imports.take().names == ()
        return {
            name: cost for name, cost in zip(*said) if name.startswith(("lib", "own"))
        }
    SLOW = 20_000
"""
LIBRARY = "import time\nt = time.perf_counter()\nwhile time.perf_counter() < t + 0.02:"
LIBRARY += " pass\n"


@pytest.fixture
def places(tmp_path: Path) -> tuple[str, str]:
    """A directory of installed packages and one of the user's own."""
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
cost, = found().values()
print("lib_a" in sys.modules, cost >= 2 * SLOW)
import lib_a, lib_b, lib_quick
print(found())
""",
    "of a user's module, what it imports": """
import own_a
print(list(found()))
""",
    "a part of a package brings the package": """
import lib_pack.part
(name, cost), = found().items()
print(name, cost >= SLOW)
""",
    "what a failed import has brought stays, and its traceback is as it always was": """
for name in ("lib_bad", "own_bad", "no_such_module"):
    try:
        exec(f"import {name}")
    except Exception as error:
        files = [f.filename for f in traceback.extract_tb(error.__traceback__)]
        print(type(error).__name__, [file.split("/")[-1] for file in files])
print(list(found()))
""",
    "threads import at once": """
def load(name):
    __import__(name)
names = "lib_pack", "own_b"
threads = [threading.Thread(target=load, args=(name,)) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(sorted(found()))
""",
    "which modules are installed": """
from aiogpu.worker.zygote.preload import is_installed
import json.decoder, _struct, zipimport, lib_a, own_a, types, importlib
for module in (json.decoder, _struct, sys, zipimport, lib_a):
    assert is_installed(module), module
odd = types.ModuleType("odd")
for module in (own_a, odd, object()):
    assert not is_installed(module), module
""",
}
"""Each in a fork of an interpreter that has imported none of it."""


def test_what_counts_of_an_import(places: tuple[str, str]) -> None:
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
    assert run(source, *places).splitlines() == [
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
    """The file of a module that is loaded, written an hour ago."""
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


def test_an_edit_is_seen_once(edited_file: Path) -> None:
    files = Files(time.time_ns())
    assert files.edited() == []
    age(edited_file, 0.5)
    assert files.edited() == ["edited_module"]
    assert files.edited() == []
    age(edited_file, 2)
    assert files.edited() == ["edited_module"], "an older file is another one too"


def test_a_file_that_goes_has_not_changed(edited_file: Path) -> None:
    files = Files(time.time_ns())
    edited_file.unlink()
    assert files.edited() == []
    edited_file.touch()
    assert files.edited() == ["edited_module"]


def test_what_was_written_during_the_import_is_doubtful(edited_file: Path) -> None:
    began = time.time_ns() - 2 * HOUR
    assert "edited_module" in Files(began).edited()


def test_our_own_modules_do_not_count(edited_file: Path) -> None:
    module = sys.modules["edited_module"]
    sys.modules["aiogpu.edited_module"] = module
    del sys.modules["edited_module"]
    try:
        files = Files(time.time_ns())
    finally:
        sys.modules["edited_module"] = sys.modules.pop("aiogpu.edited_module")
    age(edited_file, 0.5)
    assert files.edited() == []


@pytest.fixture
def variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOGPU_TEST_A", "1")


@pytest.mark.usefixtures("variable")
@pytest.mark.parametrize(
    "read",
    [
        lambda: os.environ["AIOGPU_TEST_A"],
        lambda: os.environ.get("AIOGPU_TEST_A"),
        lambda: "AIOGPU_TEST_A" in os.environ,
        lambda: os.environ.setdefault("AIOGPU_TEST_A", "2"),
        lambda: os.environ.pop("AIOGPU_TEST_A", None),
    ],
)
def test_one_variable_is_read(read: Callable[[], object]) -> None:
    with recorded_reads() as names:
        read()
    assert names == {"AIOGPU_TEST_A"}


@pytest.mark.usefixtures("variable")
@pytest.mark.parametrize(
    "read",
    [
        lambda: dict(os.environ),
        lambda: os.environ.copy(),
        lambda: list(os.environ.items()),
        lambda: {**os.environ},
        lambda: os.environ | {},
        lambda: repr(os.environ),
        lambda: os.environ.update(AIOGPU_TEST_B="2"),
        lambda: subprocess.run(["true"], env={**os.environ}, check=True),
    ],
)
def test_all_variables_are_copied(
    read: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOGPU_TEST_B", "2")
    with recorded_reads() as names:
        read()
    assert names == set()


def test_one_is_read_after_all_were_listed() -> None:
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
    assert not left, "it is the fork that leaves"
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
def place(tmp_path: Path) -> str:
    for name, source in MODULES.items():
        (tmp_path / f"{name}.py").write_text(source)
    (tmp_path / "fake_nvidia0").touch()
    return str(tmp_path)


REASONS = {
    "raises": "its import raises ValueError: two lines",
    "exits": "its import raises SystemExit: 3",
    "no_such": "its import raises ModuleNotFoundError: No module named 'no_such'",
    "threads": "it left 1 threads running",
    "device": "it opened {place}/fake_nvidia0",
    "hangs": "its import did not end within 0.5 s",
    "crashes": "its import was ended by SIGSEGV",
    "leaves": "its import ended the process with code 7",
    "looks": "it reads CUDA_VISIBLE_DEVICES while it is imported",
}


def test_culprits_are_named_and_the_others_are_fit(place: str) -> None:
    out = run(PROBING, place, "good", *REASONS, "better", "spawns")
    assert out.splitlines() == [
        "['good', 'better', 'spawns']",
        *(f"{name} | {why.format(place=place)}" for name, why in REASONS.items()),
        "no child is left",
    ]


def test_the_probe_of_a_process_that_dies_dies_too(place: str) -> None:
    """The zygote may be killed while it waits for an import that never ends."""
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
    assert run(source, place) == "9\n9\n"


PRELOAD = """
    import os, sys
    from aiogpu.wire.messages import Setup
    from aiogpu.worker.zygote.preload import Preload
    setup = Setup([], "node", "", 0, 0, sys.argv[2:])
    sys.path.insert(0, sys.argv[1])
    driver = os.pidfd_open(os.getppid())
    preload = Preload(setup, print, list, driver)
    print(preload.run(), os.environ.get("OMP_NUM_THREADS", "unset"))
"""


def test_imports_are_guarded_and_the_guards_are_taken_back(tmp_path: Path) -> None:
    (tmp_path / "curious.py").write_text(
        "import os\n"
        "print(os.environ['OMP_NUM_THREADS'], repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    )
    directory_path = str(tmp_path)
    out = run(PRELOAD, directory_path, "curious", OMP_NUM_THREADS="7")
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


@pytest.mark.parametrize("is_there", [False, True], ids=["removed", "closed"])
def test_a_node_that_closed_before_is_no_trouble(
    is_there: bool, runtime_directory: Path
) -> None:
    """Its driver may live: it has told the user why already, or called exec."""
    directory = runtime_directory / "node"
    if is_there:
        directory.mkdir()
        DriverEnd(str(directory)).close_listener()
    zygote = start(ZYGOTE, str(directory))
    out, err = zygote.communicate(timeout=60)
    assert (zygote.returncode, out, err) == (0, "", "")
    assert not directory.exists(), "nobody else may remove it"
