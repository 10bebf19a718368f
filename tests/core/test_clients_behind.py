"""A program that does not read its results: nothing more of it is started."""

from aiogpu.observe.snapshot import snapshot, why
from aiogpu.testing import World


def shared() -> World:
    w = World(cpus=2)
    w.join(1)
    w.join(2)
    return w


def test_nothing_more_of_it_is_started_until_it_has_caught_up():
    w = shared()
    for number in range(4):
        w.submit(f"a{number}", client=1)
    w.submit("b", client=2)
    assert len(w.running) == 2
    w.fall_behind(1)
    while w.running - {"b"}:
        w.finish(min(w.running - {"b"}))
    assert w.running <= {"b"}
    waiting = {name for name in w.waiting if name.startswith("a")}
    assert waiting
    w.submit("a4", client=1)
    assert "a4" in w.waiting
    w.fall_behind(1, is_behind=False)
    assert len(w.running) == 2
    w.run_dry()
    assert not w.waiting


def test_another_program_has_what_it_leaves():
    w = shared()
    w.fall_behind(1)
    w.submit("a", client=1)
    w.submit("b", client=2)
    assert w.running == {"b"}


def test_it_is_said_why():
    w = shared()
    w.fall_behind(1)
    w.submit("a", client=1)
    record = w.scheduler.tasks[w.tasks["a"].id]
    told = why(w.scheduler, record, {}, w.now)
    assert told.is_behind
    assert "for its program to read the results that it was sent" in str(told)
    [seen] = snapshot(w.scheduler, {}, w.now).waiting
    assert seen.reason == "waits for its program to read the results that it was sent"


def test_one_that_has_left_has_its_tasks_ended():
    w = shared()
    w.submit("a", client=1)
    w.fall_behind(1)
    w.submit("b", client=1)
    w.leave(1)
    w.run_dry()
    assert not w.waiting


def test_an_unknown_program_is_not_behind():
    w = World(cpus=1)
    w.fall_behind(7)
    w.join(1)
    w.fall_behind(7)
    w.submit("a", client=7)
    assert w.running == {"a"}
