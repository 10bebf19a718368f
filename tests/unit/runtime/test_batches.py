"""Batches of a queue: all that is there at a time, and an end."""

from queue import SimpleQueue

from aiogpu.runtime.output import batches


def test_all_that_is_there_comes_at_once_and_none_ends_it():
    queue: SimpleQueue[int | None] = SimpleQueue()
    taken = batches(queue)
    for number in (1, 2, 3):
        queue.put(number)
    assert next(taken) == [1, 2, 3]
    queue.put(4)
    queue.put(None)
    assert list(taken) == [[4]]
