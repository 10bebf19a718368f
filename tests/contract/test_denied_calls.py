"""Systems that deny what a node needs: the error names it, and what to do."""

from __future__ import annotations

import errno
import os
import platform
import sys
import tempfile
import textwrap

import pytest

from tests.cli.sandbox import open_sandbox
from tests.support.program import environment, run, run_command
from tests.support.seccomp import NUMBERS

pytestmark = pytest.mark.skipif(
    platform.machine() not in NUMBERS, reason="numbers of system calls are not known"
)

PROGRAM = """
    import os, sys
    import aiogpu
    from tests.support.seccomp import deny

    async def main():
        try:
            async with aiogpu.init(num_cpus=1, num_gpus=0):
                print("open")
        except aiogpu.errors.NodeStartError as error:
            print(error)

    loop = {"asyncio": __import__("asyncio").run, "uvloop": aiogpu.run}[sys.argv[3]]
    deny(sys.argv[1], int(sys.argv[2]))
    loop(main())
    before = os.listdir("/proc/self/fd")
    loop(main())
    print(os.listdir("/proc/self/fd") == before)
"""
WORDS = {
    "pidfd_open": "a zygote cannot be watched",
    "memfd_create": "the node gets no shared memory",
}


@pytest.mark.whole
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize("call", WORDS)
def test_a_denied_call_is_named(call: str, error: int, loop: str) -> None:
    _, line, same = run(PROGRAM, call, str(error), loop).splitlines()
    assert line.startswith(f"{WORDS[call]}: a seccomp filter of this container")
    assert f"denies {call} ({os.strerror(error)})" in line
    assert "--security-opt seccomp=FILE" in line
    assert same == "True", "no descriptor is closed twice, and none is left"


@pytest.mark.parametrize("call", WORDS)
def test_aiogpu_start_names_a_denied_call(call: str) -> None:
    program = (
        "import sys; from tests.support.seccomp import deny; "
        "from aiogpu.cli.main import main; deny(sys.argv.pop(1)); sys.exit(main())"
    )
    with open_sandbox() as sandbox:
        ran = run_command(
            *(sys.executable, "-c", program, call),
            *("start", "--head", "--num-cpus=1", "--num-gpus=0"),
            env=sandbox.variables,
        )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert f"denies {call}" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
@pytest.mark.parametrize("inodes", [2, 3])
def test_a_place_without_inodes_is_named(inodes: int) -> None:
    program = """
        import aiogpu

        async def main():
            try:
                await aiogpu.init(num_cpus=1, num_gpus=0)
            except aiogpu.errors.NodeStartError as error:
                print(error)

        aiogpu.run(main())
        """
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        ran = run_command(
            *("unshare", "--mount", "sh", "-c"),
            f"mount -t tmpfs -o nr_inodes={inodes},mode=700 tmpfs {place} || exit 77; "
            f"{sys.executable} -c '{textwrap.dedent(program)}'; ls {place}",
            env=environment(TMPDIR=place, XDG_RUNTIME_DIR=""),
        )
    if ran.returncode == 77 or "unshare failed" in ran.stderr:
        pytest.skip("this system has no mount namespaces")
    assert ran.stdout.startswith(f"a node's socket cannot be made: {place}/aiogpu-")
    assert "No space left on device; free space or inodes" in ran.stdout
    assert len(ran.stdout.splitlines()) == 1, "nothing is left behind"
