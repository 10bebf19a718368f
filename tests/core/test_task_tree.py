"""Parents, children and dependencies: order, ends, deadlocks.

And waits that can never end, which are found out.
"""

import pytest

from aiogpu.core.effects import Fail, Failure, Forget
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.records import TaskState
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.core.scheduler.state import STOP_EVERY
from aiogpu.core.scheduler.task_tree import STOPPED_AT_ONCE
from tests.core.builders import World, status_of, why_of

PATIENCE = SchedulerConfig(cancel_grace=2.0, interrupt_every=0.5)


def tree(**options) -> World:
    """A world of one CPU where a parent waits for its running child."""
    return World(cpus=1, gpus=1, config=PATIENCE, **options).play("""
        submit parent gpus=0.5; submit child parent=parent; wait_for parent child
    """)


def test_task_that_waits_for_no_child_keeps_its_cpus():
    w = World(cpus=4).play("""
        submit a b; wait_for a b; wait_for a; blocked = (it has started nobody)
    """)
    w.submit("a's", parent="a")
    w.submit("b's", parent="b")
    w.wait_for("a", "a's")
    w.wait_for("b", "a's")
    assert w.blocked == {"a"}
    w.finish("a's")
    assert w.blocked == set()


def test_stopping_task_does_not_begin_to_wait():
    World(config=PATIENCE).play("""
        submit parent; submit child parent=parent is_detached=True; cancel parent
        wait_for parent child; blocked =; free has CPU:14.0
    """)


def test_child_goes_before_earlier_tasks():
    w = World(cpus=1).play("submit parent other; submit child parent=parent")
    w.play("""
        submit child-2 parent=parent; wait_for parent child child-2
        running = child parent
        submit grandchild parent=child; wait_for child grandchild
        finish grandchild child; running = child-2 parent
        finish child-2 parent; running = other
    """)


@pytest.mark.parametrize(
    ("of_parent", "of_child", "first"),
    [(1, 0, "child"), (0, 2, "child"), (0, 0, "urgent"), (1, -5, "child")],
)
def test_child_has_at_least_its_parents_priority(of_parent, of_child, first):
    w = World(cpus=1)
    w.submit("parent", priority=of_parent)
    w.submit("urgent", priority=1)
    w.submit("child", parent="parent", priority=of_child)
    w.wait_for("parent", "child")
    assert w.running == {"parent", first}


def end_by_cancel(w):
    w.cancel("parent")
    assert w.tasks["parent"].interrupts == w.tasks["child"].interrupts == 1


def end_by_timeout(w):
    w.advance(10.0)


def end_by_death(w):
    w.die("parent")


def end_by_retry(w):
    w.play("wait_for parent; finish parent retry=True")


def end_while_blocked(w):
    """The wait was cancelled in the worker, and the result came first."""
    w.finish("parent")


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        *[(end_by_cancel, None), (end_by_timeout, "expired"), (end_by_death, None)],
        *[(end_by_retry, None), (end_while_blocked, "settled")],
    ],
)
def test_children_end_with_their_parent(end, outcome):
    w = World(cpus=1, gpus=1, config=PATIENCE).play("""
        submit parent gpus=0.5 timeout=10.0; submit child parent=parent
        wait_for parent child; submit waits parent=child
    """)
    end(w)
    told = {"child": "disowned", "waits": "disowned"}
    assert w.told == told | ({"parent": outcome} if outcome else {})
    assert "waits" in w.forgotten
    if "child" in w.running:
        w.finish("child")
    assert w.blocked == set()
    if end in (end_by_death, end_by_retry):
        assert w.tasks["parent"].runs == 2
        w.submit("again", parent="parent")
        w.play("wait_for parent again; finish again parent; told has parent:settled")
    w.play("run_dry; free = CPU:1.0 GPU:1.0")


def test_cancelled_child_is_not_disowned():
    tree().play("cancel child parent; told =; finish child; forgotten = child")


