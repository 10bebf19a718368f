"""The private interfaces of trackers of shared memory, in a process of its own."""

from __future__ import annotations

from tests.support.program import run

PROGRAM = """
    import os
    from multiprocessing import resource_tracker
    from multiprocessing.shared_memory import SharedMemory

    from aiogpu.worker.private_hooks import leave_resource_trackers, resource_trackers

    assert resource_trackers() == []
    SharedMemory(create=True, size=10).unlink()
    (tracker,) = resource_trackers()
    process = tracker._pid
    leave_resource_trackers()
    assert resource_trackers() == []
    ended, status = os.waitpid(process, 0)
    assert (ended, status) == (process, 0)
    resource_tracker.ensure_running()
    assert resource_trackers() == [tracker]
    assert tracker._pid not in (None, process)
    print("as before")
"""


def test_a_tracker_that_is_left_ends_and_the_next_use_starts_another() -> None:
    assert "as before" in run(PROGRAM)
