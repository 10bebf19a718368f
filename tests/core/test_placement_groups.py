"""Placement groups in the queue, their members, and their ends."""

import pytest

from aiogpu.core.model.text import SHOWN
from aiogpu.core.scheduler.placement_groups import REMOVED, UNKNOWN
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.core.scheduler.state import MIN_ENDED_KEPT
from aiogpu.observe.snapshot import snapshot
from tests.core.builders import World, request_of, status_of, why_of

pytestmark = pytest.mark.usefixtures("few")


def test_members_wait_for_the_grant_and_run_in_bundles():
    w = World(cpus=8, gpus=2).play("""
        submit before gpus=1; placement_group gang GPU:1,CPU:1 GPU:1
        submit_in gang first 0 cpus=1 gpus=1; submit_in gang second 1 gpus=0.5
        submit_in gang third 1 gpus=0.6; running = before
    """)
    assert why_of(w, "first").state == "expecting"
    w.play("""
        finish before; running = first second; gpus_of first = 0; gpus_of second = 1
        waiting = third
    """)
    assert "GPU 0.6" in str(why_of(w, "third"))
    w.play("finish second; running = first third")


def test_member_behind_a_cancelled_member_is_placed():
    World(cpus=8, gpus=2).play("""
        submit before gpus=1; placement_group group GPU:1,CPU:1 GPU:1
        submit_in group cancelled 0 gpus=1; submit_in group member 1 gpus=1
        cancel cancelled; finish before; running = member
    """)


def test_group_is_granted_without_a_worker():
    w = World(cpus=8, gpus=2).play("placement_group gang GPU:1 GPU:0.5")
    assert set(w.placement_groups) == {"gang"}
    assert w.worker_count == 0
    w.placement_group("twin", {"GPU": 0.5}, key="gang")
    assert w.told == {"twin": "misfit"}, "it is not asked for twice"
    w.play("free_gpus = 0 0.5; submit alone gpus=1; waiting = alone")
    assert "held by gang" in str(why_of(w, "alone"))
    w.play("cancel gang; running = alone; forgotten has gang")
    assert not w.scheduler.placement_groups


def test_removed_group_ends_its_members():
    w = World(cpus=8, gpus=1).play("""
        placement_group gang GPU:1,CPU:2; submit_in gang runs gpus=1 cpus=1
        submit_in gang waits gpus=0.5; submit alone gpus=1; cancel gang
        told = runs:evicted waits:evicted
    """)
    assert w.tasks["runs"].reason == REMOVED
    assert (w.forgotten, w.free_gpus) == ({"waits"}, [0])
    w.play("finish runs; forgotten = gang runs waits; running = alone")


def test_member_is_cancelled_while_its_group_waits():
    w = World(gpus=1).play("""
        submit before gpus=1; placement_group gang GPU:1; submit_in gang member gpus=1
        cancel member; finish before
    """)
    w.play("placement_groups = gang; running =")


def test_member_of_a_missing_group_is_refused():
    w = World(gpus=1).play("submit_in gang stray gpus=1; told = stray:evicted")
    assert w.tasks["stray"].reason == UNKNOWN
    w.play("""
        forgotten = stray
        placement_group gang GPU:1; submit_in gang runs gpus=0.5; cancel gang
        submit_in gang late gpus=0.5; told has late:evicted
        finish runs; free_gpus = 1
    """)


@pytest.mark.parametrize("is_granted", [True, False])
def test_member_that_cannot_fit_fails(is_granted):
    w = World(gpus=1)
    if not is_granted:
        w.submit("before", num_gpus=1)
    w.placement_group("gang", {"GPU": 1})
    request = request_of({"GPU": 1}, "H200")
    w.submit_in("gang", "member", request=request)
    w.submit_in("gang", "twin", request=request)
    w.submit_in("gang", "other", num_gpus=1)
    if not is_granted:
        w.play("told =; finish before")
        del w.tasks["before"]
    assert w.told == {"member": "misfit", "twin": "misfit"}
    assert "could hold it" in w.tasks["member"].reason
    assert w.running == {"other"}


