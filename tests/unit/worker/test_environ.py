"""A worker's environment: bound for life, restored after each task."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from aiogpu.client.current import Context
from aiogpu.wire.messages import Bind
from aiogpu.worker import environment as environ


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    monkeypatch.setattr(environ, "_found", {})
    monkeypatch.setenv("AIOGPU_TEST_A", "before")
    monkeypatch.setenv("AIOGPU_TEST_B", "before")


def test_binding(context: Context) -> None:
    environ.bind(Bind({"AIOGPU_TEST_A": "bound"}, {"GPU": (0, "GPU-abc")}))
    assert os.environ["AIOGPU_TEST_A"] == "bound"
    assert context.accelerators == {"GPU": (0, "GPU-abc")}


def test_what_a_task_changes_is_restored_where_it_was_bound() -> None:
    environ.bind(Bind({"AIOGPU_TEST_A": "bound"}, {}))
    for change in ("changed", None):
        if change is None:
            del os.environ["AIOGPU_TEST_A"]
        else:
            os.environ["AIOGPU_TEST_A"] = os.environ["AIOGPU_TEST_B"] = change
        environ.restore()
        assert os.environ["AIOGPU_TEST_A"] == "bound"
    assert os.environ["AIOGPU_TEST_B"] == "changed", "the user's own"


def test_generators_are_seeded_where_they_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeded: list[str] = []
    monkeypatch.delitem(sys.modules, "numpy.random", raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for renew in environ.seeds():
        renew()
    assert seeded == []
    assert "torch" not in sys.modules
    numpy_random = SimpleNamespace(seed=lambda seed: seeded.append(bytes(seed).hex()))
    torch = SimpleNamespace(
        default_generator=SimpleNamespace(seed=lambda: seeded.append("torch"))
    )
    monkeypatch.setitem(sys.modules, "numpy.random", numpy_random)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    for renew in 2 * environ.seeds():
        renew()
    first, last, second, again = seeded
    assert last == again == "torch"
    assert first != second
    assert len(first) == len(second) == 32


def test_a_variable_that_is_kept() -> None:
    environ.keep("AIOGPU_TEST_A", "kept")
    os.environ["AIOGPU_TEST_A"] = "changed"
    environ.restore()
    assert os.environ["AIOGPU_TEST_A"] == "kept"


def test_pinning(capsys: pytest.CaptureFixture[str]) -> None:
    before = os.sched_getaffinity(0)
    first = min(before)
    try:
        environ.bind(Bind({}, {}, cpus=(first,)))
        assert os.sched_getaffinity(0) == {first}
        assert capsys.readouterr().err == ""
        environ.bind(Bind({}, {}, cpus=(4095,)))
        assert os.sched_getaffinity(0) == {first}
        assert "could not be pinned to CPUs (4095,)" in capsys.readouterr().err
        environ.bind(Bind({}, {}))
        assert os.sched_getaffinity(0) == {first}, "nothing is said of CPUs"
    finally:
        os.sched_setaffinity(0, before)
