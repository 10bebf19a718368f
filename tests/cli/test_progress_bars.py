"""Progress bars of tasks: updated in place, one line at the end."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cli.sandbox import open_sandbox
from tests.cli.tmux_screen import PROMPT, Screen
from tests.support.program import run, start

PROGRAM = """
import asyncio, os, sys
import aiogpu

@aiogpu.remote(max_retries=0)
def train(paths, how):
    for step, path in enumerate(paths, start=1):
        state = f"step {step}/{len(paths)}" + "#" * 200 * (how == "wide")
        if how == "behind":
            print(state, end="\\r", flush=True)
        else:
            sys.stderr.write("\\r" + state)
            sys.stderr.flush()
        with open(path):  # a fifo: waits for the test
            pass
        if how == "aside":
            print("a line of its own")
    if how in {"dies", "aside"}:
        os._exit(1)
    if how == "vanishes":
        sys.stderr.write("\\r" + " " * 30 + "\\r")
    elif how != "unfinished":
        print(file=sys.stdout if how == "behind" else sys.stderr)

@aiogpu.remote
def quick(steps):
    for step in range(steps):
        sys.stderr.write(f"\\rquick {step + 1}/{steps}")
    sys.stderr.write("\\n")

@aiogpu.remote
def talk(text, path):
    with open(path):  # waits for the test
        pass
    print(text)

async def main(how, *paths):
    paths, gates = (paths[1:], paths[:1]) if how == "beside" else (paths, ())
    async with aiogpu.init(**OPTIONS):
        if how == "quick":
            await quick.remote(200_000)
            return
        training = train.remote(paths, how)
        talking = [talk.remote("another task", gate) for gate in gates]
        await asyncio.gather(training, *talking, return_exceptions=True)
        print("all done")

if __name__ == "__main__":
    aiogpu.run(main(*sys.argv[1:]))
"""


ALONE = PROGRAM.replace("OPTIONS", "dict(num_cpus=2)")


def fifos(place: Path, count: int) -> list[Path]:
    """A task that opens a fifo to read waits until a test opens it to write."""
    paths = [place / f"{number}" for number in range(count)]
    for path in paths:
        os.mkfifo(path)
    return paths


def release(path: Path) -> None:
    with path.open("w"):
        pass


def begin(
    terminal: Screen, place: Path, how: str, paths: list[Path], *, source: str = ALONE
) -> None:
    """Run the program in the terminal."""
    (place / "program.py").write_text(source)
    arguments = " ".join(map(str, [place / "program.py", how, *paths]))
    terminal.send(f"clear; $python {arguments}", "Enter")


@pytest.mark.parametrize("how", ["before", "behind", "unfinished", "vanishes", "dies"])
def test_a_progress_bar_moves_in_place(
    how: str, terminal: Screen, tmp_path: Path
) -> None:
    paths = fifos(tmp_path, 2)
    begin(terminal, tmp_path, how, paths)
    for step, path in enumerate(paths, start=1):
        lines = terminal.has(f"step {step}/2")
        assert sum("step" in line for line in lines) == 1, lines
        release(path)
    lines = terminal.has("all done")
    printed = [line for line in lines if "pid=" in line]
    bars = [line for line in printed if "step" in line]
    if how == "vanishes":
        assert printed == []
    else:
        assert len(bars) == 1, lines
        assert re.fullmatch(r"\(train pid=\d+\) step 2/2", bars[0].rstrip())
    assert lines[-1].startswith(PROMPT) or terminal.has(PROMPT)


def wait_until_below(screen: Screen, line: str, state: str) -> list[str]:
    """Wait until the bar is right below a line; return the screen's lines."""

    def is_below(lines: list[str]) -> bool:
        pairs = pairwise(lines)
        return any(line in above and state in below for above, below in pairs)

    return screen.until(is_below)


