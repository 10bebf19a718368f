"""Starting an interpreter."""

from __future__ import annotations

import marshal
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from aiogpu.errors import NodeStartError
from aiogpu.runtime.zygote.config import (
    fitting,
    interpreter_flags,
    start_interpreter,
)
from tests.support.program import run

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


@pytest.mark.parametrize(
    "options",
    [
        *((), ("-O",), ("-OO", "-B"), ("-s",), ("-Werror::UserWarning", "-Wonce")),
        ("-X", "dev", "-X", "utf8=0", "-X", "pycache_prefix=/nowhere"),
    ],
    ids=lambda options: " ".join(options) or "none",
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
def pipe() -> Iterator[tuple[int, int]]:
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
    with pipe() as (page, output), pytest.raises(NodeStartError) as caught:
        start_interpreter({"sys_path": []}, page, output)
    assert (program or "sys.executable") in str(caught.value)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_the_child_reads_its_fields_and_reports_by_its_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    boot = "import marshal, os; print(marshal.loads(os.read(0, 1 << 24)), os.getsid(0))"
    monkeypatch.setattr("aiogpu.runtime.zygote.config._BOOT", boot)
    fields: dict[str, object] = {"path": "caf\udce9", "page": 3}
    with pipe() as (reading, writing):
        child = start_interpreter(fields, reading, writing)
        assert child.wait(60) == 0
        assert os.read(reading, 1000).decode() == f"{fields} {child.pid}\n"
    assert marshal.loads(marshal.dumps(fields)) == fields
