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
@click.option(
    "--read-only",
    is_flag=True,
    help="Offer no buttons that cancel tasks, kill actors or end leases.",
)
@click.option(
    "--until",
    type=connect.Whole(1),
    metavar="PID",
    help="End when this process ends.",
)
def dashboard(
    address: str,
    port: int,
    host: str,
    no_browser: bool,
    read_only: bool,
    until: int | None,
) -> None:
    """Show the running node in the browser: who holds what, what waits, what failed.

    The dashboard is a process of its own, which goes on when the node restarts. Whoever
    has the URL, which contains a token, can read the pages, and can cancel tasks, kill
    actors and end leases unless --read-only is given.

    \b
    Examples:
      aiogpu dashboard
      aiogpu dashboard --port 8800 --no-browser
      aiogpu dashboard --read-only

    \b
    Exit codes:
      0  Ctrl-C, or the process of --until has ended
      1  no node runs, Bokeh is not installed, the port is taken, or there is no
         process of --until
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
        return connect.socket_path(found)

    def on_ready(url: str) -> None:
        echo(f"Dashboard: {url}\nCtrl-C ends it.")
        if not no_browser:
            webbrowser.open(url)

    try:
        asyncio.run(
            serve(
                locate,
                host,
                port,
                on_ready,
                is_read_only=read_only,
                until=until or 0,
            )
        )
    except ProcessLookupError:
        raise click.ClickException(
            f"there is no process {until}, whose end was to be waited for."
        ) from None
    except OSError as error:
        raise click.ClickException(
            f"the dashboard cannot listen on {host}, port {port}: {error.strerror}. "
            f"Give another --port, or leave it out for any free one."
        ) from None