def test_member_waits_for_arguments_and_grant():
    w = World(cpus=8, gpus=1).play("""
        submit before gpus=1; submit made; placement_group gang GPU:1
        submit_in gang both gpus=0.5 needs=made
        submit_in gang early gpus=0.5 needs=made; supply early; waiting = early gang
    """)
    assert str(why_of(w, "early")).endswith("waits for gang, its placement.")
    assert str(why_of(w, "both")).endswith("waits for gang, its placement.")
    w.play("""
        finish before; running = early made
        supply both; running = both early made
        submit_in gang third gpus=0.5 needs=made; finish early; running = both made
        supply third; running = both made third
    """)


def test_child_fails_if_its_bundle_cannot_hold_it_and_its_parent():
    World(cpus=4, gpus=2).play("""
        placement_group gang GPU:1; submit_in gang parent gpus=0.6
        submit_in gang child gpus=0.6 parent=parent; wait_for parent child
        told = child:deadlocked
        submit_in gang small gpus=0.4 parent=parent; wait_for parent small
        running = parent small
        submit outside gpus=1 parent=small; wait_for small outside
        running = outside parent small
    """)


def test_group_fails_if_its_waiters_prevent_the_grant():
    World(cpus=4, gpus=1).play("""
        submit parent gpus=0.5; placement_group gang GPU:1
        submit_in gang child gpus=1 parent=parent; wait_for parent child
        told = gang:deadlocked child:evicted
        placement_group other GPU:0.5; submit_in other fits gpus=0.5 parent=parent
        wait_for parent fits; running has fits
    """)


def test_member_of_any_bundle_waits_for_a_bundle_that_will_be_free():
    """The other bundles are sick or held without end."""
    World(gpus=3).play("""
        placement_group gang GPU:1 GPU:1 GPU:1
        submit_in gang endless 0 gpus=1 is_endless=True; sicken 1
        submit_in gang s0 gpus=0.5; submit_in gang s1 gpus=0.5
        submit_in gang great gpus=1; advance 2.0; submit_in gang s2 gpus=0.5; finish s0
        waiting has s2; finish s1; gpus_of great = 2
        finish great; heal 1; submit_in gang at-last 1 gpus=1; gpus_of at-last = 1
    """)


def test_member_out_of_memory_gets_the_bundles_whole_gpu():
    w = World(cpus=4, gpus=2)
    w.placement_group("gang", {"GPU": 1})
    w.submit_in("gang", "m", num_gpus=0.5, retries_oom=True, max_calls=1)
    w.play("finish m ran_out=True; running has m")
    assert (
        w.scheduler.ledger.placement_groups["gang"][0].device_sets["GPU"].free[0] == 0
    )
    w.play("""
        finish m; cancel gang; placement_group half GPU:0.5
        submit_in half n gpus=0.5 retries_oom=True max_calls=1; finish n ran_out=True
        told has n:settled
    """)


def test_group_ends_with_its_node():
    w = World(cpus=4, gpus=2).play("""
        placement_group gang GPU:1; placement_group late GPU:2
        submit_in gang runs gpus=0.5; submit_in gang waits gpus=0.6
        submit_in late expects gpus=0.5; close; run_dry
    """)
    assert set(w.told.values()) == {"abandoned"}
    assert len(w.told) == 5
    assert w.is_closed


def test_ended_members_are_forgotten():
    w = World(cpus=1).play("placement_group gang CPU:1")
    for number in range(4 * MIN_ENDED_KEPT):
        w.submit_in("gang", f"t{number}", num_cpus=1)
        w.finish(f"t{number}")
    assert len(w.scheduler.placement_groups["gang"].members) <= 2 * MIN_ENDED_KEPT


def test_group_counts_for_its_program_but_members_do_not():
    w = World(cpus=8, gpus=4).play("""
        join 1 2; placement_group gang GPU:2 client=1; submit_in gang m gpus=1 client=1
    """)
    clients = w.scheduler.clients
    assert clients.of(1).held == {"GPU": 20_000}
    assert clients.why_barred(w.scheduler.tasks[w.tasks["m"].id]) == ""
    w.cancel("gang")
    assert clients.of(1).held == {"GPU": 20_000}
    w.finish("m")
    assert clients.of(1).held == {}


