"""Figures and names on the pages agree with the code."""

import inspect
import os
import re
from pathlib import Path

import pytest

import aiogpu
from aiogpu.accelerators import listed_devices
from aiogpu.accelerators.nvml import health
from aiogpu.accelerators.registry import KNOWN, vendor_of
from aiogpu.accelerators.visible import Inventory, resolve
from aiogpu.api import map as maps
from aiogpu.api.node import FOREIGN
from aiogpu.api.options import MAX_BUFFERED, TaskOptions
from aiogpu.cli import run
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.request import DEEPEST, HORIZON, STRATEGIES, Device
from aiogpu.core.records import TaskState
from aiogpu.daemon import journal, process
from aiogpu.daemon.place import MAX_SOCKET_PATH, Place
from aiogpu.daemon.start import CARRIED, NAME
from aiogpu.engines import devices
from aiogpu.observe.snapshot import LISTED
from aiogpu.runtime import output
from aiogpu.runtime.devices import binding, memory_guard, monitor, release
from aiogpu.runtime.objects.segments import PART
from aiogpu.runtime.objects.store import WARM
from aiogpu.serialization.references import SHARED_FROM
from aiogpu.wire.messages import LEASE_MARK, WARM_BYTES

DOCS = Path(__file__).parents[2] / "docs"
CONFIG = SchedulerConfig()

FACTS = {
    "cli.md": [
        f"{run.NOT_IN_TIME} --timeout has passed {run.FAILED} no node",
        f"{run.NOT_EXECUTABLE} COMMAND cannot be executed {run.NOT_FOUND} COMMAND is",
        ", ".join(each.name for each in run.SENT_ON[:-1])
        + f" and {run.SENT_ON[-1].name}",
    ],
    "gpus.md": [
        f"waits {devices.LIMIT:g} seconds for each",
        *(
            f"| `{vendor_of(each.kind).option if each.kind == 'GPU' else each.kind}` "
            f"| `{each.variable}` |"
            for each in KNOWN
        ),
        *(binding.JAX_FRACTION, binding.JAX_FRACTION_TOO, binding.JAX_PREALLOCATES),
        *(binding.CUPY_LIMIT, binding.TENSORFLOW_GROWS, binding.THREADS),
        *(binding.MEMORY, binding.PIPES, binding.DEFAULT),
        f"has not answered at all for {monitor.SILENT:g} seconds",
        f"It is back when for {monitor.CALM:g} seconds it has answered",
        f"by more than {memory_guard.OVERHEAD >> 30} GiB for each of them",
        f"({', '.join(map(str, sorted(health.APPLICATION)))})",
        f"is `{memory_guard.THIS_PROGRAM}`",
        f"or `{listed_devices.NONE[1]}`",
    ],
    "gangs.md": [
        *(f"| `{name}` |" for name in inspect.signature(aiogpu.placement).parameters),
        *(f'`"{strategy}"`' for strategy in STRATEGIES),
    ],
    "service.md": [
        f"the variable `{LEASE_MARK}`",
        {2: "(or two seconds)"}[run.KILLED_AFTER],
        {10: "in ten seconds is set aside"}[release.LIMIT],
        {1: "looked at every second"}[monitor.EACH],
        *(f'| `"{value}"`' for value in FOREIGN),
        *(f"`{option}`" for option in TaskOptions.taken_by("lease")),
        f"in {process.DRAIN:.0f} seconds unless `--drain`",
        f"{journal.SIZE >> 20} MiB, then `node.log.1` to `node.log.{journal.KEPT}`",
        f"Linux allows {MAX_SOCKET_PATH}",
        f"`logs/{process.CRASH_LOG}`",
        f"{output.SIZE >> 20} MiB, then `tasks.log.1` to `tasks.log."
        f"{output.LOGS_KEPT}`",
        f"`logs/{journal.FILE}`",
        f"/systemd/user/{NAME}",
        *(f"`{name}`" for name in ("CUDA_VISIBLE_DEVICES", *CARRIED[1:4])),
        f"| `{os.path.basename(Place.at().socket)}` |",
        f"| `{os.path.basename(Place.at().pidfile)}` |",
    ],
    "values.md": [
        f"From {SHARED_FROM // 1024} KiB of buffers on",
        f"{PART:.0%} of the memory that is there".replace("%", " %"),
        f"up to {WARM >> 30} GiB by your program",
        f"and {WARM_BYTES >> 20} MiB by each worker",
        f"`max_buffered={MAX_BUFFERED}`",
    ],
    "batch.md": [
        f"`limit` items further ({maps.DEFAULT_LIMIT} unless named)",
        f"aims at tasks of about {maps.TARGET * 1e3:g} ms",
    ],
    "waiting.md": [
        f"been first of its line for {CONFIG.reserve_after:g} s and still does not fit",
        f"as take about {HORIZON * 1e3:g} ms together, at most {DEEPEST}",
        f"is not done after {CONFIG.long_task * 1e3:g} ms",
        f"of those that wait the first {LISTED};",
        f"after {CONFIG.warn_after:g} s a warning",
    ],
}


