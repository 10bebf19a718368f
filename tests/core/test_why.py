"""`why()` as data and as text; and warnings of stalls."""

import pytest

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import TaskId
from aiogpu.core.queue.fair_share import Limits
from aiogpu.core.scheduler.contention.shortage import GROUPS_PER_CHECK
from aiogpu.core.scheduler.task_tree import STOPPED_AT_ONCE
from aiogpu.observe.snapshot import why
from aiogpu.observe.status import Holder, Program
from aiogpu.observe.why import Why
from tests.core.builders import World, record_of, submit, why_of


def zeroth(w: World) -> World:
    """Use up task number 0, which no real task has, and worker 1."""
    w.play("submit zeroth max_calls=1; finish zeroth; worker_count = 0")
    return w


def test_why_names_shortage_and_holders():
    w = zeroth(World(cpus=4, gpus=2)).play("""
        submit first second gpus=0.7; advance 30; submit third gpus=0.5; advance 0.5
    """)
    told = why_of(w, "third")
    assert (told.name, told.task, told.state) == ("third", 3, "waiting")
    assert (told.seconds, told.request) == (0.5, {"CPU": 1.0, "GPU": 0.5})
    assert (told.position, told.of) == (1, 1)
    assert (told.worker, told.pid, told.runs_for) == (None, 0, None)
    (short,) = told.reasons
    assert (short.resource, short.asked, short.free, short.total) == (
        "GPU",
        0.5,
        0.6,
        2,
    )
    assert [device.free for device in short.devices] == [0.3, 0.3]
    assert short.holders == (
        Holder(0.7, 2, 102, "first", 30.5),
        Holder(0.7, 3, 103, "second", 30.5),
    )
    assert str(told) == (
        "third (task 3) has waited 0.5 s for {CPU: 1, GPU: 0.5}\n"
        "  GPU 0.5: 0.6 of 2 free (0: 0.3, 1: 0.3)\n"
        "    0.7 of GPU 0: held by first (pid 102, for 30 s)\n"
        "    0.7 of GPU 1: held by second (pid 103, for 30 s)"
    )


@pytest.mark.parametrize("left", [0, 7_000])
def test_why_finds_the_exact_position_among_thousands(left):
    w = World(cpus=1).play("submit runs head")
    spec = w.scheduler.tasks.get(w.tasks["head"].id).spec
    last = 10_000
    for number in range(2, last + 1):
        w.scheduler.submit(0.0, TaskId(number), spec)
    for number in range(2, left + 2):
        w.scheduler.cancel(0.0, TaskId(number))
    for number in range(last - 20, last + 1):
        record = w.scheduler.tasks.get(TaskId(number))
        told = why(w.scheduler, record, {}, 0.0)
        assert (told.position, told.of) == (number - left, last - left)


def test_why_names_ending_and_starting_workers():
    w = zeroth(World(cpus=1))
    w.play("let exits=False; submit a max_calls=1; submit b; finish a")
    assert str(why_of(w, "b")).splitlines()[2] == (
        "    1: held by a process that is ending (pid 102)"
    )
    w.play("let starts=False; die 2; submit c")
    record = w.scheduler.tasks.get(w.tasks["c"].id)
    assert str(why(w.scheduler, record, {}, w.now)).splitlines()[2] == (
        "    1: held by b (its worker is being forked)"
    )


def reserved(**options: object) -> World:
    """A world with a reservation for `big`."""
    w = zeroth(World(cpus=4, gpus=2))
    w.submit("long", num_gpus=0.5, **options)
    w.play("""
        submit big gpus=2; pass_over; advance 1; pass_over; submit tick
        submit small gpus=0.25
    """)
    return w


def test_why_says_when_the_reserved_task_begins():
    told = why_of(reserved(timeout=10), "big")
    assert told.reservation is not None
    assert told.reservation.seconds == 11
    assert str(told).endswith("kept for it: devices GPU 0, 1; it begins within 11 s")


def test_why_names_the_task_that_goes_first():
    w = reserved()
    told = why_of(w, "small")
    assert told.reservation is not None
    assert (told.reservation.name, told.reservation.task) == ("big", 2)
    (short,) = told.reasons
    assert (short.free, short.kept) == (1.5, 1.5)
    assert str(told).splitlines()[1:] == [
        "  GPU 0.25: 1.5 of 2 free (0: 0.5, 1: 1), 1.5 of it kept",
        "    0.5 of GPU 0: held by long (pid 102, for 1.0 s)",
        "  kept for big (task 2), which goes first: devices GPU 0, 1",
    ]


def test_why_ignores_an_unrelated_reservation():
    w = zeroth(World(cpus=4, gpus=1, resources={"license": 1})).play("""
        submit holds cpus=0 resources=license:1; submit long big gpus=1
        submit licensed cpus=0 resources=license:1; pass_over; advance 1; pass_over
    """)
    assert why_of(w, "big").reservation is not None
    assert why_of(w, "licensed").reservation is None


