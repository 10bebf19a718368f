"""Each system answers what it claims to; who fails is out, and leaves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec

import psutil
import pytest

from benchmarks.census import descendants
from benchmarks.environments import ENVIRONMENTS, missing
from benchmarks.field.contest import QUICK, Contest, Entry
from benchmarks.field.question import FLOOR, Opening, Question
from benchmarks.field.questions import QUESTIONS
from benchmarks.field.seat import LateError, OutError, Seat
from benchmarks.port import UnsupportedError

pytestmark = pytest.mark.either_loop

CALLS = {"call", "gathered", "argument-1KB", "argument-100KB"}
CALLS |= {"argument-10MB", "argument-100MB", "start", "waiting"}
ACTORS = {"actor-call", "actor-gathered"}
PASSING = {"passing-1KB", "passing-100MB"}
FRESH = {"fresh-bare", "fresh-numpy", "fresh-torch"}
CLAIMS = {
    "aiogpu": set(QUESTIONS),
    "node": set(QUESTIONS),
    "executor": CALLS | FRESH,
    "loky": CALLS,
    "dask": CALLS | ACTORS | PASSING | {"day"},
    "xoscar": CALLS | ACTORS | {"stream"},
    "ray": set(QUESTIONS),
}
TOGETHER = ["aiogpu", "executor"]
"""They are always here, and asked in one run."""
DAILY = ("call", "argument-1KB", "actor-call", "stream")
"""What they are asked with every change; all the rest takes a minute."""


def slow(names: list[str], called: str, *marks: pytest.MarkDecorator) -> object:
    return pytest.param(names, marks=[pytest.mark.slow, *marks], id=called)


def others() -> Iterator[object]:
    for name in sorted(set(ENVIRONMENTS) - set(TOGETHER)):
        marks = [pytest.mark.ray] if name == "ray" else []
        if why := missing(name):
            marks.append(pytest.mark.skip(reason=f"{why}: pip install 'aiogpu[bench]'"))
        yield slow([name], name, *marks)


def run(questions: list[Question], *names: str) -> list[Entry]:
    told: list[str] = []
    before = descendants()
    findings = asyncio.run(Contest(questions, names, QUICK).run(told.append))
    assert len(told) == len(questions)
    assert not descendants().keys() - before.keys(), (
        "everything that was started has ended"
    )
    return findings.entries


def test_every_system_has_its_claims() -> None:
    assert set(CLAIMS) == set(ENVIRONMENTS)
    assert all(claims <= set(QUESTIONS) for claims in CLAIMS.values())


def test_who_is_always_here_answers_what_it_claims() -> None:
    check_claims(TOGETHER, DAILY)


@pytest.mark.parametrize("names", [slow(TOGETHER, "together"), *others()])
def test_a_system_answers_what_it_claims(names: list[str]) -> None:
    check_claims(names, tuple(QUESTIONS))


def check_claims(names: list[str], asked: tuple[str, ...]) -> None:
    for entry in run([QUESTIONS[name] for name in asked], FLOOR, *names):
        question, where = QUESTIONS[entry.question], (entry.question, entry.contestant)
        if question.needs and find_spec(question.needs) is None:
            assert entry.why == f"{question.needs} is not installed", where
        elif entry.contestant == FLOOR or entry.question in CLAIMS[entry.contestant]:
            assert not entry.why, (where, entry.why)
            (figures,) = entry.turns
            assert set(figures) == {metric.name for metric in question.metrics}
            assert all(figures.values()), where
            assert all(value >= 0 for each in figures.values() for value in each)
        else:
            assert entry.why.startswith("not supported: "), (where, entry.why)


FAILING = """
import json, os, socket, subprocess, sys, time
connection = socket.socket(fileno=int(sys.argv[2]))
for line in connection.makefile():
    verb, _ = json.loads(line)
    if verb == "open":
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        if not os.fork():
            os.setsid()
            if not os.fork():
                time.sleep(600)
            os._exit(0)
        os.wait()
        while time.process_time() < 0.05:
            pass  # the kernel counts in ticks of 10 ms
        connection.sendall(b'{"answer": {}}\\n')
    elif sys.argv[1] == "hangs":
        time.sleep(600)
    elif sys.argv[1] == "dies":
        print("these are its last words", file=sys.stderr)
        raise SystemExit(1)
    else:
        connection.sendall(json.dumps({sys.argv[1]: "the reason"}).encode() + b"\\n")
"""


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("hangs", LateError, "no answer within 0.5 s"),
        ("dies", OutError, "its program ended: these are its last words"),
        ("failed", OutError, "the reason"),
        ("unsupported", UnsupportedError, "the reason"),
    ],
)
async def test_who_fails_is_out_and_leaves_nothing(
    how: str, error: type[Exception], words: str
) -> None:
    before = set(descendants())
    seat = Seat(how, ("-c", FAILING))
    try:
        await seat.sit(Opening(), 60)
        assert len(set(descendants()) - before) >= 4, "also what has left its session"
        assert seat.cpu_time() > 0
        with pytest.raises(error, match=words):
            await seat.prepare("call", 0.5 if how == "hangs" else 60)
    finally:
        await seat.leave()
    assert not set(descendants()) - before
    assert not seat.is_taken


async def test_a_warden_outlives_the_one_who_asks_by_nothing() -> None:
    """Who asks is killed: its end of the pipe closes, whatever else happens."""
    before = set(descendants())
    seat = Seat("hangs", ("-c", FAILING))
    await seat.sit(Opening(), 60)
    assert seat._warden is not None
    assert seat._warden.stdin is not None
    seat._warden.stdin.close()
    await asyncio.wait_for(seat._warden.wait(), 60)
    assert not set(descendants()) - before
    await seat.leave()


async def test_who_was_late_twice_is_asked_nothing_more() -> None:
    contest = Contest(list(QUESTIONS.values())[:1], ["aiogpu"], QUICK)
    contest._late["aiogpu"] = 2
    findings = await contest.run(lambda _: None)
    (entry,) = findings.entries
    assert entry.why == "left out: it was late 2 times before"


async def test_a_system_that_has_ended_by_itself_is_told() -> None:
    seat = Seat("aiogpu")
    try:
        await seat.sit(Opening(1), 60)
        assert "aiogpu" in seat.libraries
        assert seat._warden is not None
        (program,) = psutil.Process(seat._warden.pid).children()
        program.kill()
        with pytest.raises(OutError, match="its program ended"):
            await seat.prepare("call", 60)
    finally:
        await seat.leave()
