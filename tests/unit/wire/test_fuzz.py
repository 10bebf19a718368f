"""The kept cases of the fuzzer `tests/unit/wire/fuzz.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.sampling import examples
from tests.unit.wire.cases import DESCRIPTORS, NODE, ROLES, TARGETS, Case, kept, run
from tests.unit.wire.fuzz import fuzz, name_of, valid
from tests.unit.wire.spoiling import framed

KEPT = kept()


@pytest.mark.parametrize("target", TARGETS)
def test_corpus_cases_keep_their_promises(target: str) -> None:
    cases = [case for case in KEPT.values() if case.target == target]
    assert cases
    for case in cases:
        run(case)
    # The case does not affect later cases.
    for case in valid():
        if case.target == target and target not in (DESCRIPTORS, "grant"):
            assert not [step for step in run(case) if " " in str(step.after)], case


@pytest.mark.parametrize("target", [NODE, *ROLES])
@pytest.mark.parametrize(
    "announced", [b"\xdd\0\1\0\0", b"\xdf\0\1\0\0", b"\xdc\xff\xff"]
)
def test_announced_but_missing_items_take_little_memory(
    target: str, announced: bytes
) -> None:
    body = announced * 1000 + bytes(70_000)
    run(Case(target, 0, framed(body)))


def test_broken_promise_is_reported_with_its_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tests.unit.wire.cases.STEPS", -(10**9))
    with pytest.raises(AssertionError, match="steps") as told:
        fuzz(0.1, 1)
    assert told.value.__notes__[-1].startswith("kept as fuzz-")
    (path,) = os.listdir(tmp_path)
    assert name_of(Case.unpack(Path(path).read_bytes())) == path.removeprefix("fuzz-")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_short_fuzzing_finds_nothing_new(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fuzz(examples(20), seed).tried > 100
