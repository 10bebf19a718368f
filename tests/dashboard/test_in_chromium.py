"""The dashboard in a real Chromium, on nodes with tasks.

Needs Debian's package chromium, and playwright from the extra `browser`.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.sandbox import LIMIT, Sandbox

sync_api = pytest.importorskip("playwright.sync_api", reason="needs aiogpu[browser]")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs the command chromium"),
]
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic"),
    *("--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--host-resolver-rules=MAP evil.example 127.0.0.1"),
)
EVIL = "<img src=x onerror=alert(1)>"
ROWS = """new Promise(done => {
    const look = () => {
        const models = [...Bokeh.documents[0]._all_models.values()]
        const rows = models.flatMap(m => m.type == "FactorRange" ? m.factors : [])
        if (rows.length) done(rows)
    }
    setInterval(look, 100)
    setTimeout(() => done([]), 10000)
})"""
"""The rows of a timeline, once it is drawn."""
PROGRAM = """
import asyncio, sys, aiogpu

@aiogpu.remote(num_gpus=0.5)
class Model:
    def load(self):
        pass

@aiogpu.remote(num_gpus=2)
def train():
    pass

@aiogpu.remote(num_cpus=1)
def fail():
    print("says", sys.argv[2], file=sys.stderr)
    raise ValueError(sys.argv[2])

async def main():
    async with aiogpu.init(address=sys.argv[1], **eval(sys.argv[4])):
        model = Model.options(name="serve").remote()
        await model.load.remote()
        await asyncio.wait([fail.options(name=sys.argv[2]).remote()])
        waiting = [train.remote() for _ in range(int(sys.argv[3]))]
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser, which finds evil.example at 127.0.0.1."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS])
        yield browser
        browser.close()


