"""`aiogpu logs` and `aiogpu timeline`: the output of tasks, and when tasks ran.

The lines of a log come oldest first, across its rotated files.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import click

from aiogpu.cli import connect
from aiogpu.cli.nodes import is_private, node_at
from aiogpu.cli.terminal import echo, is_terminal
from aiogpu.observe.log_reader import BEGIN, LINE, LogReader
from aiogpu.observe.trace import trace_of
from aiogpu.runtime.directories import check_meeting, default_socket, logs_beside
from aiogpu.runtime.output import FILE

NODE: Final = "node.log"
"""The log of the node itself; see `aiogpu.daemon`."""
USUAL: Final = 1000
"""Lines that are shown by default."""
LISTED: Final = 8
"""Most programs that an error lists."""
EVERY: Final = 200
"""Milliseconds between two checks for new lines."""
Wanted = Callable[[str], bool]


@click.command()
@click.argument("name", required=False)
@click.option("--follow", "-f", is_flag=True, help="Keep printing new lines.")
@click.option(
    "--task", type=connect.Whole(1), metavar="ID", help="Only lines of this task."
)
@click.option(
    "--client",
    type=connect.Whole(1),
    metavar="ID",
    help="Only lines of this program; `aiogpu list clients` shows its ID.",
)
@click.option("--node", is_flag=True, help="Show the log of the node itself.")
@click.option(
    "--lines",
    "-n",
    type=connect.Whole(0),
    default=USUAL,
    show_default=True,
    help="Show at most so many of the last lines.",
)
@click.option(
    "--raw",
    is_flag=True,
    help="Let the output of tasks control the terminal, for example with colours.",
)
@connect.address_option
@click.option(
    "--log-dir",
    metavar="DIRECTORY",
    help="Directory of the logs, if it is not beside the socket.",
)
def logs(
    name: str | None,
    follow: bool,
    task: int | None,
    client: int | None,
    node: bool,
    lines: int,
    raw: bool,
    address: str,
    log_dir: str | None,
) -> None:
    """Show the output of tasks, with the time, the program and the task.

    NAME: only lines of tasks and actors of this name.

    The command reads files, so it also works after the node has ended. A terminal shows
    control characters as escapes, unless --raw is given; a pipe or a file gets the
    bytes of the log.

    \b
    Examples:
      aiogpu logs -n 20
      aiogpu logs train
      aiogpu logs --follow --task 12
      aiogpu logs --node

    \b
    Exit codes:
      0    everything was shown
      1    there is no log, or it has no lines of that program
      2    bad input
      130  --follow was ended by Ctrl-C
    """  # noqa: D301 - click's mark for lines to be left as they are
    if node and (name or task or client):
        raise click.UsageError(
            "the log of --node has no lines of tasks: leave out NAME, --task and "
            "--client."
        )
    directory = _directory_of(address) if log_dir is None else log_dir
    if not os.path.isdir(directory):
        raise click.ClickException(
            f"there are no logs in {directory}. A node of `aiogpu start --head` writes "
            f"them beside its socket: give the socket by --address, or the directory "
            f"by --log-dir."
        )
    reader = LogReader(os.path.join(directory, NODE if node else FILE))
    known: set[int] = set()
    is_raw = raw or not is_terminal()
    try:
        is_wanted, last = _wanted(name, task, client, known), deque[str](maxlen=lines)
        for line in reader.read():
            if task is not None and BEGIN.match(line):
                last.clear()  # the next lines belong to another node
            elif is_wanted(line):
                last.append(line)
        _show(last, is_raw)
        if client is not None and client not in known and not follow:
            raise _no_lines(client, known, directory)
        whose = name if task is None else f"task {task}"
        if whose is not None and lines and not last and not follow:
            echo(
                f"There is no line of {whose} in {directory}: it has printed nothing, "
                f"or its lines were dropped. `aiogpu why {name or task}` shows its "
                f"state.",
                err=True,
            )
        while follow and _wait():
            wanted = filter(is_wanted, reader.read())
            _show(wanted, is_raw)
    finally:
        reader.close()


def _directory_of(address: str) -> str:
    """Return the directory of a node's logs.

    Raises:
        ClickException: the node is inside a program, and has no logs.
        NodeError: another user may control the directory.
    """
    if address == connect.ANY and os.path.isdir(logs_beside(default_socket())):
        address = connect.AUTO  # even if the service has ended
    elif address == connect.ANY or address.startswith(connect.OF_PROCESS):
        try:
            address = connect.resolved(address)
        except (connect.NoNodeError, connect.SeveralNodesError):
            address = connect.AUTO  # nodes in programs keep no log
    path = connect.socket_path(address)
    if is_private(path):
        check_meeting(path)
        raise click.ClickException(
            f"the node at {path} is inside a program and keeps no log: the output of "
            f"its tasks goes to the output of the program{_output_of(path)}. For a "
            f"node of `aiogpu start --head`, which keeps a log, give --address."
        )
    directory = logs_beside(path)
    check_meeting(directory)
    return directory


def _output_of(path: str) -> str:
    """Describe the standard output of the process of a node, if it is a file."""
    node = node_at(path)
    with suppress(OSError):
        output = os.readlink(f"/proc/{node.pid if node is not None else 0}/fd/1")
        return f", {output}" if output.startswith("/") else ""
    return ""


def _no_lines(client: int, known: set[int], directory: str) -> click.ClickException:
    """Return the error for a program without lines in the log."""
    listed = ", ".join(map(str, sorted(known)[:LISTED]))
    more = " and others" if len(known) > LISTED else ""
    lines = f"There are lines of {listed}{more}" if known else "There are no lines"
    return click.ClickException(
        f"there is no line of program {client} in {directory}. {lines}; `aiogpu list "
        f"clients` shows the IDs of the present programs."
    )


def _wanted(
    name: str | None, task: int | None, client: int | None, known: set[int]
) -> Wanted:
    """Return a filter for lines; it adds the program of each line to `known`."""
    if name is None and task is None and client is None:
        return lambda _line: True

    def is_of(line: str) -> bool:
        match = LINE.match(line)
        if match is None:
            return False
        line_client, line_task, line_name = match.groups()
        known.add(int(line_client))
        return (
            (name is None or f"{line_name}.".startswith(f"{name}."))
            and task in (None, int(line_task))
            and client in (None, int(line_client))
        )

    return is_of


def _show(lines: Iterable[str], is_raw: bool) -> None:
    """Print lines: as they are in the file, or as a terminal may show them."""
    out = sys.stdout
    for line in lines:
        if is_raw:
            out.buffer.write(f"{line}\n".encode("utf-8", "surrogateescape"))
        else:
            out.write(f"{line}\n")
    out.flush()


def _wait() -> bool:
    """Wait a moment; raise `BrokenPipeError` once the output is a broken pipe."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if any(event & select.POLLERR for _, event in poll.poll(EVERY)):
        raise BrokenPipeError
    return True