def test_why_explains_a_waiting_group():
    w = World(cpus=4, gpus=2)
    w.play("submit before other gpus=0.7; placement_group gang GPU:0.3 GPU:0.4")
    told = str(why_of(w, "gang"))
    assert "GPU 0.7: 0.6 of 2 free (0: 0.3, 1: 0.3)" in told
    assert "held by before" in told
    w.placement_group("cpus", {"CPU": 3}, {"GPU": 0.1})
    told = str(why_of(w, "cpus"))
    assert "CPU 3: 2 of 4 free" in told
    assert "GPU 0.1" not in told


def test_status_shows_free_and_used_amounts_of_a_group():
    w = World(cpus=4, gpus=1)
    w.play("placement_group gang GPU:0.5,CPU:2; submit_in gang m gpus=0.2 cpus=1")
    status = status_of(w)
    shares = {holder.task: holder.share for holder in status.devices[0].holders}
    assert shares == {"gang": 0.3, "m": 0.2}
    assert status.devices[0].free == 0.5
    w.submit_in("gang", "n", num_gpus=0.3, num_cpus=1)
    status = status_of(w)
    shares = {holder.task: holder.share for holder in status.devices[0].holders}
    assert shares == {"n": 0.3, "m": 0.2}


def test_reservation_in_a_bundle_does_not_affect_the_node():
    w = World(cpus=1, gpus=1, took=1e-5).play("""
        placement_group gang GPU:1; submit_in gang m0 gpus=1; submit_in gang m1 gpus=1
        submit p0 p1 p2; advance 2.0
    """)
    w.tell(Scheduler.wake)
    assert w.kept == "m1"
    assert w.scheduler.reservation.home is not w.scheduler.ledger
    w.play("finish p0; running = m0 p1")


def test_status_names_the_awaited_placement():
    w = World(cpus=2, gpus=1).play("""
        submit before gpus=1; submit made; placement_group gang GPU:1
        submit_in gang early gpus=1 needs=made; supply early
    """)
    status = status_of(w)
    told = {one.name: one.reason for one in status.waiting}
    assert told["early"] == "waits for gang, its placement"
    w.play("finish before; submit_in gang second gpus=0.5")
    status = status_of(w)
    told = {one.name: one.reason for one in status.waiting}
    assert told["second"].endswith("in any bundle of gang")


def test_placements_are_printed():
    w = World(cpus=SHOWN + 1, gpus=2)
    w.placement_group("first", {"GPU": 1, "CPU": 2}, {"GPU": 0.5})
    w.submit_in("first", "m", 0, num_gpus=0.25, num_cpus=1)
    w.placement_group("second", *[{"CPU": 1}] * (SHOWN + 1))
    pids = dict.fromkeys(w.placement_groups.values(), 4711)
    told = str(snapshot(w.scheduler, pids, w.now))
    assert "first  PACK  ready  pid 4711, 1 in it" in told
    assert "bundle 0: {CPU: 2, GPU: 1} on GPU 0, used: {CPU: 1, GPU: 0.25}" in told
    assert "bundle 1: {GPU: 0.5} on GPU 1" in told
    assert "second  PACK  waiting  0 in it" in told
    assert "waits for CPU 9 (free: 7)" in told
    assert "and 1 more" in told


def test_group_of_a_program_with_other_tasks_is_placed():
    w = World(cpus=4, gpus=2).play("""
        join 1 2; submit all gpus=2 client=2; placement_group g GPU:1 GPU:1 client=1
        submit mine gpus=0.5 client=1; submit theirs gpus=0.25 client=2; finish all
    """)
    assert "g" in w.placement_groups
    assert w.waiting == {"mine", "theirs"}
    w.scheduler.check()


def test_status_shows_free_memory_of_a_bundle():
    w = World(cpus=2, gpus=1, gpu_memory=10)
    w.placement_group("gang", {"GPU": 0.5, "gpu_memory": 6}, {"CPU": 1})
    told = status_of(w).placements[0].bundles
    assert told[0].free["gpu_memory"] == 6
    assert "gpu_memory" not in told[1].free
    w.submit_in("gang", "m", 0, request=request_of({"GPU": 0.25}, gpu_memory=2))
    told = status_of(w).placements[0].bundles
    assert told[0].free["gpu_memory"] == 4