def test_why_names_rival_programs_with_their_pids():
    w = zeroth(World(cpus=1)).play("""
        join 7 8; submit holds; submit theirs client=7; submit mine client=8
    """)
    programs = {7: Program("prog.py", 4711), 8: Program("prog.py", 4712)}
    told = why(w.scheduler, record_of(w, "mine"), {}, w.now, programs)
    assert told.rivals == ("prog.py (pid 4711)",)
    assert "  tasks of other programs go before it: prog.py (pid 4711)" in str(told)


def test_why_names_holders_without_end():
    w = zeroth(World(gpus=2)).play("""
        submit model gpus=0.5 is_endless=True; submit task gpus=0.5; submit big gpus=2
        advance 5; submit tick gpus=0.5
    """)
    told = why_of(w, "big")
    assert (told.is_held_endlessly, told.reservation) == (True, None)
    assert str(told).splitlines()[2:] == [
        "    0.5 of GPU 0: held by model (pid 102, without end)",
        "    0.5 of GPU 0: held by task (pid 103, for 5.0 s)",
        "    0.5 of GPU 1: held by tick (pid 104, for 0.0 s)",
        "  nothing is kept for it, however long it waits: what it needs is held "
        "without end",
    ]
    w.submit("fits", num_gpus=1)
    assert not why_of(w, "fits").is_held_endlessly


def test_why_describes_a_running_task():
    w = zeroth(World(cpus=1)).play("submit a; advance 3")
    told = why_of(w, "a")
    assert (told.state, told.worker, told.pid, told.runs_for) == ("running", 2, 102, 3)
    assert (told.position, told.of, told.reasons) == (None, 0, ())
    assert str(told) == "a (task 1) runs on worker 2 (pid 102), for 3.0 s now."


def test_why_describes_a_starting_task():
    w = World(starts=False).play("submit zeroth; submit a cpus=2")
    assert str(why_of(w, "a")) == (
        "a (task 1) holds {CPU: 2}; a worker is being forked for it."
    )


def test_why_describes_a_queued_task():
    w = World(cpus=1, took=1e-5).play("submit zeroth a b c d e f; finish zeroth")
    told = why_of(w, "c")
    assert (told.state, told.behind, told.count) == ("queued", ("a", "b"), 2)
    assert told.runs_for is None
    assert str(told) == (
        "c (task 3) was sent ahead to worker 1 (pid 101) and runs after a, b."
    )


def test_why_describes_a_blocked_task():
    w = zeroth(World(cpus=1)).play("""
        submit parent; submit child parent=parent; wait_for parent child
    """)
    assert str(why_of(w, "parent")) == (
        "parent (task 1) waits for its child child; meanwhile it holds no CPU."
    )
    submit(w, [f"c{n}" for n in range(10)], parent="parent")
    w.wait_for("parent", "child", *(f"c{number}" for number in range(10)))
    told = why_of(w, "parent")
    assert (len(told.children), told.count, told.state) == (8, 11, "blocked")
    assert "its children child, c0, c1, c2, c3, c4, c5, c6, and 3 more;" in str(told)


def test_why_describes_a_stopping_task():
    w = zeroth(World()).play("submit a; cancel a")
    assert str(why_of(w, "a")) == (
        "a (task 1) is being stopped; its code on worker 2 (pid 102) has not ended yet."
    )


def test_why_on_a_closing_node():
    w = World(cpus=1, exits=False).play("submit a")
    submit(w, [f"t{n}" for n in range(STOPPED_AT_ONCE + 1)])
    w.play("close; finish a")
    last = f"t{STOPPED_AT_ONCE}"
    told = why_of(w, last)
    assert (told.reasons, told.is_held_endlessly) == ((), False)
    number = STOPPED_AT_ONCE + 1
    waits = f"{last} (task {number}) has waited 0.0 s for its turn: 0 before it"
    assert str(told) == waits


def test_why_without_a_node():
    assert str(Why("a", 0, "opening")) == (
        "a waits for its node, which is being opened."
    )
    assert str(Why("a", 7, "ended")) == "a (task 7) has ended."
    ended = Why("a", 7, "ended", outcome="it was cancelled")
    assert str(ended) == "a (task 7) has ended: it was cancelled."


def test_why_shows_the_notes_of_a_cluster():
    sent = Why("f", 3, "sent", 2.0, {"GPU": 0.5}, notes=("nothing waits", "so it runs"))
    assert str(sent).splitlines() == [
        "f (task 3) asks for {GPU: 0.5} and was sent 2.0 s ago.",
        "  nothing waits",
        "  so it runs",
    ]
    assert str(Why("f", 3, "sent", 2.0)) == "f (task 3) was sent 2.0 s ago."
    waiting = Why("f", 3, "waiting", 2.0, {"GPU": 1.0}, 1, 1, notes=("node a: short",))
    assert str(waiting).splitlines() == [
        "f (task 3) has waited 2.0 s for its turn: 0 before it",
        "  node a: short",
    ]