@contextmanager
def loaded(
    sandbox: Sandbox, address: str = "local", waiting: int = 3, name: str = EVIL
) -> Iterator[int]:
    """A program with an actor, a failed task and waiting tasks; its process."""
    script = Path(sandbox.directory, "load.py")
    script.write_text(PROGRAM)
    options = "dict(num_cpus=2, num_gpus=2)" if address == "local" else "{}"
    with subprocess.Popen(
        [sys.executable, str(script), address, name, str(waiting), options],
        env=sandbox.variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()


@contextmanager
def dashboard(sandbox: Sandbox, *options: str) -> Iterator[str]:
    """The dashboard of a node; its URL."""
    command = sandbox.start("dashboard", "--no-browser", *options)
    try:
        assert command.stdout is not None
        yield command.stdout.readline().split()[1]
    finally:
        command.send_signal(signal.SIGINT)
        command.communicate(timeout=LIMIT)


@contextmanager
def tab(browser: Any, url: str, **options: Any) -> Iterator[tuple[Any, list[str]]]:
    """A tab, and what has gone wrong in it."""
    context = browser.new_context(**options)
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.on("console", lambda m: m.type == "error" and wrong.append(m.text))
    page.goto(url)
    yield page, wrong
    context.close()


@pytest.mark.parametrize("width", [400, 1600, 3840])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_page_fits_and_shows_names_as_text(
    chromium: Any, sandbox: Sandbox, width: int, scheme: str
) -> None:
    with (
        loaded(sandbox) as pid,
        dashboard(sandbox, "--pid", str(pid)) as url,
        tab(
            chromium,
            url,
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
        ) as (page, wrong),
    ):
        expect = sync_api.expect
        expect(page.get_by_text(re.compile("waits for .*GPU 2"))).to_be_visible()
        expect(page.get_by_text("Model 'serve'").first).to_be_visible()
        expect(page.get_by_text(EVIL).first).to_be_visible()
        for name, shows in (
            ("Devices", page.locator("canvas").first),
            ("Timeline", page.locator("canvas").first),
            ("Tasks", page.get_by_text(re.compile("waits for .*GPU 2")).first),
            ("Actors and programs", page.get_by_text("alive", exact=True)),
            ("Logs", page.get_by_text("this node keeps no log")),
            ("Overview", page.locator("canvas").first),
        ):
            page.get_by_role("link", name=name, exact=True).click()
            expect(page.locator("[aria-current]")).to_have_text(name)
            expect(shows).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            if name == "Timeline":
                assert "GPU 0" in page.evaluate(ROWS)
        is_dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (is_dark == "rgb(20, 23, 26)") is (scheme == "dark")
        failure = page.get_by_role("row").filter(has_text="ValueError")
        failure.get_by_role("link").click()
        expect(page.get_by_text("Traceback (most recent call last)")).to_be_visible()
        assert wrong == []


def test_the_figures_change_every_second_with_100_000_waiting_tasks(
    chromium: Any, sandbox: Sandbox
) -> None:
    with (
        loaded(sandbox, waiting=100_000) as pid,
        dashboard(sandbox, "--pid", str(pid)) as url,
        tab(chromium, url) as (page, wrong),
    ):
        sync_api.expect(page.get_by_text("100,000 tasks")).to_be_visible()
        row = page.get_by_role("row").filter(has_text="Model 'serve'")
        for _ in range(4):
            age = row.get_by_role("cell").last.inner_text()
            sync_api.expect(row.get_by_role("cell").last).not_to_have_text(
                age, timeout=5000
            )
        page.get_by_role("link", name="Tasks", exact=True).click()
        expect = sync_api.expect
        expect(page.get_by_text("Tasks 1 to 50 of 100,000.")).to_be_visible()
        page.get_by_role("link", name="Further").click()
        expect(page.get_by_text("Tasks 51 to 100 of 100,000.")).to_be_visible()
        page.get_by_label("Name, number or error").fill("TRAIN")
        page.get_by_label("Order").select_option("newest first")
        page.get_by_role("button", name="Show").click()
        expect(page.get_by_text("of 100,000. In this order")).to_be_visible()
        assert page.get_by_role("row").count() == 51
        assert wrong == []


def test_a_tab_goes_on_with_the_next_node(chromium: Any, sandbox: Sandbox) -> None:
    start = ("start", "--head", "--num-cpus=2", "--num-gpus=2")
    sandbox.run(*start)
    with dashboard(sandbox) as url, tab(chromium, url) as (page, _):
        sync_api.expect(page.get_by_text("No task waits.")).to_be_visible()
        sandbox.run("stop")
        sync_api.expect(page.get_by_role("alert")).to_be_visible()
        sandbox.run(*start)
        sync_api.expect(page.get_by_role("alert")).to_have_count(0, timeout=10_000)
        with loaded(sandbox, "auto"):
            sync_api.expect(page.get_by_text("Model 'serve'").first).to_be_visible()


def test_strangers_are_refused(chromium: Any, sandbox: Sandbox) -> None:
    with loaded(sandbox) as pid, dashboard(sandbox, "--pid", str(pid)) as url:
        with tab(chromium, re.sub("token=.*", "token=guessed", url)) as (page, _):
            assert "The token in this address is wrong" in page.content()
        with tab(chromium, url.partition("?")[0]) as (page, _):
            assert "Open the address that" in page.content()
        with tab(chromium, url.replace("127.0.0.1", "evil.example")) as (page, _):
            assert "not served under the name evil.example" in page.content()
        with tab(chromium, url) as (page, _):  # has the cookie, as a victim would
            page.wait_for_url("**/")
            # Another port is the same site, so the browser sends the cookie.
            stranger, other = page.context.new_page(), "http://127.0.0.1:4711/"
            stranger.route(
                other,
                lambda route: route.fulfill(body="a page", content_type="text/html"),
            )
            stranger.goto(other)
            answer = stranger.evaluate(
                """url => new Promise(done => {
                    const socket = new WebSocket(url, ["bokeh", "x"])
                    socket.onopen = () => done("open")
                    socket.onerror = () => done("refused")
                    setTimeout(() => done("silent"), 10000)
                })""",
                url.partition("?")[0].replace("http", "ws") + "ws",
            )
            assert answer == "refused"


def test_a_task_is_cancelled_and_an_actor_killed_after_a_question(
    chromium: Any, sandbox: Sandbox
) -> None:
    expect = sync_api.expect
    with (
        loaded(sandbox) as pid,
        dashboard(sandbox, "--pid", str(pid)) as url,
        tab(chromium, url) as (page, wrong),
    ):
        for name, verb in (
            ("train", "Cancel this task"),
            ("Model 'serve'", "Kill this actor"),
        ):
            page.get_by_role("link", name="Overview", exact=True).click()
            page.get_by_role("link", name=name).first.click()
            expect(page.get_by_role("button")).to_have_text([verb])
            page.get_by_role("button", name=verb).focus()
            page.keyboard.press("Enter")
            expect(page.get_by_role("button")).to_have_count(2)
            page.get_by_role("button", name="No, keep").click()
            expect(page.get_by_role("button")).to_have_text([verb])
            page.get_by_role("button", name=verb).click()
            page.get_by_role("button", name="Yes").click()
            stopped = re.compile(", (cancelled|failed)$")
            expect(page.get_by_role("heading", level=2)).to_have_text(stopped)
            expect(page.get_by_role("button")).to_have_count(0)
        assert wrong == []


def test_a_read_only_dashboard_has_no_buttons(chromium: Any, sandbox: Sandbox) -> None:
    with (
        loaded(sandbox) as pid,
        dashboard(sandbox, "--pid", str(pid), "--read-only") as url,
        tab(chromium, url) as (page, _),
    ):
        page.get_by_role("link", name="Model 'serve'").first.click()
        sync_api.expect(page.get_by_text("runs on worker").first).to_be_visible()
        sync_api.expect(page.get_by_role("button")).to_have_count(0)


def test_the_log_is_shown_as_text_and_filtered(chromium: Any, sandbox: Sandbox) -> None:
    expect = sync_api.expect
    sandbox.run("start", "--head", "--num-cpus=2", "--num-gpus=2")
    with (
        dashboard(sandbox, "--address", "auto") as url,
        loaded(sandbox, "auto"),
        tab(chromium, url) as (page, wrong),
    ):
        page.get_by_role("link", name="Logs", exact=True).click()
        expect(page.get_by_text(f"says {EVIL}")).to_be_visible()
        page.get_by_label("Text").fill("no such words")
        page.get_by_role("button", name="Show").click()
        expect(page.get_by_text("No line matches yet.")).to_be_visible()
        assert wrong == []
