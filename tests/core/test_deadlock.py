"""Waits that can never end fail with the reason; no other wait does. All of [B12]."""

from tests.core.builders import World


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
