"""`aiogpu.joblib`: the calls of `joblib.Parallel` as tasks."""

from __future__ import annotations

import os
from typing import Any

import pytest

import aiogpu
from aiogpu import sync

joblib = pytest.importorskip("joblib", reason="joblib is not installed")

import aiogpu.joblib  # noqa: E402


def where(x: int) -> tuple[int, int]:
    return x, os.getpid()


def fail_at(x: int, bad: int) -> int:
    if x == bad:
        raise KeyError(x)
    return x


def test_calls_are_tasks_in_order_with_their_errors(no_leaks: None) -> None:
    call: Any = joblib.delayed
    with sync.init(num_cpus=2), joblib.parallel_config("aiogpu", num_cpus=1):
        assert joblib.effective_n_jobs(-1) == 2
        found = joblib.Parallel(n_jobs=-1)(call(where)(i) for i in range(50))
        assert [x for x, _ in found] == [*range(50)]
        assert os.getpid() not in {pid for _, pid in found}
        with pytest.raises(KeyError, match="3"):
            joblib.Parallel(n_jobs=2)(call(fail_at)(i, 3) for i in range(10))
        items = joblib.Parallel(n_jobs=2, return_as="generator")(
            call(fail_at)(i, -1) for i in range(5)
        )
        assert list(items) == [*range(5)]
        with pytest.raises(aiogpu.OptionError, match="n_jobs=0"):
            joblib.Parallel(n_jobs=0)([])
    with (
        pytest.raises(aiogpu.OptionError, match="num_gpu"),
        joblib.parallel_config("aiogpu", num_gpu=1),
    ):
        pass
