"""Reused GPU workers: bound for life, and found again by their devices [B27]."""

import pytest

from aiogpu.testing import World


def warm(w, name, gpus, **options):
    """Leave an idle worker behind."""
    w.submit(name, num_gpus=gpus, **options)
    worker, held = w.worker_of(name), w.gpus_of(name)
    w.finish(name)
    return worker, held


def test_a_whole_gpu_goes_where_a_worker_waits():
    w = World(gpus=3)
    w.submit("first", num_gpus=1, max_retries=0)
    worker, held = warm(w, "second", 1)
    assert held == [1]
    w.die("first")
    w.submit("third", num_gpus=1)
    assert (w.worker_of("third"), w.gpus_of("third")) == (worker, [1])


def test_a_share_goes_where_a_worker_waits_if_that_is_as_good():
    w = World(gpus=3)
    w.submit("x", num_gpus=1, max_retries=0)
    w.submit("y", num_gpus=1, max_retries=0)
    worker, held = warm(w, "a", 0.5)
    assert held == [2]
    w.die("x")
    w.die("y")
    w.submit("b", num_gpus=0.5)
    assert (w.worker_of("b"), w.gpus_of("b")) == (worker, [2])


def test_packing_goes_before_a_waiting_worker():
    w = World(gpus=2)
    w.submit("x", num_gpus=1, max_retries=0)
    _, held = warm(w, "a", 0.5)
    assert held == [1]
    w.finish("x")
    w.submit("other", num_gpus=0.25, environment={"X": "1"})
    assert w.gpus_of("other") == [0]
    w.submit("b", num_gpus=0.5)
    assert w.gpus_of("b") == [0]


def test_a_set_of_gpus_is_found_again():
    w = World(gpus=4)
    w.submit("x", num_gpus=1, max_retries=0)
    worker, held = warm(w, "a", 2)
    assert held == [1, 2]
    w.finish("x")
    w.submit("b", num_gpus=2)
    assert (w.worker_of("b"), w.gpus_of("b")) == (worker, [1, 2])


def test_a_set_of_which_one_is_taken_is_not():
    w = World(gpus=4)
    w.submit("x", num_gpus=1, max_retries=0)
    _, held = warm(w, "a", 2)
    w.submit("y", num_gpus=0.5)
    assert (held, w.gpus_of("y")) == ([1, 2], [1])
    w.submit("b", num_gpus=2)
    assert w.gpus_of("b") == [2, 3]


@pytest.mark.parametrize("options", [{"max_calls": 1}, {"environment": {"X": "1"}}])
def test_those_who_cannot_use_the_worker_are_not_led_to_it(options):
    w = World(gpus=2)
    w.submit("x", num_gpus=1, max_retries=0)
    warm(w, "a", 1)
    w.finish("x")
    w.submit("b", num_gpus=1, **options)
    assert w.gpus_of("b") == [0]


def test_a_worker_that_has_gone_draws_nobody():
    w = World(gpus=2)
    w.submit("x", num_gpus=1, max_retries=0)
    worker, _ = warm(w, "a", 1)
    w.die("x")
    w.die(worker)
    w.submit("b", num_gpus=1)
    assert w.gpus_of("b") == [0]


def test_two_workers_of_one_device_are_both_remembered():
    w = World(gpus=2)
    w.submit("x", num_gpus=1, max_retries=0)
    for name in "ab":
        w.submit(name, num_gpus=0.5)
    for name in "ab":
        w.finish(name)
    w.die("x")
    for name in "cd":
        w.submit(name, num_gpus=0.5)
        assert w.gpus_of(name) == [1]
    assert len(w.workers) == 2


def test_of_two_sets_one_may_go():
    w = World(gpus=4)
    for name in "ab":
        w.submit(name, num_gpus=2)
    first, second = w.worker_of("a"), w.worker_of("b")
    for name in "ab":
        w.finish(name)
    w.die(first)
    w.submit("c", num_gpus=2)
    assert (w.worker_of("c"), w.gpus_of("c")) == (second, [2, 3])


@pytest.mark.parametrize(("ready", "wanted"), [(2, 3), (3, 2)])
def test_a_set_of_another_size_is_not_taken(ready, wanted):
    w = World(gpus=4)
    w.submit("x", num_gpus=1, max_retries=0)
    worker, held = warm(w, "a", ready)
    assert held == [1, 2, 3][:ready]
    w.finish("x")
    w.submit("b", num_gpus=wanted)
    assert w.gpus_of("b") == [0, 1, 2][:wanted]
    assert w.worker_of("b") != worker
    assert w.free_gpus == [0] * wanted + [1] * (4 - wanted)