@pytest.mark.parametrize("options", ["num_cpus=2", "address"])
def test_a_bar_moves_below_the_line_of_another_task(
    options: str, terminal: Screen, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        if options == "address":
            sandbox = stack.enter_context(open_sandbox())
            sandbox.run("start", "--head", "--num-cpus=2")
            options = f"address={sandbox.place.socket!r}"
        program = PROGRAM.replace("OPTIONS", f"dict({options})")
        gate, *paths = fifos(tmp_path, 3)
        begin(terminal, tmp_path, "beside", [gate, *paths], source=program)
        terminal.has("step 1/2")
        release(gate)
        # The bar does not move: its task waits.
        lines = wait_until_below(terminal, "another task", "step 1/2")
        assert sum("step" in line for line in lines) == 1, lines
        release(paths[0])
        lines = wait_until_below(terminal, "another task", "step 2/2")
        assert sum("step" in line for line in lines) == 1, lines
        release(paths[1])
        lines = [line.rstrip() for line in terminal.has("all done")]
        if "address" in options:  # the log of a node has one line
            logged, _ = sandbox.run("logs")
            assert logged.count("step") == 1
            assert "step 2/2" in logged
    printed = [line for line in lines if "pid=" in line]
    assert len(printed) == 2, lines
    assert re.fullmatch(r"\(talk pid=\d+\) another task", printed[0])
    assert re.fullmatch(r"\(train pid=\d+\) step 2/2", printed[1])
    assert "all done" in lines


def test_a_bar_on_stderr_survives_lines_on_stdout(
    terminal: Screen, tmp_path: Path
) -> None:
    """The bar is not lost when the process ends."""
    paths = fifos(tmp_path, 2)
    begin(terminal, tmp_path, "aside", paths)
    terminal.has("step 1/2")
    release(paths[0])
    wait_until_below(terminal, "a line of its own", "step 2/2")
    release(paths[1])
    lines = terminal.has("all done")
    printed = [line.rstrip() for line in lines if "pid=" in line]
    assert [line.partition(") ")[2] for line in printed] == [
        "a line of its own",
        "a line of its own",
        "step 2/2",
    ]


def test_a_bar_stays_while_stdout_is_redirected(
    terminal: Screen, tmp_path: Path
) -> None:
    gate, path = fifos(tmp_path, 2)
    begin(terminal, tmp_path, "beside", [gate, path, Path(f">{tmp_path}/out")])
    terminal.has("step 1/1")
    release(gate)
    terminal.until(lambda _: "another task" in (tmp_path / "out").read_text())
    lines = terminal.lines()
    assert any("step 1/1" in line for line in lines), lines
    release(path)
    terminal.until(lambda lines: lines[-1].startswith(PROMPT))


def test_a_bar_wider_than_the_terminal_takes_one_line(
    terminal: Screen, tmp_path: Path
) -> None:
    paths = fifos(tmp_path, 2)
    begin(terminal, tmp_path, "wide", paths)
    for step, path in enumerate(paths, start=1):
        lines = terminal.has(f"step {step}/2")
        assert sum("##" in line for line in lines) == 1, lines
        release(path)
    terminal.has("all done")


def test_a_bar_without_a_terminal_is_one_line_at_the_end() -> None:
    source = ALONE.replace('"__main__"', "__name__")
    program = start(source, "quick")
    out, err = program.communicate(timeout=120)
    assert (program.returncode, out) == (0, "")
    assert re.fullmatch(r"\(quick pid=\d+\) quick 200000/200000\n", err)


def test_carriage_returns_within_one_write_are_applied() -> None:
    """The task or a child process writes them."""
    output = run(
        """
        import os, subprocess, sys
        import aiogpu

        @aiogpu.remote
        def talk():
            print("hidden\\rshown")
            print("from elsewhere\\r")
            sys.stdout.flush()
            subprocess.run(["printf", "10%%\\r20%%\\n"], check=True)

        async def main():
            async with aiogpu.init(num_cpus=1):
                await talk.remote()

        aiogpu.run(main())
        """
    )
    # A child's output takes another way, so its position among the lines varies.
    lines = re.findall(r"\) (.*)\n", output)
    assert [line for line in lines if line != "20%"] == ["shown", "from elsewhere"]
    assert "20%" in lines