def test_detached_child_outlives_its_parent():
    w = World(cpus=1).play("""
        submit parent; submit runs cpus=0 parent=parent is_detached=True
        submit waits parent=parent is_detached=True; finish parent
        told = parent:settled; running = runs waits; finish runs waits
    """)
    assert set(w.told.values()) == {"settled"}


@pytest.mark.parametrize("is_over", [True, False], ids=["ended", "being stopped"])
def test_ended_or_stopping_task_cannot_start_children(is_over):
    w = World(config=PATIENCE).play("submit parent")
    (w.finish if is_over else w.cancel)("parent")
    w.submit("child", parent="parent")
    child = w.tasks["child"].id
    assert w.effects == [Fail(child, Failure.DISOWNED), Forget(child)]
    assert w.told["child"] == "disowned"


def test_child_whose_handle_is_in_the_result_continues():
    w = World().play("submit parent; submit child other parent=parent")
    child = w.tasks["child"].id
    w.tell(Scheduler.detach, child)
    w.tell(Scheduler.detach, child)
    w.play("""
        finish parent; running has child; told has other:disowned
        finish child; told has child:settled
    """)
    w.tell(Scheduler.detach, child)
    w.submit("alone")
    w.tell(Scheduler.detach, w.tasks["alone"].id)
    assert "alone" in w.running


# Tasks with missing arguments.


def state_of(w, name):
    record = w.scheduler.tasks.get(w.tasks[name].id)
    return record and record.state


def test_task_with_missing_arguments_holds_nothing():
    w = World(cpus=1).play("submit first; submit then needs=first; submit later")
    assert state_of(w, "then") is TaskState.EXPECTING
    w.play("finish first; running = later; supply then then; submit last")
    assert state_of(w, "then") is TaskState.WAITING
    w.play("""
        finish later; running = then
        finish then; supply then; told has then:settled
    """)


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (lambda w: w.cancel("a"), None),
        (lambda w: w.advance(2.0), "expired"),
        (lambda w: w.finish("parent"), "disowned"),
        (lambda w: w.close(), "abandoned"),
        (lambda w: w.close(True), "abandoned"),
    ],
    ids=["cancelled", "expired", "its parent ends", "close", "close at once"],
)
def test_task_with_missing_arguments_can_end(end, outcome):
    w = World().play("submit parent")
    parent = "parent" if outcome == "disowned" else None
    w.submit("a", parent=parent, needs=[], timeout=1.0)
    end(w)
    assert w.tasks["a"].news == outcome
    assert w.tasks["a"].is_forgotten
    assert w.tasks["a"].runs == 0
    assert not w.scheduler.expecting


def test_deadlock_through_an_expected_result_fails():
    w = World(gpus=1).play("""
        submit parent gpus=1; submit needed parent=parent gpus=1
        submit one two parent=parent needs=needed; wait_for parent one two
        told = needed:deadlocked (whoever has the values fails the others)
        cancel one two; running has parent
    """)
    w.submit("third", parent="parent", num_gpus=1, needs=[])
    w.wait_for("parent", "third")
    w.play("told lacks third; supply third; told has third:deadlocked")


def test_why_names_the_expected_results():
    w = World().play("submit load; submit train needs=load")
    why = why_of(w, "train")
    assert (why.state, why.children, why.count) == ("expecting", ("load",), 1)
    assert str(why) == (
        f"train (task {why.task}) waits for its arguments: the result of load."
    )
    w.finish("load")
    assert "an actor's call" in str(why_of(w, "train"))
    status = status_of(w)
    (task,) = status.tasks
    assert (status.waiting_count, task.state, task.worker) == (1, "expecting", None)
    assert task.reason == "waits for results that are its arguments"


# Waits that can never end fail with the reason; no other wait does.


def wait(w: World, parent: str, child: str, **options) -> None:
    """Submit a child, and let its parent wait for it."""
    w.submit(child, parent=parent, **options)
    w.wait_for(parent, child)