def words_of(page: str) -> str:
    """The words of a page on one line."""
    return " ".join((DOCS / page).read_text().split())


@pytest.mark.parametrize("page", FACTS)
def test_a_page_states_the_facts_of_the_code(page: str) -> None:
    words = words_of(page)
    assert [fact for fact in FACTS[page] if not fact or fact not in words] == []


def test_the_docstring_of_map_states_its_limits() -> None:
    words = " ".join((aiogpu.types.RemoteFunction.map.__doc__ or "").split())
    facts = [
        f"None for {maps.DEFAULT_LIMIT}, or with `chunk` for {maps.CALLS} chunks",
        f"as many as take about {maps.TARGET * 1e3:g} ms",
        f"runs longer than {maps.LONGEST * 1e3:g} ms",
        f"waits at most {maps.FILL_TIME * 1e3:g} ms for items",
        f"at least {maps.SHARE} such tasks: `limit={10 * maps.SHARE}` bounds chunks",
    ]
    assert [fact for fact in facts if fact not in words] == []


def test_the_gpu_memory_error_documents_its_attributes() -> None:
    doc = inspect.getdoc(aiogpu.GpuOutOfMemoryError) or ""
    described = re.findall(r"^    (\w+): ", doc, re.MULTILINE)
    assert described == [*vars(aiogpu.GpuOutOfMemoryError(""))]


@pytest.mark.parametrize(
    ("page", "variable", "of"),
    [
        ("service.md", "gpu", aiogpu.types.Lease),
        ("gangs.md", "group", aiogpu.types.Placement),
    ],
)
def test_a_page_names_every_public_attribute(
    page: str, variable: str, of: type
) -> None:
    public = {name for name in vars(of) if not name.startswith("_")}
    public -= {"placement_group_of"}
    words = words_of(page)
    assert [n for n in public if not re.search(rf"{variable}\.{n}\b", words)] == []


def test_the_page_of_waiting_names_every_state() -> None:
    named = re.findall(r"^- `(\w+)`", (DOCS / "waiting.md").read_text(), re.MULTILINE)
    of_tasks = {state.value for state in TaskState}
    assert set(named) == of_tasks | {"opening", "sent"}


def test_forms_of_cuda_visible_devices_are_read_as_documented() -> None:
    there = Inventory(tuple(Device(i, uuid=f"GPU-{i}f") for i in range(3)), 3)
    read = {text: [d.id for d in resolve(text, there)] for text in ("2,0", "1,-1,0")}
    assert read == {"2,0": [2, 0], "1,-1,0": [1]}
    assert [device.id for device in resolve("GPU-1", there)] == ["GPU-1f"]
    assert all(f"`{text}`" in words_of("gpus.md") for text in read)
    assert (monitor.EACH, round(1 / monitor.SOONEST)) == (1.0, 10)
