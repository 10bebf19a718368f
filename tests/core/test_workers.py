"""Which process runs what: reuse, bindings, isolation, and how many stay warm."""

import pytest

from aiogpu.core.effects import Assign, Retire, Spawn
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.scheduler.workers import Workers
from aiogpu.testing import World


def test_a_cpu_worker_is_used_again():
    w = World()
    w.submit("a")
    worker = w.worker_of("a")
    w.finish("a")
    w.submit("b")
    assert w.worker_of("b") == worker
    assert [type(effect) for effect in w.effects] == [Assign]


def test_the_worker_used_last_is_used_next():
    w = World()
    w.submit("a")
    w.submit("b")
    last = w.worker_of("a")
    w.finish("b")
    w.finish("a")
    w.submit("c")
    assert w.worker_of("c") == last


def test_another_environment_needs_another_worker():
    w = World()
    w.submit("a", environment={"X": "1"})
    worker = w.worker_of("a")
    w.finish("a")
    w.submit("b", environment={"X": "2"})
    assert w.worker_of("b") != worker
    w.submit("c", environment={"X": "1"})
    assert w.worker_of("c") == worker


def test_a_worker_keeps_its_devices():
    w = World(gpus=2)
    w.submit("on 0", num_gpus=1)
    w.submit("on 1", num_gpus=1)
    first, second = w.worker_of("on 0"), w.worker_of("on 1")
    w.finish("on 1")
    w.submit("on 1 again", num_gpus=0.5)
    assert w.worker_of("on 1 again") == second
    w.finish("on 0")
    w.submit("on 0 again", num_gpus=1)
    assert w.worker_of("on 0 again") == first
    w.submit("beside on 1", num_gpus=0.5)
    assert w.worker_of("beside on 1") not in {first, second}


def test_a_cpu_task_does_not_go_to_a_worker_that_has_a_gpu():
    w = World(gpus=1)
    w.submit("gpu", num_gpus=1)
    worker = w.worker_of("gpu")
    w.finish("gpu")
    w.submit("cpu")
    assert w.worker_of("cpu") != worker


def test_an_isolated_task_gets_a_process_that_has_run_nothing():
    w = World(gpus=1)
    w.submit("a", num_gpus=0.5)
    worker = w.worker_of("a")
    w.finish("a")
    w.submit("b", num_gpus=0.5, max_calls=1)
    assert w.worker_of("b") != worker
    [spawn, assign] = w.effects
    assert isinstance(spawn, Spawn)
    assert isinstance(assign, Assign)
    assert assign.is_first
    assert assign.is_last


def test_an_isolated_share_is_free_only_when_the_process_is_gone():
    w = World(gpus=1, exits=False)
    w.submit("a", num_gpus=1, max_calls=1)
    w.submit("b", num_gpus=1, max_calls=1)
    worker = w.worker_of("a")
    w.finish("a")
    assert w.told == {"a": "settled"}
    assert w.free_gpus == [0.0]
    assert w.waiting == {"b"}
    w.die(worker)
    assert w.running == {"b"}


def test_a_worker_that_does_not_exit_in_time_is_killed():
    w = World(gpus=1, exits=False, config=SchedulerConfig(exit_grace=5.0))
    w.submit("a", num_gpus=1, max_calls=1)
    worker = w.worker_of("a")
    w.finish("a")
    w.advance(4.9)
    assert w.killed == []
    w.advance(0.1)
    assert w.killed == [worker]


def test_a_worker_that_exits_in_time_is_not_killed():
    w = World(gpus=1)
    w.submit("a", num_gpus=1, max_calls=1)
    w.finish("a")
    w.advance(60)
    assert w.killed == []
    assert w.scheduler.deadline() is None


