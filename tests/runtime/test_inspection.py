"""When devices are looked at and what is reported, on paper drivers, by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from aiogpu.accelerators.base import Sample
from aiogpu.core.model.request import Device
from aiogpu.runtime.devices.probe_thread import (
    ASIDE,
    LATE,
    PAUSES,
    Cleared,
    DeviceProbe,
    Inspection,
    Report,
    Stuck,
)
from tests.runtime.paper_watch import PaperWatch

PID, CHILD = 100, 101
ZERO, ONE = ("GPU", 0), ("GPU", 1)
GIB = 1 << 30
LIMIT = 10.0
LOST = Sample(problem="GPU is lost", is_lost=True)


def sample(*pids: int, used: int = GIB, reads_pids: bool = True) -> Sample:
    return Sample(dict.fromkeys(pids, GIB), frozenset(), reads_pids, used)


IDLE, BUSY = sample(), sample(PID, used=2 * GIB)


class Story:
    """An inspection of two GPUs, told in order."""

    def __init__(self, zero: Sample = IDLE, one: Sample = IDLE) -> None:
        self.watch = PaperWatch(zero, one)
        devices = {("GPU", i): Device(i, uuid=f"GPU-{i}") for i in range(2)}
        probe = DeviceProbe({"GPU": self.watch}, devices)
        self.inspection = Inspection(probe, LIMIT)
        probe.open()
        self.inspection.open({key: probe.look(key) for key in devices})
        self.now = 0.0

    def put(self, zero: Sample | None = None, one: Sample | None = None) -> None:
        for index, on in enumerate((zero, one)):
            if on is not None:
                self.watch.on[index] = on

    def begin(self, worker: int = 1, *keys: tuple[str, int], delay: float = 0) -> None:
        self.inspection.begin(worker, keys or [ZERO], delay)

    def end(
        self,
        worker: int = 1,
        keys: tuple[tuple[str, int], ...] = (ZERO,),
        is_whole: bool = True,
        pid: int = PID,
    ) -> list[Report]:
        whole = frozenset(keys if is_whole else ())
        return self.inspection.end(worker, keys, whole, (pid,), self.now)

    def step(self) -> list[Report]:
        """Go to when the next look is due, and look."""
        due = self.inspection.due
        assert due is not None
        assert due >= self.now
        self.now = due
        return self.inspection.turn(self.now)

    def until_reported(self) -> list[Report]:
        while not (reports := self.step()):
            assert self.now < 100
        return reports


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_is_gone_at_once_costs_one_look(is_whole: bool) -> None:
    story = Story()
    if is_whole:
        story.begin()
    before = story.watch.looks[0]
    assert story.end(is_whole=is_whole) == [Cleared(1, (ZERO,), True)]
    assert story.watch.looks[0] == before + 1
    assert story.inspection.due is None


def test_looks_come_soon_first_and_then_more_slowly() -> None:
    story = Story()
    story.put(BUSY)
    assert story.end() == []
    moments = [0.0]
    while story.now < 2:
        assert story.step() == []
        moments.append(story.now)
    pauses = [b - a for a, b in pairwise(moments)]
    assert pauses[: len(PAUSES)] == pytest.approx(PAUSES)
    assert pauses[len(PAUSES) :] == pytest.approx(
        [PAUSES[-1]] * (len(pauses) - len(PAUSES))
    )
    story.put(IDLE)
    assert story.step() == [Cleared(1, (ZERO,), True)]
    assert story.inspection.due is None


def test_past_the_limit_a_device_is_stuck_until_it_recovers() -> None:
    story = Story()
    story.put(BUSY)
    assert story.end() == []
    (stuck,) = story.until_reported()
    assert story.now == LIMIT
    assert stuck == Stuck(
        1,
        "GPU 0: of what has ended, the driver still lists pid 100 with 1024 MiB "
        "(1073741824 bytes)",
    )
    for _ in range(3):
        before = story.now
        assert story.step() == []
        assert story.now == before + ASIDE
    story.put(IDLE)
    assert story.step() == [Cleared(1, (ZERO,), True)]
    assert story.inspection.due is None


def test_a_lost_device_is_not_waited_for() -> None:
    story = Story()
    story.put(LOST)
    assert story.end(is_whole=False) == [
        Stuck(1, "GPU 0: the driver calls it lost (GPU is lost)")
    ]
    assert story.step() == []
    story.put(IDLE)
    assert story.step() == [Cleared(1, (ZERO,), True)]


def test_of_several_devices_each_comes_back_by_itself() -> None:
    story = Story()
    story.begin(1, ZERO, ONE)
    story.put(one=BUSY)
    assert story.end(keys=(ZERO, ONE)) == []
    stuck, cleared = story.until_reported()
    assert isinstance(stuck, Stuck)
    assert stuck.reason.startswith("GPU 1: ")
    assert cleared == Cleared(1, (ZERO,), True)
    assert story.watch.looks[0] == 3, "one that is free is not looked at again"
    story.put(one=IDLE)
    assert story.step() == [Cleared(1, (ONE,), True)]


def test_of_several_devices_all_come_back_together_in_time() -> None:
    story = Story()
    story.put(one=BUSY)
    assert story.end(keys=(ZERO, ONE)) == []
    story.put(one=IDLE)
    assert story.step() == [Cleared(1, (ZERO, ONE), True)]


def test_claims_on_one_device_share_a_look() -> None:
    story = Story()
    story.put(BUSY)
    for worker in (1, 2, 3):
        assert story.end(worker, is_whole=False) == []
    before = story.watch.looks[0]
    assert story.step() == []
    assert story.watch.looks[0] == before + 1
    story.put(IDLE)
    assert {report.worker for report in story.step()} == {1, 2, 3}


def test_the_look_before_is_the_one_at_the_beginning() -> None:
    story = Story(zero=sample(CHILD))
    story.put(sample(used=5 * GIB))  # a stranger has come before the task
    story.begin()
    unlisted = Sample(used=5 * GIB, reads_pids=True)
    story.put(unlisted)
    assert story.end() == [Cleared(1, (ZERO,), True)]


def test_a_late_look_before_does_not_count() -> None:
    story = Story()
    story.put(Sample(used=2 * GIB))
    story.begin(delay=LATE + 0.001)
    assert story.end() == []


def test_a_look_before_that_shows_the_worker_itself_is_corrected() -> None:
    story = Story()
    story.put(sample(PID, used=2 * GIB))
    story.begin()
    assert story.end() == []


def test_a_look_before_that_failed_is_replaced_by_the_idle_one() -> None:
    story = Story()
    story.put(Sample(problem="Unknown Error"))
    story.begin()
    story.put(Sample(used=2 * GIB))
    assert story.end() == []
    story.put(Sample(used=GIB))
    assert story.step() == [Cleared(1, (ZERO,), True)]


def test_the_idle_look_follows_what_was_seen_free() -> None:
    story = Story()
    story.put(sample(CHILD, used=2 * GIB))
    story.begin()  # CHILD was listed before, and stays so
    assert story.end() == [Cleared(1, (ZERO,), True)]
    assert story.end(2) == [Cleared(2, (ZERO,), True)], (
        "without a look at its beginning"
    )


def test_a_driver_that_cannot_be_asked_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = Sample(problem="NVML does not start: Driver Not Loaded")
    story = Story(failing, failing)
    assert story.end() == [Cleared(1, (ZERO,), False)]
    assert story.end(keys=(ZERO, ONE), is_whole=False) == [
        Cleared(1, (ZERO, ONE), False)
    ]
    (record,) = caplog.records
    assert record.getMessage() == (
        "! GPU 0 cannot be asked what is on it: NVML does not start: Driver Not "
        "Loaded. While that is so, its shares come back when their processes have "
        "ended, and nobody verifies it."
    )


def test_a_failure_that_comes_again_is_told_of_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    story = Story()
    for on in (Sample(problem="Timeout"), IDLE, Sample(problem="Timeout")):
        story.put(on)
        assert len(story.end()) == 1
    assert len(caplog.records) == 2


def test_a_failing_driver_frees_nothing_that_is_set_aside() -> None:
    story = Story()
    story.put(BUSY)
    story.end()
    story.until_reported()
    story.put(Sample(problem="Unknown Error"))
    assert story.step() == []
    story.put(IDLE)
    assert story.step() == [Cleared(1, (ZERO,), True)]


def test_ids_are_believed_once_a_workers_own_was_seen() -> None:
    """In a container: the driver may write ids of either namespace."""
    quiet = sample(reads_pids=False)
    story = Story(quiet, quiet)
    assert story.end(is_whole=False) == [Cleared(1, (ZERO,), False)]
    story.put(sample(PID, used=2 * GIB, reads_pids=False))
    assert story.end(is_whole=False) == []
    story.put(quiet)
    assert story.step() == [Cleared(1, (ZERO,), True)]
    assert story.end(2, (ONE,), is_whole=False) == [Cleared(2, (ONE,), True)]


def test_it_says_how_much_it_has_to_do() -> None:
    story = Story()
    assert repr(story.inspection) == "<Inspection 2 devices, 0 claims>"
