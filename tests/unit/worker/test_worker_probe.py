"""Learnt modules are tried in a throw-away fork: each way to be unfit is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.program import run

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


def test_all_are_fit(place: str) -> None:
    assert run(PROBING, place, "good", "better", "spawns") == (
        "['good', 'better', 'spawns']\nno child is left\n"
    )


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("raises", "its import raises ValueError: two lines"),
        ("exits", "its import raises SystemExit: 3"),
        ("no_such", "its import raises ModuleNotFoundError: No module named 'no_such'"),
        ("threads", "it left 1 threads running"),
        ("device", "it opened {place}/fake_nvidia0"),
        ("hangs", "its import did not end within 0.5 s"),
        ("crashes", "its import was ended by SIGSEGV"),
        ("leaves", "its import ended the process with code 7"),
        ("looks", "it reads CUDA_VISIBLE_DEVICES while it is imported"),
    ],
)
def test_a_culprit_is_named_and_the_others_are_fit(
    module: str, reason: str, place: str
) -> None:
    out = run(PROBING, place, "good", module, "better")
    assert out.splitlines() == [
        "['good', 'better']",
        f"{module} | {reason.format(place=place)}",
        "no child is left",
    ]


def test_several_culprits(place: str) -> None:
    out = run(PROBING, place, "crashes", "good", "raises", "leaves", "better")
    fit, *unfit, _ = out.splitlines()
    assert fit == "['good', 'better']"
    assert [line.split()[0] for line in unfit] == ["crashes", "raises", "leaves"]


TORCH = """
    import sys, types
    from aiogpu.worker.zygote.preload import unfit_to_fork
    torch = sys.modules["torch"] = types.ModuleType("torch")
    print(unfit_to_fork())
    torch.cuda = types.SimpleNamespace(
        is_initialized=lambda: False, _is_in_bad_fork=lambda: False
    )
    print(unfit_to_fork())
    torch.cuda._is_in_bad_fork = lambda: True
    print(unfit_to_fork())
    torch.cuda.is_initialized = lambda: True
    torch.cuda._is_in_bad_fork = lambda: False
    print(unfit_to_fork())
    torch.cuda.is_initialized = lambda: False
    torch.cuda._is_in_bad_fork = None
    print(unfit_to_fork())
"""


def test_torch_says_whether_it_could_use_cuda_in_a_fork() -> None:
    bad = "it made torch look for CUDA devices"
    found = run(TORCH, PYTHONUNBUFFERED="1").splitlines()
    assert found == ["None", "None", bad, bad, bad]


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
