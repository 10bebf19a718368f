"""What a zygote prints when it ends: no more than its exit functions do."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.program import start

MODULE = """
import atexit
import ctypes
import sys

# Stands for nanobind, which prints what Python has not freed when it is finalised:
# in a zygote, whose objects are frozen, all of it. `malloc_stats` prints as well.
ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).malloc_stats)
atexit.register(print, "leaving in good order", file=sys.stderr)
"""
PROGRAM = """
    import aiogpu

    @aiogpu.remote
    def loaded():
        import sys
        return "talkative" in sys.modules

    async def main():
        async with aiogpu.init(num_cpus=1, preload=("talkative",)):
            print(await loaded.remote())

    aiogpu.run(main())
"""


@pytest.mark.fresh
def test_a_zygote_does_not_finalise_its_interpreter(tmp_path: Path) -> None:
    (tmp_path / "talkative.py").write_text(MODULE)
    program = start(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + dedent(PROGRAM)
    )
    out, err = program.communicate(timeout=120)
    assert (program.returncode, out) == (0, "True\n"), err
    assert "system bytes" not in err
    assert "leaving in good order" in err
