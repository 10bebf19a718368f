"""What one program may have of a node: said, refused, waited for."""

import pytest

from aiogpu.core.queue.fair_share import Limits
from aiogpu.core.records import Memory
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.errors import AiogpuError, InfeasibleError, LimitError, OptionError
from aiogpu.observe.snapshot import snapshot, why
from aiogpu.testing import World

GIB = 1 << 30


@pytest.mark.parametrize("most", [0, -1, 1.5, True, "many"])
def test_a_number_of_tasks_is_one(most):
    with pytest.raises(OptionError, match=f"max_waiting={most!r} is no number"):
        Limits(max_waiting=most)


@pytest.mark.parametrize("share", [0, 1.1, 2])
def test_a_share_is_a_part(share):
    with pytest.raises(OptionError, match=r"max_share\['CPU'\].* is no part"):
        Limits(max_share={"CPU": share})


def test_what_a_node_does_not_have_cannot_be_limited():
    w = World(cpus=2)
    with pytest.raises(OptionError, match=r"'license' means nothing.*CPU, GPU"):
        w.join(1, limits=Limits(max_share={"license": 1}))
    assert w.scheduler.clients is None


@pytest.mark.parametrize("weight", [0, -1, float("inf"), float("nan")])
def test_a_weight_is_a_number_above_nought(weight):
    with pytest.raises(OptionError, match=f"weight={weight!r} is none"):
        World().join(1, weight)


def test_a_program_submits_no_more_than_it_may():
    w = World(cpus=1)
    w.join(1, limits=Limits(max_waiting=2))
    w.submit("a", client=1)
    w.submit("b", client=1)
    with pytest.raises(LimitError) as caught:
        w.submit("c", client=1)
    assert isinstance(caught.value, AiogpuError)
    assert str(caught.value) == (
        "this program has 2 tasks that have not ended, and its node lets it have 2 "
        "(max_waiting). Await some of them before it submits more, or join the node "
        "with a higher limit."
    )
    w.submit("other")
    w.finish("a")
    w.submit("c", client=1)
    with pytest.raises(LimitError):
        w.submit("child", client=1, parent="b")


def test_a_program_holds_no_more_than_it_may_and_others_go_past():
    w = World(cpus=8, gpus=4)
    w.join(1, limits=Limits(max_share={"GPU": 0.5}))
    for name in "abc":
        w.submit(name, num_gpus=1, client=1)
    assert w.running == {"a", "b"}
    w.submit("small", num_gpus=0.5, client=1)
    w.submit("cpus", client=1)
    w.submit("d", num_gpus=2)
    assert w.running == {"a", "b", "cpus", "d"}
    assert w.scheduler.reservation is None
    w.advance(5)
    w.submit("x", num_cpus=0)
    w.finish("x")
    assert w.scheduler.reservation is None
    w.finish("a")
    assert w.running == {"b", "c", "cpus", "d"}


def test_a_share_of_a_resource():
    w = World(cpus=8)
    w.join(1, limits=Limits(max_share={"CPU": 0.5}))
    for number in range(6):
        w.submit(f"t{number}", client=1)
    assert len(w.running) == 4
    w.join(1, limits=Limits(max_share={"CPU": 0.75}))
    assert len(w.running) == 6


def test_memory_of_gpus_is_limited_where_it_is_asked_for_by_name():
    w = World(cpus=8, gpus=2, gpu_memory="40GiB")
    w.join(1, limits=Limits(max_share={"gpu_memory": 0.375}))
    w.submit("a", gpu_memory="20GiB", client=1)
    w.submit("b", gpu_memory="20GiB", client=1)
    assert w.running == {"a"}
    [_, client] = w.scheduler.clients
    assert client.held == {"CPU": 10_000, "gpu_memory": 20 * GIB * 10_000}
    with pytest.raises(InfeasibleError, match="asks for 40GiB GPU memory"):
        w.submit("pair", num_gpus=2, gpu_memory="20GiB", client=1)


def test_what_alone_is_too_much_is_refused():
    w = World(cpus=8, gpus=4)
    w.join(1, limits=Limits(max_share={"GPU": 0.5}))
    with pytest.raises(InfeasibleError) as caught:
        w.submit("wide", num_gpus=3, client=1)
    assert str(caught.value) == (
        "the task asks for 3 GPU, and its node lets this program hold 2 at once: it "
        "would wait for ever. Ask for less, or join the node with a higher limit."
    )


