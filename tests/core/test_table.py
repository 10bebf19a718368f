"""A mapping by task id that grows a shard at a time."""

import pytest

from aiogpu.core.model.ids import TaskId
from aiogpu.core.queue.sharded_dict import BITS, ShardedDict


def table(*numbers: int) -> ShardedDict[str]:
    """Each id with its number as text."""
    made: ShardedDict[str] = ShardedDict()
    for number in numbers:
        made[TaskId(number)] = str(number)
    return made


def test_what_is_put_in_is_found():
    made = table(1, 2, 1 << BITS)
    assert made[TaskId(1)] == "1"
    assert made.get(TaskId(1 << BITS)) == "4096"
    assert made.get(TaskId(3)) is None
    assert made.get(TaskId(9 << BITS)) is None
    assert len(made) == 3
    assert list(made) == [1, 2, 1 << BITS]
    assert list(made.values()) == ["1", "2", "4096"]
    assert made


def test_one_asks_who_is_in_it_by_number():
    made = table(5)
    assert 5 in made
    assert 6 not in made
    assert "5" not in made


def test_what_is_taken_out_is_gone():
    made = table(1, 2)
    assert made.pop(TaskId(1)) == "1"
    del made[TaskId(2)]
    assert not made
    assert len(made) == 0


def test_what_is_not_there_cannot_be_taken_out():
    made = table(1)
    for absent in (2, 1 << BITS):
        with pytest.raises(KeyError):
            made.pop(TaskId(absent))
        with pytest.raises(KeyError):
            made[TaskId(absent)]


def test_no_shard_grows_beyond_its_part_and_an_empty_one_goes():
    made = table(*range(3 << BITS))
    assert [len(shard) for shard in made._shards.values()] == [1 << BITS] * 3
    for number in range(1 << BITS):
        made.pop(TaskId(number))
    assert len(made._shards) == 2


def test_an_id_below_zero_is_an_id():
    made = table(-1)
    assert made.pop(TaskId(-1)) == "-1"


@pytest.mark.parametrize("first", [1, (1 << BITS) - 2, (3 << BITS) - 1])
def test_many_are_put_in_found_and_taken_out_together(first: int):
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
