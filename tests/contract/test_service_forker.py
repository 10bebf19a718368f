"""What tests start for themselves ends with them, however they end."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

from tests.support.program import start

LIMIT = 20.0
KILLED = """
import os, signal, sys
from tests.contract import served
served.forker = served.Forker()
given = {"num_cpus": 1, "num_gpus": 0, "log_to_driver": False}
pid = served.forker.fork(sys.argv[1], given)
fork = os.fork()
if not fork:
    signal.pause()  # it has the forker's stdin as well, which so does not end
print(pid, fork, flush=True)
signal.pause()
"""


def test_services_do_not_outlive_tests_that_are_killed(runtime_directory: Path) -> None:
    place = runtime_directory / "s"
    killed = start(KILLED, str(place))
    assert killed.stdout is not None
    service, fork = map(int, killed.stdout.readline().split())
    ended = os.pidfd_open(service)
    killed.kill()
    try:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        assert poll.poll(LIMIT * 1000), "the service lives on"
    finally:
        os.close(ended)
        os.kill(fork, signal.SIGKILL)
        killed.communicate()
        place.unlink(missing_ok=True)
