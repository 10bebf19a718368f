"""Waits that can never end fail with the reason; no other wait does. All of [B12]."""

from tests.core.builders import World, submit


def wait(w: World, parent: str, child: str, **options) -> None:
    """A task starts another and waits for it."""
    w.submit(child, parent=parent, **options)
    w.wait_for(parent, child)


def test_a_child_that_needs_what_its_parent_holds():
    w = World(gpus=1).play("submit train gpus=1")
    wait(w, "train", "evaluate", num_gpus=0.5)
    assert w.told == {"evaluate": "deadlocked"}
    assert w.tasks["evaluate"].reason == (
        "evaluate asks for {CPU: 1, GPU: 0.5}, and those that wait hold it: "
        "train holds {CPU: 1, GPU: 1} and waits for evaluate"
    )
    w.play("blocked =; finish train; free has GPU:1.0")


def test_a_grandchild_that_needs_what_its_ancestors_hold_together():
    w = World(gpus=1).play("submit a gpus=0.5")
    wait(w, "a", "b", num_gpus=0.25)
    wait(w, "b", "c", num_gpus=0.5)
    assert w.told == {"c": "deadlocked"}
    assert w.tasks["c"].reason == (
        "c asks for {CPU: 1, GPU: 0.5}, and those that wait hold it: "
        "a holds {CPU: 1, GPU: 0.5} and waits for b; "
        "b holds {CPU: 1, GPU: 0.25} and waits for c"
    )
    w.play("blocked = a; finish b a")


def test_two_trees_that_hold_each_others_gpu():
    w = World(gpus=2).play("submit a b gpus=1")
    wait(w, "a", "below a", num_gpus=1)
    assert w.told == {}
    wait(w, "b", "below b", num_gpus=1)
    assert w.told == {"below b": "deadlocked"}
    assert w.tasks["below b"].reason == (
        "below b asks for {CPU: 1, GPU: 1}, and those that wait hold it: "
        "b holds {CPU: 1, GPU: 1} and waits for below b; "
        "a holds {CPU: 1, GPU: 1} and waits as well"
    )
    w.play("blocked = a; finish b")
    assert w.running == {"a", "below a"}
    w.finish("below a")
    w.finish("a")


def test_all_have_to_fail_that_can_never_run_and_no_more():
    World(gpus=2).play("""
        submit parent gpus=2; submit x y z gpus=1 parent=parent
        submit cpu parent=parent; wait_for parent x y z cpu
        told = x:deadlocked y:deadlocked z:deadlocked; blocked = parent
        finish cpu; blocked =
    """)


def test_a_task_that_runs_or_goes_on_will_give_back_what_is_needed():
    w = World(gpus=2).play("submit a b gpus=1")
    wait(w, "a", "below a", num_gpus=1)
    wait(w, "b", "below b")
    assert (w.told, w.blocked) == ({}, {"a", "b"})
    w.finish("below b")
    w.finish("b")
    assert w.running == {"a", "below a"}


def test_one_that_waits_for_what_is_still_to_run_will_go_on():
    """The banker lets them end one after the other, in whatever order that takes."""
    w = World(cpus=1, gpus=3).play("submit a b c cpus=0 gpus=1; submit busy")
    wait(w, "a", "below a", num_gpus=2)
    wait(w, "b", "below b", num_gpus=1)
    assert w.told == {}
    wait(w, "c", "below c")
    w.play("told =; finish busy")
    for name in ("below c", "c", "below b", "b", "below a", "a"):
        w.finish(name)
    assert set(w.told.values()) == {"settled"}


def test_cpus_alone_are_no_reason_to_wait_for_ever_nor_is_one_that_starts():
    w = World(cpus=1, gpus=2).play("submit a gpus=1")
    wait(w, "a", "b")
    w.starts = False
    wait(w, "b", "c", num_gpus=1)
    w.play("told =; running = a b; starting = c")


def test_a_custom_resource_can_be_what_is_waited_for():
    w = World(resources={"license": 1}).play("submit a resources=license:0.5")
    wait(w, "a", "b", resources={"license": 1})
    assert w.told == {"b": "deadlocked"}
    assert "a holds {CPU: 1, license: 0.5} and waits for b" in w.tasks["b"].reason


def test_devices_of_another_type_are_of_no_use():
    w = World(gpu_types=["A100", "T4"])
    w.submit("a", num_gpus=1, accelerator_type="A100")
    w.submit("b", num_gpus=0.25, accelerator_type="A100", parent="a")
    w.submit("c", num_gpus=0.25, accelerator_type="T4", parent="a")
    w.play("wait_for a b c; told = b:deadlocked; running = a c")


def test_a_share_does_not_span_what_is_left_of_two_devices():
    w = World(gpus=2).play("""
        submit a gpus=0.6; submit b gpus=0.6 parent=a; wait_for a b
    """)
    wait(w, "b", "c", num_gpus=0.8)
    assert w.told == {"c": "deadlocked"}


def test_a_wait_that_failed_may_be_tried_with_less():
    w = World(gpus=1).play("submit a gpus=0.75")
    wait(w, "a", "too much", num_gpus=0.5)
    wait(w, "a", "enough", num_gpus=0.25)
    assert (w.told, w.running) == ({"too much": "deadlocked"}, {"a", "enough"})


def test_what_has_failed_takes_along_what_it_has_started():
    """A task that begins anew may have to wait where it has run before."""
    w = World(gpus=1).play("""
        submit a gpus=0.5; submit b gpus=0.5 parent=a; wait_for a b
        submit thief gpus=0.5 priority=1; die b; running = a thief; waiting = b; told =
    """)
    w.submit("thief's", num_gpus=0.75, parent="thief")
    w.wait_for("thief", "thief's")
    assert w.told == {"thief's": "deadlocked"}
    w.play("finish thief; running = a b")


def test_many_trees_are_distinguished():
    """All but the last hold what the last one's child needs; one wait has to fail."""
    w = World(cpus=4, gpus=60)
    submit(w, [f"t{n}" for n in range(60)], num_cpus=0, num_gpus=1)
    for number in range(60):
        assert w.told == {}
        wait(w, f"t{number}", f"below {number}", num_cpus=0, num_gpus=1)
    assert w.told == {"below 59": "deadlocked"}
    w.finish("t59")
    assert w.running >= {"below 0"}
    w.run_dry()
    assert list(w.told.values()).count("deadlocked") == 1


def test_a_wait_for_what_is_taken_back_into_a_deadlock() -> None:
    """Both wait before it is known that the child has not begun."""
    world = World(cpus=8, gpus=1, resources={"license": 1}, took=1e-5, revokes=False)
    submit(world, [f"short{n}" for n in range(30)], num_gpus=1)
    for number in range(30):
        world.finish(f"short{number}")
    world.submit("one", resources={"license": 1})
    world.submit("first", num_gpus=1)
    world.submit("two", num_gpus=1, priority=4)
    world.submit("child of one", num_gpus=1, parent="one")
    submit(world, [f"behind{n}" for n in range(20)], num_gpus=1, priority=-5)
    world.wait_for("one", "child of one")
    world.finish("first")
    child = world.scheduler.tasks[world.tasks["child of one"].id]
    assert child.state.value == "queued"
    world.submit("child of two", resources={"license": 1}, parent="two")
    world.wait_for("two", "child of two")
    world.revoked("two")
    told = [world.tasks[f"child of {name}"].news for name in ("one", "two")]
    assert told == [None, "deadlocked"]
    assert "one holds" in world.tasks["child of two"].reason
    world.finish("two")
    assert child.state.value == "running"
