"""The NVML stub: compile it once, write its state, and run code on it.

`nvidia-ml-py` finds the library by its soname, so processes need `LD_LIBRARY_PATH` to
use the stub: `StubNvml.run` sets it, and so does `StubNvml.environ`. pytest's own
process uses the real library.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("stub_nvml.c")
LIBRARY = "libnvidia-ml.so.1"
ROOT = Path(__file__).parents[3]
STATE = "AIOGPU_STUB_NVML_STATE"
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class StubMig:
    """A MIG instance of a GPU, with its processes on the compute list."""

    uuid: str
    name: str = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    place: tuple[int, int] = (1, 0)
    total: int = 5 * GIB
    used: int = 0
    processes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StubGpu:
    """A GPU of the stub; processes are pairs of pid and bytes, by list.

    Attributes:
        total: bytes of its memory; 0 if that is the machine's.
        lingering: triples of pid, bytes and seconds: on the compute list and in memory
            while the process lives and for so many seconds after its end.
        capability: the compute capability.
        utilisation: percent; None if not supported.
        temperature: degrees Celsius; None if not supported.
        power: milliwatts; None if not supported.
        action: NVML's number of the recovery action; None if not supported.
        mig: the instances in MIG mode; None without MIG mode.
    """

    uuid: str
    name: str = "NVIDIA A100-SXM4-40GB"
    pci: str = "00000000:3B:00.0"
    total: int = 40 * GIB
    used: int = 0
    processes: tuple[tuple[int, int], ...] = ()
    mps: tuple[tuple[int, int], ...] = ()
    graphics: tuple[tuple[int, int], ...] = ()
    lingering: tuple[tuple[int, int, float], ...] = ()
    capability: tuple[int, int] = (8, 0)
    utilisation: int | None = 0
    temperature: int | None = None
    power: int | None = None
    action: int | None = 0
    mig: tuple[StubMig, ...] | None = None

    def lines(self, index: int) -> list[str]:
        """Return the state lines of the GPU's facts and processes."""
        major, minor = self.capability
        action = -1 if self.action is None else self.action
        lines = [f"capability {index} {major} {minor}", f"action {index} {action}"]
        lines += [
            f"{word} {index} {value}"
            for word in ("utilisation", "temperature", "power")
            if (value := getattr(self, word)) is not None
        ]
        if self.mig is not None:
            lines.append(f"mig_mode {index}")
        lines += [f"process {index} {pid} {size}" for pid, size in self.processes]
        lines += [f"mps {index} {pid} {size}" for pid, size in self.mps]
        lines += [f"graphics {index} {pid} {size}" for pid, size in self.graphics]
        lines += [
            f"lingering {index} {pid} {size} {int(seconds * 1000)}"
            for pid, size, seconds in self.lingering
        ]
        return lines


def gpus(count: int, name: str = "NVIDIA A100-SXM4-40GB") -> list[StubGpu]:
    """Make `count` GPUs with UUIDs GPU-00.., GPU-11.. and buses in order."""
    return [
        StubGpu(_uuid(f"{index:x}"), name, f"00000000:{index + 1:02X}:00.0")
        for index in range(count)
    ]


def migs(count: int, digit: str = "a") -> tuple[StubMig, ...]:
    """Make `count` instances; the UUID of the first is MIG-a0a0..."""
    return tuple(
        StubMig(_uuid(f"{digit}{index:x}", "MIG-"), place=(index + 1, 0))
        for index in range(count)
    )


def _uuid(digit: str, kind: str = "GPU-") -> str:
    return kind + "-".join((digit * length)[:length] for length in (8, 4, 4, 4, 12))