def test_deadlock_of_a_child_with_its_parent_fails():
    w = World(gpus=1).play("submit train gpus=1")
    wait(w, "train", "evaluate", num_gpus=0.5)
    assert w.told == {"evaluate": "deadlocked"}
    assert w.tasks["evaluate"].reason == (
        "evaluate asks for {CPU: 1, GPU: 0.5}, which waiting tasks hold: "
        "train holds {CPU: 1, GPU: 1} and waits for evaluate"
    )
    w.play("blocked =; finish train; free has GPU:1.0")


def test_deadlock_of_a_grandchild_with_its_ancestors_fails():
    w = World(gpus=1).play("submit a gpus=0.5")
    wait(w, "a", "b", num_gpus=0.25)
    wait(w, "b", "c", num_gpus=0.5)
    assert w.told == {"c": "deadlocked"}
    assert w.tasks["c"].reason == (
        "c asks for {CPU: 1, GPU: 0.5}, which waiting tasks hold: "
        "a holds {CPU: 1, GPU: 0.5} and waits for b; "
        "b holds {CPU: 1, GPU: 0.25} and waits for c"
    )
    w.play("blocked = a; finish b a")


def test_deadlock_fails_as_few_tasks_as_possible():
    World(gpus=2).play("""
        submit parent gpus=2; submit x y z gpus=1 parent=parent
        submit cpu parent=parent; wait_for parent x y z cpu
        told = x:deadlocked y:deadlocked z:deadlocked; blocked = parent
        finish cpu; blocked =
    """)


def test_no_deadlock_while_a_running_task_will_free_resources():
    w = World(gpus=2).play("submit a b gpus=1")
    wait(w, "a", "below a", num_gpus=1)
    wait(w, "b", "below b")
    assert (w.told, w.blocked) == ({}, {"a", "b"})
    w.finish("below b")
    w.finish("b")
    assert w.running == {"a", "below a"}


def test_no_deadlock_while_an_older_task_can_free_resources():
    w = World(gpus=2).play("submit a b gpus=1")
    wait(w, "a", "below-a")
    wait(w, "b", "below-b", num_gpus=1)
    w.play("told =; finish below-a a; running = b below-b")


def test_no_deadlock_while_two_older_tasks_together_can_free_resources():
    w = World(gpus=3).play("submit a b c gpus=1")
    wait(w, "a", "below-a")
    wait(w, "b", "below-b")
    wait(w, "c", "below-c", num_gpus=2)
    w.play("told =; finish below-a a below-b b; running = c below-c")


def test_only_the_youngest_of_two_fails_if_the_other_can_then_run():
    w = World(gpus=2).play("submit a b gpus=1")
    wait(w, "a", "below-a", num_gpus=1)
    assert w.told == {}
    wait(w, "b", "below-b", num_gpus=1)
    w.play("told = below-b:deadlocked; finish b; running = a below-a")


def test_no_deadlock_if_the_awaited_tasks_can_run():
    """The banker's algorithm finds an order in which all tasks can end."""
    w = World(cpus=1, gpus=3).play("submit a b c cpus=0 gpus=1; submit busy")
    wait(w, "a", "below a", num_gpus=2)
    wait(w, "b", "below b", num_gpus=1)
    assert w.told == {}
    wait(w, "c", "below c")
    w.play("told =; finish busy")
    for name in ("below c", "c", "below b", "b", "below a", "a"):
        w.finish(name)
    assert set(w.told.values()) == {"settled"}


def test_waits_for_more_children_add_up():
    w = World(cpus=1, config=PATIENCE).play("submit parent")
    w.play("submit a b parent=parent; submit other; wait_for parent a")
    w.tell(Scheduler.wait_for, w.tasks["parent"].id, (w.tasks["b"].id,), is_more=True)
    w.play("finish a; running = parent b; blocked = parent")
    w.tell(Scheduler.wait_for, w.tasks["parent"].id, (), is_more=True)
    w.play("blocked = parent; finish b; blocked =; running = parent")
    w.tell(Scheduler.wait_for, w.tasks["parent"].id, (), elsewhere=True, is_more=True)
    w.play("blocked = parent; running = parent other")
    w.tell(Scheduler.wait_for, w.tasks["parent"].id, (), is_more=True)
    w.play("blocked =")


