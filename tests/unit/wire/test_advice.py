from __future__ import annotations

import linecache
import sys
import warnings
from types import SimpleNamespace

import pytest

from aiogpu.errors import AiogpuWarning
from aiogpu.serialization.diagnostics import advise


def test_a_warning_points_at_the_first_line_that_is_not_ours():
    with pytest.warns(AiogpuWarning, match="slow") as caught:
        advise("slow")
    (seen,) = caught
    assert (seen.filename, linecache.getline(__file__, seen.lineno).strip()) == (
        __file__,
        'advise("slow")',
    )


def test_frames_of_aiogpu_and_cloudpickle_are_passed_over():
    space = {"__name__": "cloudpickle.cloudpickle", "advise": advise}
    exec("def pickled(): advise('slow')", space)
    inner = {"__name__": "aiogpu.api.remote_function", "pickled": space["pickled"]}
    exec("def remote(): pickled()", inner)
    with pytest.warns(AiogpuWarning) as caught:
        inner["remote"]()
    assert caught[0].filename == __file__


def test_where_all_is_ours_the_outermost_line_is_named(monkeypatch):
    def frame():
        return SimpleNamespace(f_globals={"__name__": "aiogpu.worker"}, f_back=None)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monkeypatch.setattr(sys, "_getframe", frame)
        advise("slow")
        monkeypatch.undo()
    assert [str(each.message) for each in caught] == ["slow"]


def test_a_namesake_is_not_ours():
    space = {"__name__": "aiogpuish.tasks", "advise": advise}
    exec(compile("def f(): advise('slow')", "theirs.py", "exec"), space)
    with pytest.warns(AiogpuWarning) as caught:
        space["f"]()
    assert caught[0].filename == "theirs.py"