STDOUT: Final = "-"


@click.command()
@click.argument("out", metavar="FILE", type=click.Path(dir_okay=False))
@connect.address_option
def timeline(out: str, address: str) -> None:
    """Write a timeline of the tasks that ran on the node to FILE, `-` for stdout.

    FILE gets JSON in the Trace Event Format: open it at https://ui.perfetto.dev. The
    timeline has the last 10 000 tasks, with a row for each device and each worker.

    \b
    Example:
      aiogpu timeline out.json

    \b
    Exit codes:
      0  the file was written
      1  no node runs, or the file cannot be written
      2  bad input
    """  # noqa: D301 - click's mark for lines to be left as they are
    spans = connect.ask(address, lambda node: node.timeline(), patience=None)
    text = json.dumps(trace_of(spans), separators=(",", ":"))
    if out == STDOUT:
        echo(text)
        return
    try:
        _write(out, text)
    except OSError as error:
        raise click.ClickException(f"{out}: {error.strerror}") from None
    echo(
        f"Wrote {len(spans)} tasks to {out}; open it at https://ui.perfetto.dev",
        err=True,
    )


def _write(path: str, text: str) -> None:
    """Write a temporary file and rename it, so that readers never see half a file.

    Pipes and other files that are not regular are written directly; a link stays a
    link.
    """
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        Path(path).write_text(f"{text}\n", encoding="utf-8")
        return
    half = Path(f"{path}.{os.getpid()}")
    try:
        half.write_text(f"{text}\n", encoding="utf-8")
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