def test_a_worker_ends_after_so_many_calls_of_the_function():
    w = World(exits=False)
    w.submit("f", function=1, max_calls=2)
    worker = w.worker_of("f")
    w.finish("f")
    w.submit("g", function=2, max_calls=2)
    assert w.worker_of("g") == worker
    w.finish("g")
    w.submit("anything")
    assert w.worker_of("anything") == worker
    w.finish("anything")
    w.submit("f again", function=1, max_calls=2)
    assert w.worker_of("f again") == worker
    w.finish("f again")
    w.submit("next")
    assert w.worker_of("next") != worker


def test_a_call_that_is_retried_counts():
    w = World()
    w.submit("a", max_calls=2)
    worker = w.worker_of("a")
    w.finish("a", retry=True)
    assert w.worker_of("a") == worker
    w.finish("a", retry=True)
    w.advance(0.1)
    assert w.worker_of("a") != worker


def test_of_many_idle_workers_those_idle_longest_retire():
    w = World(cpus=4, config=SchedulerConfig(idle_workers=2))
    names = "abcd"
    for name in names:
        w.submit(name)
    workers = [w.worker_of(name) for name in names]
    for name in names:
        w.finish(name)
    assert w.retired == workers[:2]
    assert list(w.workers) == workers[2:]


def test_work_that_waits_comes_before_retirement():
    w = World(cpus=1, config=SchedulerConfig(idle_workers=0))
    w.submit("a")
    w.submit("b")
    w.finish("a")
    assert w.running == {"b"}
    assert w.retired == []
    w.finish("b")
    assert w.retired == [1]


def test_spare_workers_that_nobody_needs_retire_as_they_start():
    w = World(cpus=4, starts=False, config=SchedulerConfig(idle_workers=1))
    for name in "abcd":
        w.submit(name)
    for name in "abcd":
        w.cancel(name)
    for worker in (1, 2, 3, 4):
        w.start(worker)
    assert w.retired == [1, 2, 3]


def test_a_retired_worker_that_stays_is_killed():
    w = World(exits=False, config=SchedulerConfig(idle_workers=0, exit_grace=1.0))
    w.submit("a")
    w.finish("a")
    assert [type(effect) for effect in w.effects][-1] is Retire
    w.advance(1.0)
    assert w.killed == [1]


def test_an_idle_worker_that_dies_is_not_used():
    w = World(cpus=2)
    w.submit("a")
    w.submit("b")
    first, second = w.worker_of("a"), w.worker_of("b")
    w.finish("a")
    w.finish("b")
    w.die(second)
    w.submit("c")
    assert w.worker_of("c") == first
    w.finish("c")
    w.die(first)
    w.submit("d")
    assert w.worker_of("d") not in {first, second}


def test_a_starting_worker_whose_task_left_serves_the_next():
    w = World(gpus=1, starts=False)
    w.submit("a", num_gpus=1)
    worker = w.worker_of("a")
    w.cancel("a")
    assert w.free_gpus == [1.0]
    w.submit("b", num_gpus=0.5, max_calls=1)
    assert w.worker_of("b") == worker
    w.start("b")
    assert w.running == {"b"}


def test_a_starting_worker_whose_task_left_becomes_a_spare():
    w = World(starts=False)
    w.submit("a")
    worker = w.worker_of("a")
    w.cancel("a")
    w.start(worker)
    assert w.scheduler.workers.idle == 1
    w.submit("b", max_calls=1)
    assert w.worker_of("b") == worker
    assert w.running == {"b"}


def test_a_starting_worker_whose_task_left_may_die():
    w = World(starts=False)
    w.submit("a")
    worker = w.worker_of("a")
    w.cancel("a")
    w.die(worker)
    assert not w.workers


def test_nobody_can_be_sent_home_where_nobody_is_idle():
    workers = Workers()
    assert workers.take_clean(()) is None
    assert workers.take_bound(((), ())) is None
    assert workers.take_unclaimed(()) is None
    with pytest.raises(KeyError, match="no worker is idle"):
        workers.pop_idle()


def test_workers_show_how_many_there_are():
    w = World()
    w.submit("a")
    w.submit("b")
    w.finish("b")
    assert repr(w.scheduler.workers) == "<Workers 2: 1 idle>"
