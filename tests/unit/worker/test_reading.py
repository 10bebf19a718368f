"""Which variables were read: one by one, but not by whoever copies them all."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest

from aiogpu.worker.zygote.preload import recorded_reads


@pytest.fixture(autouse=True)
def variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOGPU_TEST_A", "1")


@pytest.mark.parametrize(
    "read",
    [
        lambda: os.environ["AIOGPU_TEST_A"],
        lambda: os.environ.get("AIOGPU_TEST_A"),
        lambda: os.getenv("AIOGPU_TEST_A", "default"),
        lambda: "AIOGPU_TEST_A" in os.environ,
        lambda: os.environ.setdefault("AIOGPU_TEST_A", "2"),
        lambda: os.environ.pop("AIOGPU_TEST_A", None),
    ],
)
def test_one_variable_is_read(read: Callable[[], object]) -> None:
    with recorded_reads() as names:
        read()
    assert names == {"AIOGPU_TEST_A"}


@pytest.mark.parametrize(
    "read",
    [
        lambda: dict(os.environ),
        lambda: os.environ.copy(),
        lambda: list(os.environ.items()),
        lambda: list(os.environ.values()),
        lambda: list(os.environ),
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


def test_it_ends() -> None:
    before = os.environ
    with recorded_reads() as names:
        pass
    os.environ.get("AIOGPU_TEST_A")
    assert names == set()
    assert os.environ is before
    assert type(os.environ) is os._Environ
    assert not {"names", "expected"} & set(vars(os.environ))


def test_a_name_that_is_no_text() -> None:
    with recorded_reads() as names, pytest.raises(TypeError):
        os.environ[1]  # type: ignore[index]
    assert names == set()
