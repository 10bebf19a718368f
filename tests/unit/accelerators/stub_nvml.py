"""The NVML stub as tests use it: compile it once, write what it tells, run code.

`nvidia-ml-py` finds the library by its soname alone, so the stub is met by
processes started with `LD_LIBRARY_PATH`: those that `StubNvml.run` starts, and any
other that is given `StubNvml.environ`. pytest's own process keeps the real world.
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
    """One MIG instance of a GPU, with its processes on the compute list."""

    uuid: str
    name: str = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    place: tuple[int, int] = (1, 0)
    total: int = 5 * GIB
    used: int = 0
    processes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StubGpu:
    """One GPU as the stub tells it; processes are pairs of pid and bytes, by list.

    Attributes:
        lingering: triples of pid, bytes and seconds: on the compute list and in memory
            while the process lives, and so long after its end.
        capability: the compute capability.
        utilisation: percent; None where it is not supported.
        temperature: degrees Celsius, likewise.
        power: milliwatts, likewise.
        action: what has to be done to recover, as a number of NVML's; None where it
            cannot tell.
        mig: its instances, in MIG mode; None without MIG mode.
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
        """What the state says of it beside its own line and its instances."""
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
    """Make that many, with UUIDs GPU-00.., GPU-11.. and buses in order."""
    return [
        StubGpu(_uuid(f"{index:x}"), name, f"00000000:{index + 1:02X}:00.0")
        for index in range(count)
    ]


def migs(count: int, digit: str = "a") -> tuple[StubMig, ...]:
    """Make that many instances, the UUID of the first being MIG-a0a0..."""
    return tuple(
        StubMig(_uuid(f"{digit}{index:x}", "MIG-"), place=(index + 1, 0))
        for index in range(count)
    )


def _uuid(digit: str, kind: str = "GPU-") -> str:
    return kind + "-".join((digit * length)[:length] for length in (8, 4, 4, 4, 12))


def compile_stub(
    folder: Path, without: Sequence[str] = (), soname: str = LIBRARY
) -> Path:
    """Compile the stub into `folder`, leaving out the symbols in `without`.

    Skips the test where the machine has no C compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        import pytest  # not in the workers that import this

        pytest.skip("the NVML stub needs a C compiler: none of cc, gcc, clang found")
    library = folder / LIBRARY
    absent = [f"-D{name}=absent_{name}" for name in without]
    command = [compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", *absent]
    command += ["-shared", "-fPIC", f"-Wl,-soname,{soname}"]
    subprocess.run([*command, "-o", library, SOURCE], check=True)
    return library


class StubNvml:
    """One test's world: a compiled stub, a state file, and a way to run code."""

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
        """Change what NVML tells from now on, also to programs that run already.

        Args:
            devices: the GPUs, in NVML's order.
            init_error: what nvmlInit returns.
            fail: what other functions return, by their name with its version.
            lost: indices of GPUs that have fallen off the bus.
            gone: likewise, and so until NVML is started anew after that.
            forbidden: indices of GPUs that this user may not touch.
            driver: the driver's version.
            links: indices of GPUs that NVLink joins, in pairs.
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
        """Have NVML tell of events from now on, each once to who has asked for it.

        Args:
            index: of the GPU; -1 for one that cannot be told.
            numbers: the XIDs.
            place: ids of the GPU instance and the compute instance that they are of;
                None for the whole GPU.
        """
        lines = self.state.read_text(errors="surrogateescape").splitlines()
        gpu, compute = place or (-1, -1)
        for number in numbers:
            at = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            lines.append(f"xid {at} {index} {number} {gpu} {compute}")
        self._replace(lines)

    def _replace(self, lines: Sequence[str]) -> None:
        # Replaced in one step: a program may be reading it at this moment.
        fresh = self.state.with_suffix(".new")
        text = "\n".join(lines) + "\n"
        # A lone surrogate such as \udcff stands for a byte that is no UTF-8.
        fresh.write_bytes(text.encode(errors="surrogateescape"))
        fresh.replace(self.state)

    @classmethod
    def here(cls) -> StubNvml:
        """The stub that this process meets, with its state as it is."""
        nvml = cls.__new__(cls)
        nvml.library, nvml.state = Path(), Path(os.environ[STATE])
        return nvml

    @property
    def environ(self) -> dict[str, str]:
        """The environment for a process that is to meet this stub."""
        return stub_environ(self.library.parent, self.state)

    def run(self, snippet: str) -> Any:
        """Run `snippet` in a fresh interpreter and return what it called `result`."""
        return run_snippet(snippet, self.environ)


def stub_environ(folder: Path, state: Path) -> dict[str, str]:
    """This process's environment, but no word of CUDA, and with that library."""
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
    """The command that runs `snippet` after the common prelude."""
    return [sys.executable, "-c", PRELUDE + textwrap.dedent(snippet)]


def run_snippet(snippet: str, environ: Mapping[str, str]) -> Any:
    """Run `snippet` under `environ` and return the JSON of what it called `result`."""
    ending = "\njson.dump(result, sys.stdout)\n"
    command = program(textwrap.dedent(snippet) + ending)
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
