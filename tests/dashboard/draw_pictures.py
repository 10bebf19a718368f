"""Draws the pictures of the dashboard, of a real node with four GPUs of NVML's stub.

`python -m tests.dashboard.draw_pictures` writes `docs/pictures/dashboard*.png`, and
`pictures.txt` beside this module: what is on each page, with digits masked. A test
compares a new drawing with that file, since pixels differ from machine to machine. Only
the hour before is made up.
"""

from __future__ import annotations

import asyncio
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from aiogpu.dashboard.collector import HOUR, Collector
from aiogpu.dashboard.server import listening
from aiogpu.observe.status import NodeStatus
from tests.cli.sandbox import Sandbox, open_sandbox
from tests.support.waits import until
from tests.unit.accelerators.stub_nvml import (
    GIB,
    STATE,
    StubGpu,
    StubNvml,
    compile_stub,
    gpus,
)

PICTURES: Final = Path(__file__).parents[2] / "docs" / "pictures"
TEXTS: Final = Path(__file__).with_name("pictures.txt")
CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS: Final = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
PAGES: Final = {
    "dashboard": ("Overview", "waits for GPU"),
    "dashboard-devices": ("Devices", "Whose share"),
    "dashboard-tasks": ("Tasks", "waits for GPU"),
}
"""The pictures: the page, and a text that is on it once it is complete."""
CARD: Final = "NVIDIA H100 80GB HBM3"
PER_SHARE: Final = 64 * GIB
"""Bytes of GPU memory that a process uses for a whole share."""

TRAIN_JOB: Final = """
import asyncio, sys, aiogpu

@aiogpu.remote(num_gpus=0.5, gpu_memory="40GiB")
class Model:
    def __init__(self, keys=1):
        if not keys:
            raise RuntimeError("checkpoint has no key 'head.weight'")

@aiogpu.remote(num_gpus=0.25)
class Ranker:
    pass

@aiogpu.remote(num_gpus=1)
async def train():
    await asyncio.Event().wait()

async def stage():
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)

async def main():
    async with aiogpu.init(address="auto"):
        model = await Model.options(name="serve").remote()
        ranker = await Ranker.options(name="ranker").remote()
        try:
            await Model.remote(keys=0)
        except aiogpu.ActorDiedError:
            pass
        await stage()
        folds = [train.options(name=f"train fold {n}").remote() for n in range(2)]
        folds.append(train.options(name="train fold 2", priority=1).remote())
        more = [train.options(name="trial", num_gpus=2).remote() for _ in range(120)]
        await stage()

asyncio.run(main())
"""
NOTEBOOK: Final = """
import asyncio, sys, aiogpu

@aiogpu.remote(num_gpus=0.25)
async def explore():
    aiogpu.report(begun=True)
    await asyncio.Event().wait()

async def main():
    async with aiogpu.init(address="auto"):
        running = explore.remote()
        await anext(running.reports())
        async with aiogpu.lease(num_gpus=0.25, name="notebook of ada"):
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


@contextmanager
def program(sandbox: Sandbox, name: str, text: str) -> Iterator[Any]:
    """A program that has come to its first stage; its process."""
    script = Path(sandbox.directory, name)
    script.write_text(text)
    with subprocess.Popen(
        [sys.executable, str(script)],
        env=sandbox.variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def reading(index: int, age: int) -> tuple[int, int]:
    """How busy and how warm a GPU was so many seconds ago."""
    base = 24 if index == 1 else 84
    wave = math.sin(age / 40 + index)
    return base + round(6 * wave), 40 + base // 3 + round(2 * math.sin(age / 300))


def cards(status: NodeStatus | None = None) -> list[StubGpu]:
    """The GPUs, with the processes that hold shares of them."""
    made = []
    for index, gpu in enumerate(gpus(4, CARD)):
        holders = status.devices[index].holders if status is not None else ()
        used = tuple((each.pid, int(each.share * PER_SHARE)) for each in holders)
        busy, warm = reading(index, 0)
        made.append(
            replace(
                gpu,
                total=80 * GIB,
                used=sum(size for _, size in used),
                processes=used,
                utilisation=busy,
                temperature=warm,
                power=(150 + 4 * busy) * 1000,
            )
        )
    return made


def make_up_an_hour(collector: Collector) -> None:
    """Fill the hour before the last sample; the notebook came every ten minutes."""
    last = collector.samples[-1]
    collector.samples.clear()
    for age in range(HOUR - 10, 0, -10):
        devices = {}
        for index, (name, now) in enumerate(last.devices.items()):
            busy, warm = reading(index, age)
            sample = now._replace(utilisation=busy, temperature=warm)
            if index == 0 and age // 600 % 2:
                sample = sample._replace(shares=now.shares[:-1], memory=0.6)
            devices[name] = sample
        collector.samples.append(last._replace(time=last.time - age, devices=devices))
    collector.samples.append(last)


def uses_memory(status: NodeStatus | None) -> bool:
    """The readings of all holders' memory have arrived."""
    return status is not None and all(
        holder.used for device in status.devices for holder in device.holders
    )


