"""`aiogpu dashboard`: serves the dashboard of a node until Ctrl-C."""

from __future__ import annotations

import asyncio
import webbrowser

import click

from aiogpu.cli import connect
from aiogpu.cli.terminal import echo
from aiogpu.errors import NodeError


@click.command()
@connect.address_option
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    metavar="PORT",
    help="Port to listen on; default any free port.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address to listen on. With another than this machine's own, others can "
    "read the traffic.",
)
@click.option("--no-browser", is_flag=True, help="Only print the URL.")
def dashboard(address: str, port: int, host: str, no_browser: bool) -> None:
    """Show the running node in the browser: who holds what, what waits, what failed.

    The dashboard is a process of its own, which changes nothing on the node. It goes on
    when the node restarts. Whoever has the URL can read the page: it contains a token.

    \b
    Examples:
      aiogpu dashboard
      aiogpu dashboard --port 8800 --no-browser

    \b
    Exit codes:
      0  Ctrl-C
      1  no node runs, Bokeh is not installed, or the port is taken
      2  bad input
    """  # noqa: D301 - click's mark for lines to be left as they are
    try:
        from aiogpu.dashboard.guard import is_loopback
        from aiogpu.dashboard.server import serve
    except ModuleNotFoundError as error:
        if error.name != "bokeh":
            raise
        raise click.ClickException(
            "the dashboard needs Bokeh, which is not installed. Install it by "
            "pip install 'aiogpu[dashboard]'."
        ) from None
    connect.check_there(connect.resolved(address))
    if not is_loopback(host):
        echo(
            f"Warning: the dashboard listens on {host}. The connection is not "
            f"encrypted: whoever reads it has the token.",
            err=True,
        )

    def locate() -> str:
        try:
            found = connect.resolved(address)
            connect.check_there(found)
        except click.ClickException as error:
            raise NodeError(error.message) from None
        return found

    def on_ready(url: str) -> None:
        echo(f"Dashboard: {url}\nCtrl-C ends it.")
        if not no_browser:
            webbrowser.open(url)

    try:
        asyncio.run(serve(locate, host, port, on_ready))
    except OSError as error:
        raise click.ClickException(
            f"the dashboard cannot listen on {host}, port {port}: {error.strerror}. "
            f"Give another --port, or leave it out for any free one."
        ) from None