# Warnings of tasks that wait for resources held without end.


AFTER = SchedulerConfig().warn_after


def held() -> World:
    """A world of one GPU, of which an actor holds half."""
    w = World(gpus=1).play("submit server gpus=0.5 is_endless=True")
    w.advance(2 * AFTER)
    return w


def test_stalled_task_is_warned_of():
    w = held().play("submit train gpus=1")
    w.play(f"advance {AFTER - 0.01}; warned =; advance 0.01")
    ((name, text),) = w.warnings
    assert name == "train"
    assert text.startswith(
        "train (task 1) has waited 5.0 s for {CPU: 1, GPU: 1}, and what it needs is "
        "held without end: server holds 0.5 of GPU 0. It can start when a holder ends"
    )
    w.advance(10 * AFTER)
    assert len(w.warnings) == 1
    assert w.deadline is None


def test_group_is_warned_once_until_it_is_empty():
    w = held()
    submit(w, [f"train {n}" for n in range(3)], num_gpus=1)
    w.play(f"submit other gpus=0.75; advance {3 * AFTER}")
    assert w.warned == ["train 0", "other"]
    w.cancel("train 0")
    w.play(f"submit short; finish short; advance {3 * AFTER}")
    w.submit("train 3", num_gpus=1)
    w.advance(3 * AFTER)
    assert len(w.warnings) == 2
    for number in range(1, 4):
        w.cancel(f"train {number}")
    w.play(f"submit again gpus=1; advance {3 * AFTER}")
    assert [name for name, _ in w.warnings[2:]] == ["again"]


def test_warning_names_amounts_and_leases():
    w = World(cpus=4, resources={"license": 1}).play(f"""
        submit server cpus=0 resources=license:1 is_endless=True; lease shell cpus=3
        advance {AFTER}; submit train cpus=2 resources=license:1; advance {AFTER}
    """)
    ((_, text),) = w.warnings
    assert "shell holds CPU 3" in text
    assert "server holds license 1" in text


def test_warning_names_workers_held_without_end():
    w = World(cpus=4).play(f"""
        bound 1; submit server cpus=0 is_endless=True; advance {AFTER}; submit train
        advance {AFTER}
    """)
    ((_, text),) = w.warnings
    assert text.startswith("train (task 1) has waited 5.0 s for a worker process")
    assert "there are 1, each is held without end" in text


def test_no_warning_for_a_programs_own_limit():
    w = held()
    w.join(7, limits=Limits(max_share={"GPU": 0.5}))
    w.submit("mine", num_gpus=0.5, is_endless=True, client=7)
    w.play(f"submit more gpus=0.25 client=7; advance {3 * AFTER}; warned =")


def test_one_alarm_serves_all_groups():
    w = held()
    before = len(w.scheduler.timers)
    for number in range(GROUPS_PER_CHECK + 20):
        w.submit(f"train {number}", num_gpus=1, num_cpus=number / 64)
    assert len(w.scheduler.timers) == before + 1
    w.advance(AFTER)
    assert len(w.warnings) == GROUPS_PER_CHECK
    w.advance(AFTER)
    assert len(w.warnings) == GROUPS_PER_CHECK + 20


def test_rounded_times_do_not_stop_the_clock():
    w = World(gpus=1).play(f"""
        advance {1 / 3}; submit long gpus=0.5; submit train gpus=1; advance 10000.0
        submit server gpus=0.5 is_endless=True priority=1; advance {AFTER + 1e-06}
    """)
    assert len(w.warnings) <= 1
    w.advance(2 * AFTER)
    assert len(w.warnings) == 1


def test_no_warning_for_resources_held_by_finite_tasks():
    World(cpus=4, gpus=1, resources={"license": 1}).play(f"""
        submit server gpus=1 is_endless=True
        submit long train cpus=0 resources=license:1; advance {10 * AFTER}; warned =
        submit other gpus=1; advance {2 * AFTER}; warned = other
    """)


def test_each_group_is_warned_after_its_own_wait():
    w = held().play("submit first gpus=1")
    w.play(f"""
        advance {AFTER / 2}; submit second gpus=0.75; advance {AFTER / 2}
        warned = first; advance {AFTER / 2}; warned = first second
    """)


def test_young_holder_delays_the_warning():
    w = World(cpus=4, gpus=2)
    w.submit("long", num_gpus=2)
    w.play("submit server gpus=1 is_endless=True; submit train gpus=2 priority=-1")
    w.play(f"advance {3 * AFTER}; submit late cpus=2 gpus=2 priority=-1")
    w.play(f"advance {AFTER / 2}; finish long")
    w.play(f"running has server; advance {AFTER - 0.01}; warned =; advance {AFTER}")
    assert {name for name, _ in w.warnings} == {"train", "late"}