@pytest.mark.parametrize("end", ["cancel", "finish", "die", "close"])
@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "shared"])
def test_many_children_end_in_batches(end, is_shared):
    """The event loop can do other things in between; none of them starts."""
    w = World(cpus=1, config=PATIENCE)
    if is_shared:
        w.play("join 1; join 2")
    w.submit("parent", client=int(is_shared), max_retries=0)
    names = [f"child-{number}" for number in range(3 * STOPPED_AT_ONCE)]
    for name in names:
        w.submit(name, parent="parent")
    if end == "close":
        w.close()
    else:
        w.play(f"{end} parent")
    assert is_ended(w, names) in range(1 + STOPPED_AT_ONCE)
    w.cancel("child-300")  # in between
    if end == "cancel":
        w.finish("parent")
    if end != "close":
        w.submit("other", client=2 * is_shared)
        w.submit("small", num_cpus=0, client=int(is_shared))
        assert "small" in w.running
        assert w.running <= {"other", "small"}
        assert ("other" in w.running) is is_shared
    for number in range(1, 4):
        before = is_ended(w, names)
        w.advance(STOP_EVERY)
        w.check()
        assert is_ended(w, names) - before <= STOPPED_AT_ONCE, number
        assert not w.running & set(names)
    assert is_ended(w, names) == len(names)
    told = {name: w.told.get(name) for name in names}
    assert set(told.values()) <= {"disowned", "abandoned", None}
    assert [name for name in names if told[name] is None] == ["child-300"]
    if end != "close":
        assert {"other", "small"} == w.running


def is_ended(w: World, names: list[str]) -> int:
    """Count the tasks that have ended."""
    return sum(w.tasks[name].id not in w.scheduler.tasks for name in names)


def test_running_children_of_many_stop_at_once():
    w = World(cpus=3, config=PATIENCE, exits=False).play("submit parent")
    names = [f"child-{number}" for number in range(2 * STOPPED_AT_ONCE)]
    for name in names:
        w.submit(name, parent="parent", num_cpus=1)
    running = w.running - {"parent"}
    w.play("submit holder; cancel parent")
    assert len(running) == 2
    assert {name for name in running if w.told[name] == "disowned"} == running
    w.tell(Scheduler.detach, w.tasks["child-200"].id)  # too late
    w.submit("late", parent="parent")
    w.advance(1.0)
    assert w.told["child-200"] == w.told["late"] == "disowned"
    assert not w.waiting - {"holder"}


def test_reservation_ends_with_its_disowned_task():
    w = World(cpus=2, config=PATIENCE).play("submit hog parent")
    for number in range(2 * STOPPED_AT_ONCE):
        w.submit(f"child-{number}", parent="parent", num_cpus=2)
    w.play("finish hog")
    w.advance(PATIENCE.reserve_after + 1)
    w.play("kept = child-0; cancel parent")
    assert w.kept is None
    w.advance(1.0)
    assert w.waiting == set()


def test_disowned_task_does_not_run_alone():
    """It waits for its turn since host memory ran out, while its parent ends."""
    w = World(cpus=4, config=PATIENCE).play("submit parent")
    for number in range(2 * STOPPED_AT_ONCE):
        w.submit(f"child-{number}", parent="parent")
    w.play("starve child-0; cancel parent")
    for name in w.running:
        w.finish(name)
    assert w.running == set()
    w.advance(1.0)
    assert w.told["child-0"] == "disowned"
    assert w.left == 0


def test_disowned_tasks_are_not_sent_ahead():
    w = World(cpus=4, config=PATIENCE, took=1e-4).play("submit first second")
    for number in range(9):
        w.submit(f"kept-{number}", parent="first")
    names = [f"child-{number}" for number in range(2 * STOPPED_AT_ONCE)]
    for name in names:
        w.submit(name, parent="second")
    w.cancel("second")
    for number in range(9):
        w.finish(f"kept-{number}")
        assert not (w.running | w.queued) & set(names)
    w.advance(1.0)
    assert w.waiting == set()
