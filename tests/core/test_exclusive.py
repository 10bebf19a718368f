"""A task that ran out of device memory is tried once more, with a device of its own."""

import pytest

from aiogpu.core.model.request import Device, DeviceSelector, Request, Shape, TaskSpec
from aiogpu.core.model.units import BY_SHARE, UNIT
from aiogpu.core.records import Memory
from aiogpu.core.resources.devices import Cause
from aiogpu.core.scheduler.recovery import widened
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.testing import World

GIB = 1 << 30


def outgrow(w: World, name: str) -> None:
    """The task uses more than it has reserved."""
    w.tell(Scheduler.kill_for_memory, w.worker_of(name), Memory.DEVICE)


def request_of(w: World, name: str) -> str:
    """What it asks for now."""
    return str(w.scheduler.tasks[w.tasks[name].id].spec.shape.request)


def fail(w: World, name: str, how: str) -> None:
    """End a task for want of device memory, in one of two ways."""
    if how == "raises":
        w.finish(name, ran_out=True)
    else:
        outgrow(w, name)


HOWS = pytest.mark.parametrize("how", ["raises", "is ended"])


@HOWS
@pytest.mark.parametrize("asked", [{"num_gpus": 0.25}, {"gpu_memory": "10GiB"}])
def test_it_waits_again_at_once_for_a_whole_device(how, asked):
    w = World(gpus=1, gpu_memory="80GiB")
    w.submit("a", retries_oom=True, max_retries=0, **asked)
    w.submit("b", num_gpus=0.5)
    fail(w, "a", how)
    assert (w.waiting, w.told) == ({"a"}, {})
    assert request_of(w, "a") == "{CPU: 1, GPU: 1}"
    w.submit("c", num_gpus=0.5)  # it still shares with those that fit
    w.finish("b")
    w.finish("c")
    assert w.running == {"a"}
    assert w.free_gpus == [0]
    w.finish("a")
    assert w.told["a"] == "settled"


@HOWS
def test_it_does_not_wait_for_what_is_held_without_end(how):
    """An actor may be there for ever, and its owner would wait instead of knowing."""
    w = World(cpus=9, gpus=2, gpu_memory="80GiB")
    w.submit("without", is_endless=True)
    for name in "ab":
        w.submit(name, num_gpus=0.5, is_endless=True, strategy="spread")
    w.submit("c", num_gpus=0.5, retries_oom=True, max_retries=0)
    fail(w, "c", how)
    assert w.told == {"c": "settled" if how == "raises" else "lost"}
    w.cancel("b")
    w.finish("b")
    w.submit("d", num_gpus=0.5, retries_oom=True, max_retries=0)
    fail(w, "d", how)
    assert "d" not in w.told
    assert w.running >= {"d"}
    assert w.gpus_of("d") == [1]


@HOWS
def test_it_has_that_try_once(how):
    w = World(gpus=1, gpu_memory="80GiB")
    w.submit("a", num_gpus=0.5, retries_oom=True)
    fail(w, "a", how)
    assert w.running == {"a"}
    fail(w, "a", how)
    assert w.told == {"a": "settled" if how == "raises" else "lost"}


@HOWS
@pytest.mark.parametrize(
    "options",
    [
        {"num_gpus": 0.5},
        {"num_gpus": 1, "retries_oom": True},
        {"num_gpus": 2, "retries_oom": True},
        {"num_gpus": 0, "retries_oom": True},
    ],
)
def test_it_is_not_tried_again(how, options):
    """Without the option; with whole devices; without any."""
    w = World(gpus=2, gpu_memory="80GiB")
    w.submit("a", **options)
    fail(w, "a", how)
    assert w.told == {"a": "settled" if how == "raises" else "lost"}
    w.run_dry()


def test_other_retries_go_beside_it():
    w = World(gpus=1)
    w.submit("a", num_gpus=0.5, retries_oom=True, max_retries=1)
    w.finish("a", ran_out=True, retry=True)
    assert request_of(w, "a") == "{CPU: 1, GPU: 1}"
    w.finish("a", ran_out=True, retry=True)
    assert w.running == {"a"}
    w.die("a")
    assert w.told == {"a": "lost"}


def test_one_that_ran_out_without_the_option_is_retried_as_others_are():
    w = World(gpus=1)
    w.submit("a", num_gpus=0.5, max_retries=1)
    w.finish("a", ran_out=True, retry=True)
    assert request_of(w, "a") == "{CPU: 1, GPU: 0.5}"
    assert w.running == {"a"}
    w.finish("a", ran_out=True, retry=True)
    assert w.told == {"a": "settled"}


@HOWS
def test_one_that_nobody_wants_is_not_tried_again(how):
    w = World(gpus=1, exits=False)
    w.submit("a", num_gpus=0.5, retries_oom=True)
    w.cancel("a")
    fail(w, "a", how)
    if how == "is ended":
        w.die("a")
    assert w.forgotten == {"a"}


