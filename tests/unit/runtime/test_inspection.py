"""When the devices of an ended worker are looked at and what is told, by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from aiogpu.accelerators.base import Sample
from aiogpu.core.model.ids import LeaseId, WorkerId
from aiogpu.core.model.request import Device, Request
from aiogpu.core.model.units import UNIT
from aiogpu.core.resources.devices import Cause, DeviceSet
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.runtime.devices.release import ASIDE, PAUSES, DeviceRelease
from tests.unit.runtime.hand_loop import HandLoop, PromptThread
from tests.unit.runtime.paper_watch import PaperVendor, PaperWatch

PID, CHILD = 100, 101
ZERO, ONE = ("GPU", 0), ("GPU", 1)
GIB = 1 << 30
LIMIT = 10.0
LOST = Sample(problem="GPU is lost", is_lost=True)
RECOVERED = (Scheduler.device_changed, *ZERO, Cause.UNSETTLED, None)


def sample(*pids: int, used: int = GIB, reads_pids: bool = True) -> Sample:
    return Sample(dict.fromkeys(pids, GIB), frozenset(), reads_pids, used)


IDLE, BUSY = sample(), sample(PID, used=2 * GIB)


def lease(keys: tuple[tuple[str, int], ...], part: int) -> Lease:
    shares = tuple((index, part) for _, index in keys)
    request = Request.of({"CPU": UNIT}, {"GPU": part * len(keys)})
    return Lease(LeaseId(1), request, (shares,), Ledger({}))


def free(worker: int = 1, is_verified: bool = True) -> tuple[object, ...]:
    return Scheduler.devices_free, worker, is_verified


class Story:
    """Two GPUs, told in order."""

    def __init__(self, zero: Sample = IDLE, one: Sample = IDLE) -> None:
        self.watch = PaperWatch(zero, one)
        self.loop = HandLoop()
        sets = [DeviceSet("GPU", [Device(i, uuid=f"GPU-{i}") for i in range(2)])]
        thread = PromptThread(self.loop, sets, [PaperVendor(self.watch)])  # type: ignore[arg-type]
        self.told: list[tuple[object, ...]] = []
        self.release = DeviceRelease(
            self.loop,  # type: ignore[arg-type]
            thread,
            lambda *event: self.told.append(event),
            id,
            LIMIT,
        )
        thread.look([ZERO, ONE], lambda look: self.release.idle.update(look.samples))
        self.began = self.loop.now

    @property
    def now(self) -> float:
        return round(self.loop.now - self.began, 6)

    def put(self, zero: Sample | None = None, one: Sample | None = None) -> None:
        for index, on in enumerate((zero, one)):
            if on is not None:
                self.watch.on[index] = on

    def begin(self, worker: int = 1, *keys: tuple[str, int]) -> None:
        self.release.begin(WorkerId(worker), lease(keys or (ZERO,), UNIT))

    def news(self) -> list[tuple[object, ...]]:
        told, self.told = self.told, []
        return told

    def end(
        self,
        worker: int = 1,
        keys: tuple[tuple[str, int], ...] = (ZERO,),
        is_whole: bool = True,
        pid: int = PID,
    ) -> list[tuple[object, ...]]:
        held = lease(keys, UNIT if is_whole else UNIT // 4)
        assert self.release.end(WorkerId(worker), held, (pid,))
        return self.news()

    def step(self) -> list[tuple[object, ...]]:
        """Go to when the next look is due, and look."""
        self.loop.step()
        return self.news()

    def until_told(self) -> list[tuple[object, ...]]:
        while not (told := self.step()):
            assert self.now < 100
        return told


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_is_gone_at_once_costs_one_look(is_whole: bool) -> None:
    story = Story()
    if is_whole:
        story.begin()
    before = story.watch.looks[0]
    assert story.end(is_whole=is_whole) == [free()]
    assert story.watch.looks[0] == before + 1
    assert story.loop.due is None


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
    assert story.step() == [free()]
    assert story.loop.due is None


def test_past_the_limit_a_device_is_stuck_until_it_recovers() -> None:
    story = Story()
    story.put(BUSY)
    assert story.end() == []
    (stuck,) = story.until_told()
    assert story.now == LIMIT
    assert stuck == (
        Scheduler.devices_stuck,
        1,
        "GPU 0: of what has ended, the driver still lists pid 100 with 1024 MiB "
        "(1073741824 bytes)",
    )
    for _ in range(3):
        before = story.now
        assert story.step() == []
        assert story.now == before + ASIDE
    story.put(IDLE)
    assert story.step() == [RECOVERED]
    assert story.loop.due is None


def test_a_lost_device_is_not_waited_for() -> None:
    story = Story()
    story.put(LOST)
    assert story.end(is_whole=False) == [
        (
            Scheduler.devices_stuck,
            1,
            "GPU 0: the driver calls it lost (GPU is lost)",
        )
    ]
    assert story.step() == []
    story.put(IDLE)
    assert story.step() == [RECOVERED]


def test_of_several_devices_each_comes_back_by_itself() -> None:
    story = Story()
    story.begin(1, ZERO, ONE)
    story.put(one=BUSY)
    assert story.end(keys=(ZERO, ONE)) == []
    (step, _, reason), cleared = story.until_told()
    assert step is Scheduler.devices_stuck
    assert str(reason).startswith("GPU 1: ")
    assert cleared == RECOVERED
    assert story.watch.looks[0] == 3, "one that is free is not looked at again"
    story.put(one=IDLE)
    assert story.step() == [(Scheduler.device_changed, *ONE, Cause.UNSETTLED, None)]


def test_of_several_devices_all_come_back_together_in_time() -> None:
    story = Story()
    story.put(one=BUSY)
    assert story.end(keys=(ZERO, ONE)) == []
    story.put(one=IDLE)
    assert story.step() == [free()]


def test_a_device_recovers_when_the_last_worker_has_left_it() -> None:
    story = Story()
    story.put(BUSY)
    for worker in (1, 2, 3):
        assert story.end(worker, is_whole=False) == []
    told = [story.until_told() for _ in range(3)]
    assert [worker for ((_, worker, _),) in told] == [1, 2, 3]
    story.put(IDLE)
    assert [story.step() for _ in range(3)] == [[], [], [RECOVERED]]


def test_the_look_before_is_the_one_at_the_beginning() -> None:
    story = Story(zero=sample(CHILD))
    story.put(sample(used=5 * GIB))  # a stranger has come before the task
    story.begin()
    unlisted = Sample(used=5 * GIB, reads_pids=True)
    story.put(unlisted)
    assert story.end() == [free()]


def test_a_late_look_before_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiogpu.runtime.devices.release.LATE", -1.0)
    story = Story()
    story.put(Sample(used=2 * GIB))
    story.begin()
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
    assert story.step() == [free()]


def test_the_idle_look_follows_what_was_seen_free() -> None:
    story = Story()
    story.put(sample(CHILD, used=2 * GIB))
    story.begin()  # CHILD was listed before, and stays so
    assert story.end() == [free()]
    assert story.end(2) == [free(2)], "without a look at its beginning"


def test_a_driver_that_cannot_be_asked_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = Sample(problem="NVML does not start: Driver Not Loaded")
    story = Story(failing, failing)
    assert story.end() == [free(1, False)]
    assert story.end(keys=(ZERO, ONE), is_whole=False) == [free(1, False)]
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
    story.until_told()
    story.put(Sample(problem="Unknown Error"))
    assert story.step() == []
    story.put(IDLE)
    assert story.step() == [RECOVERED]


def test_ids_are_believed_once_a_workers_own_was_seen() -> None:
    """In a container: the driver may write ids of either namespace."""
    quiet = sample(reads_pids=False)
    story = Story(quiet, quiet)
    assert story.end(is_whole=False) == [free(1, False)]
    story.put(sample(PID, used=2 * GIB, reads_pids=False))
    assert story.end(is_whole=False) == []
    story.put(quiet)
    assert story.step() == [free()]
    assert story.end(2, (ONE,), is_whole=False) == [free(2)]


def test_where_nobody_is_asked_any_more_all_is_free() -> None:
    story = Story()
    story.put(BUSY)
    assert story.end() == []
    story.until_told()
    assert story.end(2) == []
    story.release.give_up()
    assert story.news() == [RECOVERED, free(2, False)]
    held = lease((ZERO,), UNIT)
    assert not story.release.end(WorkerId(3), held, (PID,))
    story.release.close()
    assert story.loop.due is None