def compile_stub(
    folder: Path, without: Sequence[str] = (), soname: str = LIBRARY
) -> Path:
    """Compile the stub into `folder` without the symbols in `without`.

    Without a C compiler, skip the test.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        import pytest  # imported here because workers import this module

        pytest.skip("the NVML stub needs a C compiler: none of cc, gcc, clang found")
    library = folder / LIBRARY
    absent = [f"-D{name}=absent_{name}" for name in without]
    command = [compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", *absent]
    command += ["-shared", "-fPIC", f"-Wl,-soname,{soname}"]
    subprocess.run([*command, "-o", library, SOURCE], check=True)
    return library


class StubNvml:
    """A compiled stub with a state file, and a way to run code on it."""

    def __init__(self, library: Path, state: Path) -> None:
        self.library = library
        self.state = state
        self.write()

    def __repr__(self) -> str:
        return f"<StubNvml {self.library} {self.state}>"

    def write(
        self,
        devices: Sequence[StubGpu] = (),
        *,
        init_error: int = 0,
        fail: Mapping[str, int] | None = None,
        lost: Sequence[int] = (),
        gone: Sequence[int] = (),
        forbidden: Sequence[int] = (),
        driver: str = "570.00",
        links: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Change the answers of NVML, also for programs that run already.

        Args:
            devices: the GPUs, in NVML's order.
            init_error: the code that nvmlInit returns.
            fail: the codes that other functions return, by versioned name.
            lost: indices of GPUs that have fallen off the bus.
            gone: indices of GPUs that are lost until NVML is started again.
            forbidden: indices of GPUs that this user may not touch.
            driver: the version of the driver.
            links: pairs of indices of GPUs that NVLink joins.
        """
        lines = [f"driver {driver}", f"init_error {init_error}"]
        lines += [
            f"device {gpu.uuid} {gpu.pci} {gpu.total} {gpu.used} {gpu.name}"
            for gpu in devices
        ]
        lines += [f"fail {name} {code}" for name, code in (fail or {}).items()]
        for index, gpu in enumerate(devices):
            lines += gpu.lines(index)
        instances = [
            (index, mig) for index, gpu in enumerate(devices) for mig in gpu.mig or ()
        ]
        for number, (index, mig) in enumerate(instances):
            gpu_id, compute_id = mig.place
            where, memory = f"{gpu_id} {compute_id}", f"{mig.total} {mig.used}"
            lines.append(f"mig {index} {mig.uuid} {where} {memory} {mig.name}")
            lines += [
                f"mig_process {number} {pid} {size}" for pid, size in mig.processes
            ]
        lines += [f"link {one} {other}" for one, other in links]
        lines += [f"lost {index}" for index in lost]
        lines += [f"gone {index}" for index in gone]
        lines += [f"forbidden {index}" for index in forbidden]
        self._replace(lines)

    def xid(
        self, index: int, *numbers: int, place: tuple[int, int] | None = None
    ) -> None:
        """Add events, which NVML reports once to each program that registered.

        Args:
            index: the index of the GPU; -1 if NVML cannot tell the GPU.
            numbers: the XIDs.
            place: ids of the GPU instance and the compute instance; None for the
                whole GPU.
        """
        lines = self.state.read_text(errors="surrogateescape").splitlines()
        gpu, compute = place or (-1, -1)
        for number in numbers:
            at = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            lines.append(f"xid {at} {index} {number} {gpu} {compute}")
        self._replace(lines)

    def _replace(self, lines: Sequence[str]) -> None:
        # Replace the file in one step, because a program may read it at this moment.
        fresh = self.state.with_suffix(".new")
        text = "\n".join(lines) + "\n"
        # A lone surrogate such as \udcff stands for a byte that is not UTF-8.
        fresh.write_bytes(text.encode(errors="surrogateescape"))
        fresh.replace(self.state)

    @classmethod
    def here(cls) -> StubNvml:
        """Return the stub that this process uses, with its current state."""
        nvml = cls.__new__(cls)
        nvml.library, nvml.state = Path(), Path(os.environ[STATE])
        return nvml

    @property
    def environ(self) -> dict[str, str]:
        """The environment of a process that uses this stub."""
        return stub_environ(self.library.parent, self.state)

    def run(self, snippet: str) -> Any:
        """Run `snippet` in a new interpreter and return its variable `result`."""
        return run_snippet(snippet, self.environ)


def stub_environ(folder: Path, state: Path) -> dict[str, str]:
    """Return this environment without CUDA variables and with the library's path."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_")}
    folders = (str(folder), environ.get("LD_LIBRARY_PATH"))
    environ["LD_LIBRARY_PATH"] = ":".join(filter(None, folders))
    environ["PYTHONPATH"] = str(ROOT)
    environ[STATE] = str(state)
    return environ


PRELUDE = """
import json, sys
from dataclasses import asdict
from aiogpu.accelerators.nvidia import Nvidia, inventory
from aiogpu.errors import DeviceError

def shown(devices):
    return [asdict(device) | {"links": sorted(device.links)} for device in devices]

def ids(environ, wanted=None):
    return [device.id for device in Nvidia().devices(environ, wanted)]

def error(environ, wanted=None):
    try:
        Nvidia().devices(environ, wanted)
    except DeviceError as error:
        return str(error)

"""


def program(snippet: str) -> list[str]:
    """Return the command that runs `snippet` after the common prelude."""
    return [sys.executable, "-c", PRELUDE + textwrap.dedent(snippet)]


def run_snippet(snippet: str, environ: Mapping[str, str]) -> Any:
    """Run `snippet` under `environ` and return its variable `result`, through JSON."""
    ending = "\njson.dump(result, sys.stdout)\n"
    command = program(textwrap.dedent(snippet) + ending)
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
