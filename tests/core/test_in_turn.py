"""The line of all shapes, looked at without being changed, and one's place in it."""

from hypothesis import given
from hypothesis import strategies as st

from aiogpu.core.model.ids import OWN, TaskId
from aiogpu.core.model.request import Request, Shape, TaskSpec
from aiogpu.core.queue.ready import SEARCHED, ReadyQueue, precedence
from aiogpu.core.records import TaskRecord, TaskState

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
    """A queue, and all that was ever in it."""

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
def test_all_are_seen_in_the_order_of_their_turn(moves):
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


def test_not_all_of_those_who_left_are_looked_at():
    line = Line()
    for _ in range(3 * SEARCHED):
        line.move("push", 0, 0, 0)
    for record in list(line.ready)[1 : SEARCHED - 1]:
        record.move(TaskState.ENDED)
        line.ready.discard(record)
    assert [record.id for record in line.ready.in_turn()] == [1, SEARCHED]
    assert len(line.ready) == 2 * SEARCHED + 2


def test_the_place_of_one_that_was_swept_to_the_front_is_found():
    line = Line()
    for _ in range(30_000):
        line.move("push", 0, 0, 0)
    records = list(line.ready)
    for record in records[13_000:]:
        record.move(TaskState.ENDED)
        line.ready.discard(record)
    (bucket,) = line.ready.buckets()
    assert bucket.size == 13_000
    for place in (SEARCHED - 1, SEARCHED + 1, 6_000, 12_999):
        assert bucket.position(records[place]) == place


@given(MOVES)
def test_looking_changes_nothing(moves):
    """Two lines with the same story, one of them looked at, go on alike."""
    seen, unseen = Line(), Line()
    for move in moves:
        seen.move(*move)
        unseen.move(*move)
        next(seen.ready.in_turn(), None)
        next(seen.ready.heads_in_turn(), None)
        assert [r.id for r in seen.waiting] == [r.id for r in unseen.waiting]
        for one, other in zip(
            seen.ready.groups(),
            unseen.ready.groups(),
            strict=True,
        ):
            assert one.first()[1].id == other.first()[1].id
