"""A sick device is drained, shown, and used again when it is well."""

from aiogpu.core.resources.devices import Cause
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.observe.snapshot import snapshot
from aiogpu.testing import World


def shown(w: World) -> list[str | None]:
    """Why each device is given to nobody."""
    return [one.aside for one in snapshot(w.scheduler, {}, w.now).devices]


def test_nobody_is_placed_on_a_sick_device_until_it_is_well():
    w = World(gpus=2)
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, "XID 79")
    w.submit("a", num_gpus=1)
    w.submit("b", num_gpus=0.5)
    assert w.gpus_of("a") == [1]
    assert w.waiting == {"b"}
    assert shown(w) == ["XID 79", None]
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, None)
    assert w.gpus_of("b") == [0]
    assert shown(w) == [None, None]


def test_who_has_a_share_of_it_keeps_that():
    w = World(gpus=1)
    w.submit("a", num_gpus=0.5)
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, "XID 48")
    w.submit("b", num_gpus=0.5)
    assert (w.running, w.waiting) == ({"a"}, {"b"})
    w.finish("a")
    assert w.told == {"a": "settled"}
    assert w.waiting == {"b"}
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, None)
    assert w.running == {"b"}


def test_a_worker_on_it_is_given_no_more_of_the_same():
    """[B26] Not the next of its line, and not what it was sent ahead."""
    w = World(cpus=1, gpus=1, took=1e-5)
    for name in "abcdefgh":
        w.submit(name, num_gpus=0.5)
    w.finish("a")
    assert w.queued
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, "GPU reset needed")
    assert w.queued == set()
    assert w.running == {"b"}
    w.finish("b")
    assert w.running == set()
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, None)
    w.run_dry()
    assert set(w.told) == set("abcdefgh")


def test_what_is_sent_ahead_elsewhere_stays_there():
    w = World(cpus=1, gpus=2, took=1e-5)
    for name in "abcdefgh":
        w.submit(name, num_gpus=0.5)
    w.finish("a")
    queued = w.queued
    assert queued
    w.tell(Scheduler.device_changed, "GPU", 1, Cause.SICK, "XID 79")
    assert w.queued == queued


def test_a_reason_told_again_takes_the_place_of_the_first():
    w = World(gpus=1)
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, "XID 48")
    w.tell(
        Scheduler.device_changed,
        "GPU",
        0,
        Cause.SICK,
        "XID 48, and its memory must be reset",
    )
    assert shown(w) == ["XID 48, and its memory must be reset"]
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, None)
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, None)
    assert shown(w) == [None]


def test_being_sick_and_being_set_aside_do_not_end_each_other():
    w = World(gpus=1)
    w.settles = True
    w.submit("a", num_gpus=0.5, max_calls=1)
    w.finish("a")
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, "XID 79")
    w.tell(Scheduler.devices_stuck, w.unsettled[0], "10GiB are still in use")
    assert shown(w) == ["10GiB are still in use; XID 79"]
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.UNSETTLED, None)
    assert shown(w) == ["XID 79"]
    w.submit("b", num_gpus=0.1)
    assert w.waiting == {"b"}
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.UNSETTLED, None)
    assert w.waiting == {"b"}
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, None)
    assert w.running == {"b"}


def test_nothing_is_kept_on_a_sick_device():
    w = World(gpus=2)
    w.submit("a", num_gpus=0.5)
    w.submit("b", num_gpus=0.5, strategy="spread")
    w.submit("c", num_gpus=1)
    w.advance(2)
    w.submit("d", num_gpus=0.25)
    assert w.scheduler.reservation.barred == {"GPU": 0b01}
    w.advance(1)
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, "XID 79")
    assert w.scheduler.reservation.barred == {"GPU": 0b10}


def test_what_was_opened_on_a_sick_device_is_not_used_again():
    """A reset ends it, and needs that nobody has the device open."""
    w = World(gpus=2, exits=False)
    w.submit("a", num_gpus=0.5)
    w.submit("b", num_gpus=0.5)
    w.submit("c", num_gpus=1)
    w.submit("d")
    idle, busy, other = (w.worker_of(name) for name in "abc")
    for name in "acd":
        w.finish(name)
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, "XID 79")
    assert w.retired == [idle]
    w.finish("b")
    w.submit("e", num_gpus=1)
    assert w.worker_of("e") == other
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, None)
    assert w.retired == [idle, busy]
    w.submit("f", num_gpus=0.5)
    assert w.worker_of("f") not in (idle, busy)


def test_a_task_whose_worker_is_being_forked_goes_elsewhere():
    w = World(gpus=2, starts=False)
    w.submit("a", num_gpus=0.5)
    w.submit("b", num_gpus=0.5)
    w.start("b")
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, "XID 79")
    assert (w.running, w.starting) == ({"b"}, {"a"})
    w.start("a")
    assert w.gpus_of("a") == [1]
    assert len(w.workers) == 2, "the same worker, which had no device yet"


def test_a_device_that_is_stuck_is_left_as_well_by_what_has_not_begun():
    w = World(gpus=2)
    w.settles = True
    w.submit("a", num_gpus=0.5, max_calls=1)
    w.finish("a")
    w.starts = False
    w.submit("b", num_gpus=0.5)
    w.tell(Scheduler.devices_stuck, w.unsettled[0], "10GiB are still in use")
    w.start("b")
    assert w.gpus_of("b") == [1]


def test_what_was_busy_on_a_sick_device_all_the_while_is_not_used_again():
    """What it has opened there is from before the device was well again."""
    w = World(gpus=1, exits=False)
    w.submit("a", num_gpus=0.5)
    w.submit("b", num_gpus=0.5)
    held = w.worker_of("a")
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, "XID 79")
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, None)
    assert w.retired == []
    w.submit("c", num_gpus=0.5)
    w.finish("a")
    assert w.retired == [held]
    assert w.waiting == {"c"}, "it has its share until it has ended"