def test_one_that_waits_for_its_limit_says_so():
    w = World(cpus=8, gpus=4)
    w.join(1, limits=Limits(max_share={"GPU": 0.25, "CPU": 0.25}))
    w.submit("a", num_cpus=2, num_gpus=1, client=1)
    w.submit("b", num_gpus=1, client=1)
    record = w.scheduler.tasks[w.tasks["b"].id]
    [seen] = snapshot(w.scheduler, {}, w.now).waiting
    assert seen.reason == (
        "waits for its program's own limit: it holds 2 of at most 2 CPU and 1 of at "
        "most 1 GPU"
    )
    told = why(w.scheduler, record, {}, w.now)
    assert told.limit == "2 of at most 2 CPU and 1 of at most 1 GPU"
    assert str(told) == (
        "b (task 1) has waited 0.0 s for its program's own limit: it holds 2 of at "
        "most 2 CPU and 1 of at most 1 GPU"
    )


def test_a_child_that_its_parent_keeps_from_running_fails():
    w = World(cpus=8, gpus=4)
    w.join(1, limits=Limits(max_share={"GPU": 0.25}))
    w.submit("parent", num_gpus=1, client=1)
    w.submit("child", num_gpus=1, parent="parent")
    w.submit("fine", parent="parent")
    w.wait_for("parent", "child", "fine")
    assert w.told == {"child": "deadlocked"}
    assert w.tasks["child"].reason == (
        "child asks for {CPU: 1, GPU: 1}, and those that wait hold it: parent holds "
        "{CPU: 1, GPU: 1} and waits for child; this program holds 1 of at most 1 GPU "
        "that its node lets it have"
    )


def test_a_parent_that_waits_does_not_count_its_cpus():
    w = World(cpus=8)
    w.join(1, limits=Limits(max_share={"CPU": 0.125}))
    w.submit("parent", client=1)
    w.submit("child", parent="parent")
    w.submit("next", client=1)
    w.wait_for("parent", "child")
    assert w.running == {"parent", "child"}
    w.wait_for("parent")
    assert w.running == {"parent", "child"}
    w.finish("child")
    assert w.waiting == {"next"}, "its program holds too much as it is"
    w.finish("parent")
    assert w.running == {"next"}


def test_a_device_of_its_own_is_tried_within_the_limit_alone():
    w = World(cpus=8, gpus=2)
    w.join(1, limits=Limits(max_share={"GPU": 0.25}))
    w.join(2, limits=Limits(max_share={"GPU": 0.5}))
    w.submit("a", num_gpus=0.5, retries_oom=True, client=1)
    w.submit("b", num_gpus=0.5, retries_oom=True, client=2)
    w.finish("a", ran_out=True)
    assert w.told == {"a": "settled"}
    w.finish("b", ran_out=True)
    assert w.running == {"b"}


def test_one_that_is_to_run_alone_keeps_to_the_limit():
    w = World(cpus=8, gpus=2)
    w.join(1, limits=Limits(max_share={"GPU": 0.5}))
    w.submit("greedy", num_gpus=0.5, client=1)
    w.submit("actor", num_gpus=0.5, client=1, is_endless=True)
    w.join(1, limits=Limits(max_share={"GPU": 0.25}))
    w.tell(Scheduler.kill_for_memory, w.worker_of("greedy"), Memory.HOST)
    assert "greedy" not in w.running
    w.join(1)
    assert "greedy" in w.running


def test_programs_are_forgotten_when_their_last_task_has_ended():
    w = World(cpus=1, exits=False)
    w.leave(9)
    w.join(1)
    w.leave(9)
    w.submit("a", client=1, max_calls=1)
    w.leave(1)
    assert repr(w.scheduler.clients) == "<Clients [0, 1]>"
    w.finish("a")
    assert repr(w.scheduler.clients) == "<Clients [0, 1]>", "its process is there"
    w.die(1)
    assert repr(w.scheduler.clients) == "<Clients [0]>"
    w.submit("b", client=1)
    w.leave(1)
    w.join(1)
    w.finish("b")
    assert repr(w.scheduler.clients) == "<Clients [0, 1]>"
    w.leave(1)
    assert repr(w.scheduler.clients) == "<Clients [0]>"


def test_a_program_that_left_is_forgotten_with_its_last_wish():
    w = World(gpus=1)
    w.join(1)
    w.join(2)
    w.submit("holds", num_gpus=1, client=1)
    w.lease("waits", num_gpus=1, client=2)
    w.leave(2)
    w.cancel("waits")
    assert repr(w.scheduler.clients) == "<Clients [0, 1]>"
    w.lease("waits too", num_gpus=1, client=1)
    w.cancel("waits too")
    assert repr(w.scheduler.clients) == "<Clients [0, 1]>"
