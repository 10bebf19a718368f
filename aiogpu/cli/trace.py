"""`aiogpu timeline`: what has run on a node, as a file that Perfetto opens."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

import click

from aiogpu.cli import connect
from aiogpu.observe.trace import trace_of

STDOUT: Final = "-"


@click.command()
@click.argument("out", metavar="FILE", type=click.Path(dir_okay=False))
@connect.address_option
def timeline(out: str, address: str) -> None:
    """Write what has run on the node to FILE, `-` for stdout.

    It is JSON in the Trace Event Format: open it at https://ui.perfetto.dev. The last
    20 000 tasks are in it, with a row for each device and for each worker.

    \b
    Example:
      aiogpu timeline out.json

    \b
    Exit codes:
      0  it is written
      1  no node runs, or the file cannot be written
      2  bad input
    """  # noqa: D301 - click's mark for lines to be left as they are
    spans = connect.ask(address, lambda node: node.timeline(), patience=None)
    text = json.dumps(trace_of(spans), separators=(",", ":"))
    if out == STDOUT:
        click.echo(text)
        return
    try:
        _write(out, text)
    except OSError as error:
        raise click.ClickException(f"{out}: {error.strerror}") from None
    click.echo(
        f"{len(spans)} tasks are in {out}; open it at https://ui.perfetto.dev", err=True
    )


def _write(path: str, text: str) -> None:
    """Write it beside its place first: nobody finds half of it.

    What is no file, such as a pipe, stays what it is, and so does a link to a file.
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
