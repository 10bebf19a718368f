"""What comes from elsewhere never commands the terminal of a command."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator

import pexpect
import pytest
from rich.text import Text

import aiogpu
from aiogpu.cli.terminal import PrintableStream
from aiogpu.cli.views.tables import console
from aiogpu.core.model.text import escaped
from tests.cli.sandbox import LIMIT, Sandbox, open_sandbox
from tests.support.gate import Gate

TITLE = "\x1b]0;evil\x07"
"""Sets the title of a terminal."""
ESCAPED = r"\x1b]0;evil\x07"
CLEAR = "\x9b2J"
"""Clears the screen, by a single character for ESC and `[`."""


@aiogpu.remote(num_gpus=1, name=f"task{TITLE}{CLEAR}")
def held(path: str) -> None:
    from tests.support.gate import pass_gate

    print(f"printed{TITLE}ü")
    sys.stdout.flush()
    pass_gate(path, "held")


@aiogpu.remote(num_cpus=1, name=f"bad{TITLE}")
def fail() -> None:
    raise ValueError(f"message{TITLE}{CLEAR}")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox() as sandbox:
        sandbox.run("start", "--head", "--num-cpus=2", "--num-gpus=1")
        yield sandbox
        sandbox.run("stop", "--drain=0")


def on_terminal(sandbox: Sandbox, *arguments: str) -> str:
    """Everything that a command writes to its terminal."""
    child = start_on_terminal(sandbox, *arguments)
    child.expect(pexpect.EOF)
    child.close()
    return str(child.before)


def start_on_terminal(sandbox: Sandbox, *arguments: str) -> pexpect.spawn[str]:
    return pexpect.spawn(
        sys.executable,
        ["-m", "aiogpu", *arguments],
        env={**sandbox.variables, "TERM": "xterm-256color"},  # type: ignore[arg-type]
        dimensions=(50, 200),
        encoding="utf-8",
        timeout=LIMIT,
    )


def check(output: str) -> None:
    assert TITLE not in output, output
    assert "\x1b]" not in output, output
    assert CLEAR not in output, output


@pytest.mark.either_loop
async def test_names_output_and_errors_do_not_command_the_terminal(
    sandbox: Sandbox, gate: Gate
) -> None:
    async with aiogpu.init(address=sandbox.place.socket, log_to_driver=False):
        running, waiting = (held.remote(gate.path) for _ in range(2))
        await gate.entered("held")
        with pytest.raises(ValueError, match="message"):
            await fail.remote()
        for arguments in (
            ["status"],
            ["list", "tasks"],
            ["list", "tasks", "--state=failed"],
            ["why", f"task{TITLE}{CLEAR}"],
            ["why", f"bad{TITLE}"],
            ["cancel", f"task{TITLE}{CLEAR}"],
            ["cancel", TITLE],
            ["kill", TITLE],
            ["logs"],
            ["logs", "--node"],
            [TITLE],
            ["status", f"--{TITLE}"],
            ["status", f"--address={TITLE}"],
            ["start", "--head", f"--log-dir=/nowhere/{TITLE}"],
        ):
            output = on_terminal(sandbox, *arguments)
            assert output.strip(), arguments
            check(output)
        # The reason for the wait names the holder.
        child = start_on_terminal(sandbox, "run", "--num-gpus=1", "--", "true")
        child.expect("GPU.*task")
        child.sendintr()
        child.expect(pexpect.EOF)
        child.close()
        check(child.before + str(child.after))
        child = start_on_terminal(sandbox, "top")
        child.expect("task")
        child.send("q")
        child.expect(pexpect.EOF)
        child.close()
        check(child.before)
        running.cancel()
        waiting.cancel()


def test_logs_are_raw_only_on_request_and_in_pipes(sandbox: Sandbox) -> None:
    line = f"printed{TITLE}ü"
    shown = on_terminal(sandbox, "logs")
    assert f"printed{ESCAPED}ü" in shown
    assert line in on_terminal(sandbox, "logs", "--raw")
    ran = subprocess.run(
        [sys.executable, "-m", "aiogpu", "logs"],
        env={**sandbox.variables, "PYTHONIOENCODING": "ascii"},
        stdout=subprocess.PIPE,
        check=True,
        timeout=LIMIT,
    )
    with open(f"{sandbox.place.logs}/tasks.log", "rb") as file:
        assert ran.stdout == file.read()


def test_a_process_does_not_command_the_terminal_by_its_name(
    sandbox: Sandbox,
) -> None:
    command = ["bash", "-c", f"exec -a $'{TITLE}' sleep 600"]
    with subprocess.Popen(command) as process:
        try:
            while f"{TITLE}".encode() not in name_of(process.pid):
                pass
            output = on_terminal(sandbox, "status", f"--pid={process.pid}")
        finally:
            process.kill()
    check(output)
    assert f"process {process.pid} (?]0;evil?) has no node" in output


def name_of(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\nof lines", "plain\ttext\nof lines"),
        ("ünïcode 日本\u3000\u00a0👩\u200d🔬", "ünïcode 日本\u3000\u00a0👩\u200d🔬"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\r\b\x07\x00\x7f\x0b\x0c", r"\x0d\x08\x07\x00\x7f\x0b\x0c"),
        ("\x9b2J\x85", r"\x9b2J\x85"),
        ("a\u202eb\u2066c\u2028d", r"a\u202eb\u2066c\u2028d"),
        (b"\xff\xfe".decode("utf-8", "surrogateescape"), r"\xff\xfe"),
        ("\ud800", r"\ud800"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert escaped(text) == shown
    paper = io.StringIO()
    print(text, file=PrintableStream(paper), end="", flush=True)
    assert paper.getvalue() == shown


def test_rich_keeps_its_own_sequences_alone() -> None:
    paper = io.StringIO()
    screen = console(file=paper, force_terminal=True, color_system="standard")
    screen.print(Text(f"red{TITLE}", "red"))
    shown = ESCAPED.removesuffix(r"\x07")  # rich itself leaves out the bell
    assert paper.getvalue() == f"\x1b[31mred{shown}\x1b[0m\n"


def test_a_stream_in_ascii_is_not_gone_around() -> None:
    code = "from aiogpu.cli.terminal import *; open_streams(); echo('\\x1b\\xfc')"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert ran.stdout == b"\\x1b?\n"
