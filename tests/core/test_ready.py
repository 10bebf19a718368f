"""The order of those that wait, and how one leaves before its turn."""

from aiogpu.core.model.ids import OWN, TaskId
from aiogpu.core.model.request import Request, Shape, TaskSpec
from aiogpu.core.model.units import UNIT
from aiogpu.core.queue.ready import Bucket, ReadyQueue, precedence
from aiogpu.core.records import TaskRecord, TaskState
from aiogpu.core.scheduler.task_tree import adopt

ONE = Shape(Request.of({"CPU": UNIT}, {}))
TWO = Shape(Request.of({"CPU": 2 * UNIT}, {}))
ENVIRONMENTS = [Shape(ONE.request, (("X", value),)) for value in "12"]


def task(number: int, *, shape: Shape = ONE, priority: int = 0) -> TaskRecord:
    """A waiting task."""
    spec = TaskSpec(f"t{number}", shape, priority=priority)
    return TaskRecord(TaskId(number), spec)


def queue(*records: TaskRecord) -> ReadyQueue:
    """A queue of these, in this order."""
    ready = ReadyQueue()
    for record in records:
        ready.push(record)
    return ready


def leave(ready: ReadyQueue, record: TaskRecord) -> None:
    """Let a task end while it waits."""
    record.move(TaskState.ENDED)
    ready.discard(record)


def drain(ready: ReadyQueue) -> list[int]:
    """Take all tasks of the one group that waits; their ids in order."""
    [group] = ready.groups()
    ids = []
    while (first := group.first()) is not None:
        _, head, bucket = first
        ids.append(head.id)
        bucket.pop()
    return ids


def bucket_of(ready: ReadyQueue, shape: Shape) -> Bucket:
    """The first bucket of a shape."""
    lanes = ready.by_shape[OWN, shape]
    return lanes[min(lanes)]


def test_first_come_first_served():
    ready = queue(task(1), task(2), task(3))
    assert drain(ready) == [1, 2, 3]
    assert not ready.by_shape
    assert not ready.of_client


def test_higher_priority_goes_first():
    ready = queue(task(1), task(2, priority=5), task(3, priority=-1), task(4))
    assert drain(ready) == [2, 1, 4, 3]
    assert precedence(task(2, priority=5)) < precedence(task(1)) < precedence(task(4))


def test_a_child_goes_before_what_is_no_child():
    parent, child, grandchild = task(1), task(8), task(9)
    adopt(parent, child)
    adopt(child, grandchild)
    ready = queue(task(2), task(3, priority=1), child, grandchild)
    assert drain(ready) == [3, 9, 8, 2]


def test_one_that_comes_back_has_its_old_place():
    ready = queue(task(1, priority=1), task(5), task(6))
    ready.push_back(task(3))
    ready.push_back(task(4, priority=1))
    assert drain(ready) == [1, 4, 3, 5, 6]


def test_one_that_comes_back_may_be_the_only_one():
    ready = queue()
    ready.push_back(task(3))
    ready.push_back(task(2, priority=-1))
    assert drain(ready) == [3, 2]


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
    assert ready.some() is one
    leave(ready, two)
    assert repr(ready) == "<ReadyQueue 1 tasks of 1 shapes>"
    assert repr(bucket_of(ready, ONE)) == "<Bucket of 1 asking for {CPU: 1}>"
    leave(ready, one)
    assert not ready.by_shape
    assert ready.some() is None


def test_many_that_left_do_not_stay_in_memory():
    records = [task(number, priority=number % 2) for number in range(200)]
    ready = queue(*records, task(999, shape=TWO))
    for record in records[:150]:
        leave(ready, record)
    buckets = [one for one in ready.buckets() if one.shape == ONE]
    assert sum(len(one._rest) + len(one._swept) for one in buckets) < 120
    assert len(ready) == 51
    odd, even = range(151, 200, 2), range(150, 200, 2)
    assert [record.id for record in ready.in_turn()] == [*odd, *even, 999]


def test_a_lane_whose_tasks_have_all_left_is_skipped():
    urgent, other = task(1, priority=1), task(2)
    ready = queue(urgent, other)
    leave(ready, urgent)
    assert ready.position(other) == (0, 1)
    assert drain(ready) == [2]


def test_a_place_counts_all_that_go_before():
    low, high = task(1, priority=-1), task(3, priority=1)
    ready = queue(low, task(2), high, task(4), task(5, shape=ENVIRONMENTS[0]))
    assert [ready.position(record) for record in (high, low)] == [(0, 4), (3, 4)]


def test_shapes_that_differ_in_their_environment_take_turns():
    one, two = ENVIRONMENTS
    ready = queue(task(1, shape=one), task(2, shape=two), task(3, shape=one))
    [group] = ready.groups()
    assert group.size == 2
    order = []
    while (first := group.first()) is not None:
        turn, head, bucket = first
        assert turn == precedence(head)
        order.append(head.id)
        bucket.pop()
    assert order == [1, 2, 3]


def test_a_group_knows_of_an_earlier_one_at_once():
    one, two = ENVIRONMENTS
    ready = queue(task(5, shape=one), task(6, shape=two))
    [group] = ready.groups()
    for record in (task(7, shape=two, priority=1), task(2, shape=one, priority=1)):
        ready.push_back(record)
        assert group.first()[1] is record
    assert not ready.is_first(bucket_of(ready, two))
    assert ready.is_first(bucket_of(ready, one))


def test_a_shape_that_comes_again_is_not_taken_for_its_former_self():
    one, two = ENVIRONMENTS
    first = task(1, shape=one)
    ready = queue(first, task(2, shape=two))
    leave(ready, first)
    ready.push(task(3, shape=one))
    [group] = ready.groups()
    assert group.first()[1].id == 2
    assert group.size == 2


def test_a_group_of_nobody_has_no_first():
    only = task(1)
    ready = queue(only)
    [group] = ready.groups()
    leave(ready, only)
    assert group.first() is None
    assert not ready.of_client


def test_it_is_a_shapes_turn_if_no_other_goes_before():
    ready = queue(task(1, shape=TWO), task(2), task(3, shape=TWO))
    assert ready.is_first(bucket_of(ready, TWO))
    assert not ready.is_first(bucket_of(ready, ONE))
    bucket_of(ready, TWO).pop()
    assert ready.is_first(bucket_of(ready, ONE))
    bucket_of(ready, ONE).pop()
    assert ready.is_first(bucket_of(ready, TWO))


def test_buckets_are_told_apart():
    ready = queue(task(1), task(2, shape=TWO))
    one, two = ready.buckets()
    assert (one < two) != (two < one)
