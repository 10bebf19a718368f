"""Tasks with several requests, of which the first that is free is taken."""

from __future__ import annotations

import pytest

from aiogpu.core.model.request import TaskSpec
from aiogpu.core.queue.fair_share import Limits
from aiogpu.core.scheduler.task_tree import STOPPED_AT_ONCE
from aiogpu.errors import InfeasibleError
from tests.core.builders import World, record_of, why_of

GPU_OR_CPUS = {"num_gpus": 1, "others": [{"num_cpus": 2}]}


def node(**options) -> World:
    """Four CPUs and one GPU."""
    return World(cpus=4, gpus=1, **options)


def cpus_of(w: World, name: str) -> float:
    """The CPUs that a task's worker holds."""
    record = record_of(w, name)
    return record.worker.lease.request.as_numbers().get("CPU", 0)


def test_the_first_request_that_is_free_is_taken_in_order():
    w = node()
    for name in ("a", "b", "c"):
        w.submit(name, **GPU_OR_CPUS)
    assert w.running == {"a", "b"}
    assert w.gpus_of("a") == [0]
    assert (cpus_of(w, "a"), cpus_of(w, "b")) == (1, 2)
    w.finish("a")
    assert w.gpus_of("c") == [0], "the first request that becomes free"
    w.check()


def test_a_task_in_the_queue_takes_what_becomes_free():
    w = node()
    w.submit("gpu", num_gpus=1, num_cpus=0)
    w.submit("cpus", num_cpus=4)
    for name in ("a", "b", "c"):
        w.submit(name, **GPU_OR_CPUS)
    assert w.waiting == {"a", "b", "c"}
    w.finish("cpus")
    assert w.running == {"gpu", "a", "b"}
    assert (cpus_of(w, "a"), cpus_of(w, "b")) == (2, 2)


def test_tasks_that_have_only_that_request_go_first():
    w = node()
    w.submit("gpu", num_gpus=1, num_cpus=0)
    w.submit("cpus", num_cpus=3)
    w.submit("first", num_cpus=2)
    w.submit("either", **GPU_OR_CPUS)
    assert w.waiting == {"first", "either"}
    w.finish("cpus")
    assert w.running == {"gpu", "first", "either"}
    assert cpus_of(w, "first") == cpus_of(w, "either") == 2


def test_a_later_task_that_fits_no_request_waits_behind_the_first():
    w = node()
    w.submit("gpu", num_gpus=1, num_cpus=0)
    w.submit("cpus", num_cpus=3)
    w.submit("either", **GPU_OR_CPUS)
    w.submit("either too", **GPU_OR_CPUS)
    w.cancel("either")
    w.finish("cpus")
    assert w.running == {"gpu", "either too"}
    assert not w.scheduler.ready.flexible


def test_a_retry_keeps_the_request_that_was_taken():
    w = node()
    w.submit("gpu", num_gpus=1, num_cpus=0)
    w.submit("either", **GPU_OR_CPUS)
    w.die("either")
    assert "either" in w.running
    assert cpus_of(w, "either") == 2


def test_no_deadlock_while_another_request_may_become_free():
    w = World(cpus=1, gpus=1)
    w.submit("parent", num_gpus=1, num_cpus=0)
    w.submit("other", num_cpus=1)
    w.submit("child", parent="parent", num_gpus=1, others=[{"num_cpus": 1}])
    w.wait_for("parent", "child")
    assert w.waiting == {"child"}
    w.finish("other")
    assert "child" in w.running


def test_a_limit_concerns_one_request_and_not_the_others():
    """The program may never hold a whole GPU; it gets the CPUs."""
    w = node()
    w.join(1, limits=Limits(max_share={"GPU": 0.5}))
    w.submit("either", client=1, **GPU_OR_CPUS)
    assert cpus_of(w, "either") == 2
    w.submit("cpus", num_cpus=2, client=1)
    w.submit("either too", client=1, **GPU_OR_CPUS)
    assert w.waiting == {"either too"}
    w.finish("cpus")
    assert cpus_of(w, "either too") == 2
    w.check()


def test_a_task_is_refused_if_limits_forbid_all_its_requests():
    w = node()
    w.join(1, limits=Limits(max_share={"GPU": 0.5, "CPU": 0.25}))
    text = "asks for 1 GPU, but this program may hold only 0.5, or for 2 CPU, but this"
    with pytest.raises(InfeasibleError, match=text):
        w.submit("either", client=1, **GPU_OR_CPUS)


def test_a_deadlock_in_all_requests_fails_the_child():
    w = World(cpus=1, gpus=1)
    w.submit("parent", num_gpus=1, num_cpus=0)
    w.submit("child", parent="parent", num_gpus=1, others=[{"num_gpus": 0.5}])
    w.wait_for("parent", "child")
    assert "child" not in w.waiting
    assert "child asks for {CPU: 1, GPU: 1} or {GPU: 0.5}" in w.tasks["child"].reason


def test_children_that_their_parent_gave_up_do_not_start():
    """So many are ended in batches; the CPUs of the parent are free before that."""
    w = node()
    w.submit("gpu", num_gpus=1, num_cpus=0)
    w.submit("parent", num_cpus=4)
    for number in range(2 * STOPPED_AT_ONCE):
        w.submit(f"child {number}", parent="parent", **GPU_OR_CPUS)
    w.finish("parent")
    assert w.running == {"gpu"}
    w.check()


def test_why_names_what_each_request_lacks():
    w = node()
    w.submit("gpu", num_gpus=1, num_cpus=0)
    w.submit("cpus", num_cpus=3)
    w.submit("either", **GPU_OR_CPUS)
    text = str(why_of(w, "either"))
    assert "GPU 1: 0 of 1 free" in text
    assert "or {CPU: 2}, for which it waits for CPU 2 (free: 1)" in text


def test_a_spec_gives_its_requests_back():
    w = node()
    w.submit("plain")
    w.submit("either", **GPU_OR_CPUS)
    record = record_of(w, "either")
    assert record.spec.choices()[0].shape.request.as_numbers() == {"CPU": 1, "GPU": 1}
    assert TaskSpec.any_of(record.spec.choices()).shape == record.spec.shape
    assert record_of(w, "plain").spec.choices() == ()
