"""The zygote's proof that it may be forked, and what it imports before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aiogpu.wire.messages import Close, Hello, Keep, Lost, Ready
from tests.support.program import run, start
from tests.unit.worker.driver_end import DriverEnd

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


def test_a_bare_interpreter_may_be_forked() -> None:
    source = """
    from aiogpu.worker.zygote.preload import unfit_to_fork
    print(unfit_to_fork())
    """
    assert run(source) == "None\n"


def test_threads_make_unfit() -> None:
    source = """
    import threading
    from aiogpu.worker.zygote.preload import unfit_to_fork
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    print(unfit_to_fork())
    end.set()
    for thread in threads:
        thread.join()
    """
    assert run(source) == "it left 2 threads running\n"


def test_an_open_device_makes_unfit(tmp_path: Path) -> None:
    device = tmp_path / "nvidia0"
    device.touch()
    source = """
    import sys
    from aiogpu.worker.zygote import preload as fitness
    fitness.DEVICE_FILES = (sys.argv[1],)
    with open(sys.argv[1] + "0"):
        print(fitness.unfit_to_fork())
    print(fitness.unfit_to_fork())
    """
    prefix = str(tmp_path / "nvidia")
    assert run(source, prefix) == f"it opened {device}\nNone\n"


def test_imports_are_guarded_and_the_guards_are_taken_back(tmp_path: Path) -> None:
    (tmp_path / "curious.py").write_text(
        "import os\n"
        "print(os.environ['OMP_NUM_THREADS'], repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    )
    place = str(tmp_path)
    out = run(PRELOAD, place, "curious", OMP_NUM_THREADS="7")
    assert out.splitlines() == [
        "1 ''",
        "Ready(modules=('curious',), "
        "variables=('CUDA_VISIBLE_DEVICES', 'OMP_NUM_THREADS')) 7",
    ]


def test_a_module_that_is_not_there(tmp_path: Path) -> None:
    out = run(PRELOAD, str(tmp_path), "json", "no_such_module", OMP_NUM_THREADS="7")
    unfit, last = out.splitlines()
    assert unfit.startswith("Unfit(module='no_such_module', reason=\"ModuleNotFound")
    assert unfit.endswith("is_missing=True)")
    assert last == "None 7"


def test_the_first_culprit_is_named(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    out = run(PRELOAD, str(tmp_path), "json", "threaded", "curious")
    assert out.splitlines()[0] == (
        "Unfit(module='threaded', reason='it left 1 threads running', is_missing=False)"
    )


ZYGOTE = """
    import os, sys
    from aiogpu.memory.control_page import ControlPage
    from aiogpu.wire.messages import Setup
    from aiogpu.worker.zygote.main import Zygote
    page = ControlPage.create()
    Zygote(Setup([], "node", sys.argv[1], os.getppid(), page, [])).run()
"""


@pytest.mark.parametrize("gone", ["pipes", "readers", "listener"])
def test_a_slot_that_was_given_up_meanwhile_is_no_trouble(
    gone: str, driver: DriverEnd
) -> None:
    """A driver that closes takes back what its last keeper was to begin with."""
    paths = [f"{driver.directory}/4.{stream}" for stream in (1, 2)]
    pipes = []
    if gone != "pipes":
        for path in paths:
            os.mkfifo(path)
    if gone == "listener":
        pipes = [os.open(path, os.O_RDWR) for path in paths]
    zygote = start(ZYGOTE, driver.directory)
    assert isinstance(driver.accept(), Hello)
    assert isinstance(driver.next(), Ready)
    if gone == "listener":
        driver.close_listener()
    driver.send(Keep(4))
    assert driver.next() == Lost(4)
    driver.send(Close())
    out, err = zygote.communicate(timeout=60)
    assert (zygote.returncode, out, err) == (0, "", "")
    for pipe in pipes:
        os.set_blocking(pipe, False)
        with pytest.raises(BlockingIOError):
            os.read(pipe, 1000)
        os.close(pipe)
    for path in paths:
        Path(path).unlink(missing_ok=True)


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