@asynccontextmanager
async def dashboard(folder: Path) -> AsyncIterator[str]:
    """The dashboard of a node that is in use; its URL."""
    nvml = StubNvml(compile_stub(folder), folder / "nvml.state")
    nvml.write(cards())
    with open_sandbox() as sandbox:
        stub = ("LD_LIBRARY_PATH", "PYTHONPATH", STATE)
        sandbox.variables |= {name: nvml.environ[name] for name in stub}
        sandbox.run("start", "--head", "--num-cpus=16")
        collector = Collector(lambda: sandbox.place.socket)
        with (
            program(sandbox, "train_job.py", TRAIN_JOB) as job,
            program(sandbox, "notebook.py", NOTEBOOK),
        ):
            assert job.stdin is not None
            job.stdin.write("\n")
            job.stdin.flush()
            collecting = asyncio.create_task(collector.run())
            try:
                await until(
                    lambda: collector.status and collector.status.waiting_count == 121
                )
                nvml.write(cards(collector.status))
                await until(lambda: uses_memory(collector.status))
                make_up_an_hour(collector)
                async with listening(collector, "127.0.0.1", 0) as url:
                    yield url
            finally:
                collecting.cancel()
                with suppress(asyncio.CancelledError):
                    await collecting


async def draw(folder: Path, *, is_read: bool = False) -> str:
    """Draw the pictures into a folder; return what is on them.

    Args:
        folder: also for the files of the stub.
        is_read: only read the pages, and draw nothing.
    """
    from playwright.async_api import async_playwright, expect

    texts = []
    async with dashboard(folder) as url, async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=[*FLAGS]
        )
        page = await browser.new_page(viewport={"width": 1600, "height": 1000})
        page.set_default_timeout(120_000)
        await page.goto(url)
        for name, (title, text) in PAGES.items():
            await page.get_by_role("link", name=title, exact=True).click()
            await expect(page.locator("[aria-current]")).to_have_text(title)
            await expect(page.get_by_text(text).first).to_be_visible(timeout=120_000)
            await page.wait_for_load_state("networkidle")
            if not is_read:
                await page.screenshot(path=folder / f"{name}.png")
            seen = await page.locator("body").aria_snapshot()
            lines = re.sub(r"\d[\d.,:]*", "0", seen).splitlines()
            # Sorted, since programs are in the order of their random numbers.
            texts.append("\n".join([title, *sorted(set(lines))]) + "\n")
        await browser.close()
    return "\n".join(texts)


def main() -> None:
    """Draw the pictures anew.

    The programs' colours hang on their random numbers: draw again if both have one.
    """
    from PIL import Image  # a dependency of Bokeh

    with tempfile.TemporaryDirectory() as folder:
        TEXTS.write_text(asyncio.run(draw(Path(folder))))
        for name in PAGES:
            drawn = Image.open(Path(folder, f"{name}.png"))
            drawn.quantize(128).save(PICTURES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
