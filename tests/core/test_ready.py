"""The order of those that wait, and how one leaves before its turn."""

from aiogpu.core.ids import TaskId
from aiogpu.core.lifecycle import TaskState
from aiogpu.core.ready import ReadyQueue, precedence
from aiogpu.core.records import TaskRecord, move_task
from aiogpu.core.resources import UNIT, Request
from aiogpu.core.specs import Shape, TaskSpec

ONE = Shape(Request.of({"CPU": UNIT}, {}))
TWO = Shape(Request.of({"CPU": 2 * UNIT}, {}))


def task(number: int, *, shape: Shape = ONE, priority: int = 0) -> TaskRecord:
    """A waiting task."""
    spec = TaskSpec(f"t{number}", shape, priority=priority)
    return TaskRecord(TaskId(number), spec, 0)


def queue(*records: TaskRecord) -> ReadyQueue:
    """A queue of these, in this order."""
    ready = ReadyQueue()
    for record in records:
        ready.push(record)
    return ready


def leave(ready: ReadyQueue, record: TaskRecord) -> None:
    """Let a task end while it waits."""
    move_task(record, TaskState.ENDED)
    ready.discard(record)


def drain(ready: ReadyQueue) -> list[int]:
    """Take all tasks of the one shape that waits; their ids in order."""
    [bucket] = ready.buckets()
    ids = []
    while (head := bucket.head()) is not None:
        ids.append(head.id)
        bucket.pop()
    ready.drop(bucket)
    return ids


def test_first_come_first_served():
    ready = queue(task(1), task(2), task(3))
    assert drain(ready) == [1, 2, 3]
    assert not ready.by_shape


def test_higher_priority_goes_first():
    ready = queue(task(1), task(2, priority=5), task(3, priority=-1), task(4))
    assert [record.id for record in ready] == [2, 1, 4, 3]
    assert drain(ready) == [2, 1, 4, 3]
    assert precedence(task(2, priority=5)) < precedence(task(1)) < precedence(task(4))


def test_a_task_that_has_waited_before_goes_ahead_of_its_priority():
    ready = queue(task(1, priority=1), task(2))
    ready.push_front(task(3))
    assert drain(ready) == [1, 3, 2]


def test_equal_shapes_share_a_bucket():
    ready = queue(task(1), task(2, shape=Shape(Request.of({"CPU": UNIT}, {}))))
    assert drain(ready) == [1, 2]


def test_one_that_leaves_is_passed_over():
    first, second, third = task(1), task(2), task(3)
    ready = queue(first, second, third)
    leave(ready, first)
    leave(ready, third)
    assert len(ready) == 1
    assert [record.id for record in ready] == [2]
    assert drain(ready) == [2]


def test_a_shape_that_nobody_waits_for_is_forgotten():
    one, two = task(1), task(2, shape=TWO)
    ready = queue(one, two)
    leave(ready, two)
    assert repr(ready) == "<ReadyQueue 1 tasks of 1 shapes>"
    leave(ready, one)
    assert not ready.by_shape
    assert ready.buckets() == []


def test_many_that_left_do_not_stay_in_memory():
    records = [task(number, priority=number % 2) for number in range(200)]
    ready = queue(*records, task(999, shape=TWO))
    for record in records[:150]:
        leave(ready, record)
    bucket = ready.buckets()[0]
    kept = sum(len(lane) for lane in bucket._lanes.values())
    assert kept < 120
    assert len(ready) == 51
    odd, even = range(151, 200, 2), range(150, 200, 2)
    assert [record.id for record in bucket] == [*odd, *even]
