"""The order of waiting tasks, and leaving the queue early."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiogpu.core.model.ids import OWN, TaskId
from aiogpu.core.model.request import Request, Shape, TaskSpec
from aiogpu.core.model.units import UNIT
from aiogpu.core.queue.ready import CHUNK, Bucket, ReadyQueue, precedence
from aiogpu.core.queue.sharded_dict import BITS, ShardedDict
from aiogpu.core.queue.timers import AT_ONCE, AlarmKind, Timers
from aiogpu.core.records import TaskRecord, TaskState
from aiogpu.core.scheduler.task_tree import adopt

ONE = Shape(Request.of({"CPU": UNIT}, {}))
TWO = Shape(Request.of({"CPU": 2 * UNIT}, {}))


def task(number: int, *, shape: Shape = ONE, priority: int = 0) -> TaskRecord:
    """Make a waiting task."""
    spec = TaskSpec(f"t{number}", shape, priority=priority)
    return TaskRecord(TaskId(number), spec)


def queue(*records: TaskRecord) -> ReadyQueue:
    """Make a queue of tasks, in this order."""
    ready = ReadyQueue()
    for record in records:
        ready.push(record)
    return ready


def leave(ready: ReadyQueue, record: TaskRecord) -> None:
    """End a waiting task."""
    record.move(TaskState.ENDED)
    ready.discard(record)


def drain(ready: ReadyQueue) -> list[int]:
    """Take all tasks of the only group; return their ids in order."""
    [group] = ready.groups()
    ids = []
    while (first := group.first()) is not None:
        _, head, bucket = first
        ids.append(head.id)
        bucket.pop()
    return ids


def bucket_of(ready: ReadyQueue, shape: Shape) -> Bucket:
    """Return the first bucket of a shape."""
    lanes = ready.by_shape[OWN, shape]
    return lanes[min(lanes)]


def line(count: int) -> tuple[Bucket, list[TaskRecord]]:
    """Make a bucket with `count` tasks."""
    records = [task(number) for number in range(count)]
    [bucket] = queue(*records).buckets()
    return bucket, records


def discard(bucket: Bucket, *records: TaskRecord) -> None:
    """Let tasks leave the bucket."""
    for record in records:
        bucket.discard(record)


def test_position_is_exact():
    bucket, records = line(10 * CHUNK)
    discard(bucket, *records[10:20], *records[3 * CHUNK : 5 * CHUNK])
    left = records[:10] + records[20 : 3 * CHUNK] + records[5 * CHUNK :]
    assert list(bucket) == left
    places = (0, 9, 10, CHUNK, len(left) - 1)
    assert [bucket.position(left[place]) for place in places] == list(places)


def test_tasks_come_back_to_their_places_in_any_order():
    bucket, records = line(6 * CHUNK)
    backwards = records[:0:-1]
    discard(bucket, *backwards)
    for record in [*backwards[::2], *backwards[1::2]]:
        bucket.push_back(record)
    assert list(bucket) == records
    assert [bucket.take(4 * CHUNK), bucket.size] == [records[:1], 6 * CHUNK - 1]


@pytest.mark.parametrize("before", [1, CHUNK - 1, CHUNK, CHUNK + 1])
@pytest.mark.parametrize("count", [1, CHUNK, 3 * CHUNK + 1])
def test_many_tasks_can_be_added_at_once(before, count):
    bucket, records = line(before)
    more = [task(before + number) for number in range(count)]
    bucket.extend(more)
    assert list(bucket) == records + more
    assert bucket.size == before + count


def test_order_is_priority_then_children_then_arrival():
    parent, child, grandchild = task(1), task(8), task(9)
    adopt(parent, child)
    adopt(child, grandchild)
    ready = queue(task(2), task(3, priority=5), child, grandchild, task(4, priority=-1))
    ready.push(task(10, shape=Shape(Request.of({"CPU": UNIT}, {}))))
    assert drain(ready) == [3, 9, 8, 2, 10, 4]
    assert not ready.by_shape
    assert not ready.of_client
    assert precedence(task(2, priority=5)) < precedence(task(1)) < precedence(task(4))


def test_buckets_with_equal_turns_have_an_order():
    """A heap compares buckets with equal turns."""
    first, second = queue(task(1), task(2, shape=TWO)).buckets()
    assert (first < second) != (second < first)


def test_shape_without_waiting_tasks_is_forgotten():
    first, second = task(1), task(2, shape=TWO)
    ready = queue(first, second)
    assert ready.any_task() is first
    leave(ready, second)
    assert repr(ready) == "<ReadyQueue 1 tasks of 1 shapes>"
    assert repr(bucket_of(ready, ONE)) == "<Bucket of 1 asking for {CPU: 1}>"
    leave(ready, first)
    assert not ready.by_shape
    assert ready.any_task() is None


SHAPES = [
    Shape(Request.of({"CPU": cpus}, {}), (("N", str(number)),))
    for cpus in (1, 2)
    for number in range(3)
]


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "leave", "begin", "back"]),
        st.integers(0, len(SHAPES) - 1),
        st.integers(-1, 1),
        st.integers(0, 30),
    ),
    max_size=60,
)


class Line:
    """A queue and all tasks that were ever in it."""

    def __init__(self) -> None:
        self.ready = ReadyQueue()
        self.last = 0
        self.begun: list[TaskRecord] = []

    @property
    def waiting(self) -> list[TaskRecord]:
        return sorted(self.ready, key=precedence)

    def move(self, what: str, shape: int, priority: int, choice: int) -> None:
        if what == "push":
            self.last += 1
            spec = TaskSpec("t", SHAPES[shape], priority=priority)
            self.ready.push(TaskRecord(TaskId(self.last), spec, float(self.last)))
        elif what == "leave" and (waiting := self.waiting):
            record = waiting[choice % len(waiting)]
            record.move(TaskState.ENDED)
            self.ready.discard(record)
        elif what == "begin" and (
            lanes := self.ready.by_shape.get((OWN, SHAPES[shape]))
        ):
            bucket = lanes[min(lanes)]
            record = bucket.head()
            bucket.pop()
            record.move(TaskState.STARTING)
            self.begun.append(record)
        elif what == "back" and self.begun:
            record = self.begun.pop(choice % len(self.begun))
            record.move(TaskState.WAITING)
            self.ready.push_back(record)


@given(MOVES)
def test_in_turn_yields_tasks_in_order(moves):
    line = Line()
    for move in moves:
        line.move(*move)
        waiting = line.waiting
        assert list(line.ready.in_turn()) == waiting
        heads = [head for head, _ in line.ready.heads_in_turn()]
        lanes = {}
        for record in waiting:
            lanes.setdefault((record.spec.shape, record.spec.lane), record)
        assert heads == list(lanes.values())
        for shape in SHAPES:
            records = [record for record in waiting if record.spec.shape == shape]
            for place, record in enumerate(records):
                assert line.ready.position(record) == (place, len(records))


@given(MOVES)
def test_in_turn_changes_nothing(moves):
    """Two queues with the same steps stay equal although one was inspected."""
    inspected, untouched = Line(), Line()
    for move in moves:
        inspected.move(*move)
        untouched.move(*move)
        next(inspected.ready.in_turn(), None)
        next(inspected.ready.heads_in_turn(), None)
        assert [r.id for r in inspected.waiting] == [r.id for r in untouched.waiting]
        for one, other in zip(
            inspected.ready.groups(),
            untouched.ready.groups(),
            strict=True,
        ):
            assert one.first()[1].id == other.first()[1].id


def table(*numbers: int) -> ShardedDict[str]:
    """Make a table of ids and texts."""
    made: ShardedDict[str] = ShardedDict()
    for number in numbers:
        made[TaskId(number)] = str(number)
    return made


def test_sharded_dict_behaves_like_a_dict():
    assert table(1), "one shard is enough"
    made = table(1, 2, -1, 1 << BITS)
    assert made[TaskId(1)] == "1"
    assert made.get(TaskId(1 << BITS)) == "4096"
    assert (made.get(TaskId(3)), made.get(TaskId(9 << BITS))) == (None, None)
    assert 1 in made
    assert 6 not in made
    assert "1" not in made
    assert [made.pop(TaskId(-1)), len(made)] == ["-1", 3]
    assert list(made) == [1, 2, 1 << BITS]
    assert list(made.values()) == ["1", "2", "4096"]
    del made[TaskId(1)]
    for absent in (1, 3, 5 << BITS):
        with pytest.raises(KeyError):
            made.pop(TaskId(absent))
        with pytest.raises(KeyError):
            made[TaskId(absent)]
    assert made
    made.pop_some([TaskId(2), TaskId(1 << BITS)])
    assert not made


@pytest.mark.parametrize("first", [1, (1 << BITS) - 2, (3 << BITS) - 1])
def test_sharded_dict_handles_many_ids_at_once(first: int):
    made = table()
    count = (2 << BITS) + 3
    ids = [TaskId(first + place) for place in range(count)]
    made.extend(TaskId(first), [str(number) for number in ids])
    assert list(made) == ids
    assert made.young.keys() == {one for one in ids if one >> BITS == ids[-1] >> BITS}
    assert made.some([ids[0], TaskId(1 << 40), ids[-1]]) == [
        f"{first}",
        None,
        str(ids[-1]),
    ]
    assert made.some(ids[-1:]) == [str(ids[-1])]
    made.pop_some(ids)
    assert not made
    with pytest.raises(KeyError):
        made.pop_some(ids[-1:])


def subjects(timers: Timers, now: float) -> list[int]:
    """Return the subjects of the alarms that are due."""
    return [alarm.subject for alarm in timers.due(now)]


def test_alarms_ring_in_order_of_time_and_of_setting():
    timers = Timers()
    timers.set(2.0, AlarmKind.STOP, 1)
    timers.set(1.0, AlarmKind.END, 2)
    timers.set(2.0, AlarmKind.EXPIRE, 3)
    assert timers.earliest == 1.0
    assert subjects(timers, 0.9) == []
    assert subjects(timers, 1.0) == [2]
    assert timers.earliest == 2.0
    assert subjects(timers, 9.0) == [1, 3]
    assert timers.earliest is None


def test_due_yields_a_limited_number_of_alarms():
    timers = Timers()
    for subject in range(AT_ONCE + 2):
        timers.set(1.0, AlarmKind.EXPIRE, subject)
    assert subjects(timers, 5.0) == list(range(AT_ONCE))
    assert timers.earliest == 1.0
    assert subjects(timers, 5.0) == [AT_ONCE, AT_ONCE + 1]
    assert timers.earliest is None


def test_stale_alarms_are_swept():
    timers = Timers()
    for subject in range(100):
        timers.set(60.0, AlarmKind.EXPIRE, subject)
    timers.set(60.0, AlarmKind.STOP, 5)
    alive = set(range(100))
    for subject in range(98):
        alive.remove(subject)
        timers.note_stale(AlarmKind.EXPIRE, alive)
    assert len(timers) < 60
    rung = subjects(timers, 60.0)
    assert set(rung) >= {98, 99, 5}
    assert rung == [*sorted(rung[:-1]), 5]
    assert timers.earliest is None


def test_few_stale_alarms_are_not_swept():
    timers = Timers()
    for subject in range(40):
        timers.set(60.0, AlarmKind.EXPIRE, subject)
        timers.note_stale(AlarmKind.EXPIRE, ())
    assert len(timers) == 40


def test_alarms_keep_their_order_during_a_sweep():
    timers, alive = Timers(), set(range(400))
    for subject in range(400):
        timers.set(float(subject), AlarmKind.EXPIRE, subject)
    for subject in range(1, 400, 3):
        alive.remove(subject)
        timers.note_stale(AlarmKind.EXPIRE, alive)
    for subject in range(2, 400, 3):
        alive.remove(subject)
        timers.note_stale(AlarmKind.EXPIRE, alive)
    assert 140 < len(timers) < 400
    timers.set(9.5, AlarmKind.STOP, 1)
    early = subjects(timers, 10.0)
    assert [subject for subject in early if subject in alive] == [0, 3, 6, 9]
    assert early[early.index(9) + 1] == 1
    assert timers.earliest is not None
    assert timers.earliest > 10
    late = subjects(timers, 400.0)
    assert timers.earliest is None
    assert late == sorted(late)
    assert set(late) >= {subject for subject in alive if subject > 10}


def test_pieces_leave_out_what_is_removed_meanwhile():
    shard = 1 << BITS
    made = table(0, 1, shard, 2 * shard)
    pieces = made.pieces()
    assert next(pieces) == [made[TaskId(0)], made[TaskId(1)]]
    made.pop(TaskId(shard))
    assert list(pieces)[-1] == [made[TaskId(2 * shard)]]