@HOWS
def test_while_the_node_closes_nothing_is_tried_again(how):
    w = World(gpus=1, exits=False)
    w.submit("a", num_gpus=0.5, retries_oom=True)
    if how == "is ended":
        outgrow(w, "a")
    w.close()
    if how == "is ended":
        w.die("a")
    else:
        w.finish("a", ran_out=True)
    assert w.told == {"a": "abandoned"}
    assert not w.scheduler.tasks


@HOWS
def test_a_task_is_not_made_to_wait_for_what_its_own_parent_holds(how):
    """It would wait for ever."""
    w = World(gpus=1)
    w.submit("parent", num_gpus=0.5)
    w.submit("child", num_gpus=0.25, retries_oom=True, parent="parent")
    w.wait_for("parent", "child")
    fail(w, "child", how)
    assert w.told == {"child": "settled" if how == "raises" else "lost"}
    assert w.running == {"parent"}


@HOWS
def test_a_child_is_tried_again_beside_its_parent(how):
    w = World(gpus=2)
    w.submit("parent", num_gpus=0.5)
    w.submit("child", num_gpus=0.25, retries_oom=True, parent="parent")
    w.wait_for("parent", "child")
    fail(w, "child", how)
    assert w.gpus_of("child") == [1]
    w.finish("child")
    assert w.told == {"child": "settled"}


def test_an_endless_one_is_begun_anew_as_its_restarts_say():
    w = World(gpus=1)
    w.submit("a", num_gpus=0.5, is_endless=True, max_calls=1, max_retries=1)
    outgrow(w, "a")
    assert w.running == {"a"}
    outgrow(w, "a")
    assert w.told == {"a": "lost"}


def test_those_behind_one_that_is_ended_wait_again():
    w = World(cpus=1, gpus=1, took=1e-5, revokes=False)
    for name in ("before", "a", "b", "c", "d", "e", "f"):
        w.submit(name, num_gpus=0.5, max_retries=0)
    w.finish("before")
    assert w.queued
    outgrow(w, "a")
    assert w.told == {"before": "settled", "a": "lost"}
    w.run_dry()
    assert set(w.told.values()) == {"settled", "lost"}
    assert list(w.told.values()).count("lost") == 1


def test_an_answer_may_come_before_the_end():
    w = World(gpus=1, exits=False)
    w.submit("a", num_gpus=0.5, max_retries=2)
    outgrow(w, "a")
    worker = w.worker_of("a")
    w.finish("a", retry=True)
    w.die(worker)
    assert w.running == {"a"}
    w.die("a")
    assert w.told == {}, "that was an end like any other"
    w.advance(1)
    assert w.running == {"a"}


def test_one_whose_end_comes_before_it_has_begun_has_lost_nothing():
    w = World(gpus=1, exits=False)
    w.submit("a", num_gpus=0.5, max_retries=0)
    outgrow(w, "a")
    w.workers[w.worker_of("a")].began = None
    w.die("a")
    assert w.running == {"a"}
    w.finish("a")
    assert w.told == {"a": "settled"}


def test_what_is_known_of_no_busy_worker_changes_nothing():
    w = World(gpus=1)
    w.submit("a")
    worker = w.worker_of("a")
    w.finish("a")
    w.tell(Scheduler.kill_for_memory, worker, Memory.DEVICE)
    w.tell(Scheduler.kill_for_memory, worker + 1, Memory.DEVICE)
    assert w.killed == []


def test_a_type_and_conditions_stay():
    where = DeviceSelector(least_capability=(8, 0))
    request = Request.of({}, {"GPU": 2_500}, "A100", where=where, gpu_memory=BY_SHARE)
    spec = TaskSpec("f", Shape(request, (("X", "1"),)), 7, retries_oom=True, priority=3)
    whole = widened(spec)
    assert whole is not None
    assert whole.shape.request == Request.of({}, {"GPU": UNIT}, "A100", where=where)
    assert whole.shape.environment == (("X", "1"),)
    assert (whole.pace, whole.lane, whole.function) == (spec.pace, spec.lane, 7)
    assert widened(whole) is None


@pytest.mark.parametrize(
    "where", [None, DeviceSelector(GIB), DeviceSelector(50 * GIB, (8, 0))]
)
def test_it_does_not_come_to_a_smaller_device_than_before(where):
    small, large = Device(0, memory=16 * GIB), Device(1, memory=80 * GIB)
    cards = [small, large, Device(2, memory=40 * GIB, compute_capability=(8, 0))]
    request = Request.of({}, {}, where=where, gpu_memory=30 * GIB)
    whole = widened(TaskSpec("f", Shape(request), retries_oom=True))
    assert whole is not None
    fits = whole.shape.request.where.fits
    found = [card.id for card in cards if fits(card)]
    assert found == ([] if where and where.least_capability > (0, 0) else [1, 2])


def test_it_may_wait_for_a_device_that_is_sick():
    w = World(gpus=2)
    w.submit("a", num_gpus=0.5, retries_oom=True)
    w.tell(Scheduler.device_changed, "GPU", 1, Cause.SICK, "XID 79")
    w.submit("b", num_gpus=0.5)
    w.finish("a", ran_out=True)
    assert w.waiting == {"a"}
    w.finish("b")
    assert w.gpus_of("a") == [0]
