"""One line: first come, first served, and anybody may leave."""

import pytest

from aiogpu.core.model.ids import TaskId
from aiogpu.core.model.request import Request, Shape, TaskSpec
from aiogpu.core.queue.ready import SEARCHED, SWEPT, Bucket, ReadyQueue
from aiogpu.core.records import TaskRecord, TaskState

SPEC = TaskSpec("f", Shape(Request()))


def line(count: int) -> tuple[Bucket, list[TaskRecord]]:
    """A line of so many, and who stands in it."""
    ready = ReadyQueue()
    records = [TaskRecord(TaskId(number), SPEC) for number in range(count)]
    for record in records:
        ready.push(record)
    [lane] = ready.buckets()
    return lane, records


def leave(lane: Bucket, *records: TaskRecord) -> None:
    """These wait no longer."""
    for record in records:
        record.state = TaskState.ENDED
        lane.discard()


def ids(lane: Bucket) -> list[int]:
    """Who waits, in order."""
    return [record.id for record in lane]


def drain(lane: Bucket) -> list[int]:
    """Serve all; gives them in order."""
    served = []
    while (head := lane.head()) is not None:
        served.append(head.id)
        lane.pop()
    return served


def test_first_come_first_served():
    lane, _ = line(4)
    assert lane.size == 4
    assert drain(lane) == [0, 1, 2, 3]
    assert lane.head() is None
    assert lane.size == 0


def test_who_left_is_passed_over():
    lane, records = line(6)
    leave(lane, records[0], records[3], records[5])
    assert ids(lane) == [1, 2, 4]
    assert lane.size == 3
    assert drain(lane) == [1, 2, 4]


def test_one_that_has_been_first_is_first_again():
    lane, records = line(4)
    for _ in range(3):
        lane.pop()
    for record in (records[1], records[0], records[2]):
        lane.push_back(record)
    assert drain(lane) == [0, 1, 2, 3]


def test_one_that_comes_back_finds_those_gone_that_stood_before_it():
    lane, records = line(5)
    lane.pop()
    lane.pop()
    leave(lane, records[2])
    lane.push_back(records[1])
    lane.push_back(records[0])
    leave(lane, records[0])
    assert drain(lane) == [1, 3, 4]


@pytest.mark.parametrize("step", [1, -1, 7])
def test_nobody_is_lost_while_the_line_is_swept(step):
    """Whichever way they leave, all others stay in order."""
    lane, records = line(500)
    order = [records[number * step % 500] for number in range(430)]
    assert len(set(map(id, order))) == 430
    for number, record in enumerate(order):
        leave(lane, record)
        assert lane.size == 499 - number
    assert ids(lane) == [r.id for r in records if r.state is TaskState.WAITING]
    assert len(lane._swept) + len(lane._rest) < 200
    head = lane.head()
    assert head is not None
    assert lane.position(head) == 0
    for number in range(500, 510):
        lane.push(TaskRecord(TaskId(number), SPEC))
    assert drain(lane)[-10:] == list(range(500, 510))


def test_those_who_leave_in_order_are_not_there_to_be_skipped():
    lane, records = line(1_000)
    leave(lane, *records[:499])
    assert lane._rest[0] is records[499]
    assert len(lane._rest) == 501


def test_one_leaving_looks_at_a_few():
    lane, records = line(1_000)
    leave(lane, *reversed(records[1:600]))
    before = len(lane._rest)
    leave(lane, records[0])
    assert len(lane._rest) >= before - 2 * SWEPT


def test_a_place_is_counted():
    lane, records = line(10)
    leave(lane, records[2])
    assert [lane.position(records[n]) for n in (0, 1, 3, 9)] == [0, 1, 2, 8]


def test_a_place_far_behind_is_found_by_halves():
    lane, records = line(3 * SEARCHED)
    assert lane.position(records[SEARCHED + 7]) == SEARCHED + 7
    assert lane.position(records[-1]) == 3 * SEARCHED - 1
    leave(lane, *records[10:20])
    assert lane.position(records[-1]) == 3 * SEARCHED - 11


def test_a_place_far_behind_is_at_least_told_while_the_line_is_swept():
    lane, records = line(10 * SEARCHED)
    leave(lane, *(record for record in records if record.id % 3))
    assert len(lane._swept) > SEARCHED
    assert lane._rest
    rank = SEARCHED + 1_000
    assert SEARCHED <= lane.position(records[3 * rank]) <= rank


def test_the_place_of_one_that_is_not_there_is_the_end():
    lane, _ = line(3)
    assert lane.position(TaskRecord(TaskId(9), SPEC)) == 3


def test_those_like_the_first_are_taken_together():
    lane, records = line(6)
    other = TaskSpec("g", Shape(Request()))
    records[4].spec = other
    leave(lane, records[2])
    assert [record.id for record in lane.take(2)] == [0, 1]
    assert [record.id for record in lane.take(9)] == [3]
    assert lane.size == 2
    lane.extend([TaskRecord(TaskId(6), other), TaskRecord(TaskId(7), SPEC)])
    assert [record.id for record in lane.take(9)] == [4]
    assert drain(lane) == [5, 6, 7]
