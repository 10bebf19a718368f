"""What a debugger in a worker comes to, which has nobody at a keyboard."""

from __future__ import annotations

from typing import Final

_NO_TERMINAL: Final = (
    "a debugger was started in a worker, which has no terminal to read from. To stop "
    "at a breakpoint, run the program by aiogpu.init(address='inline') or with "
    "AIOGPU_ADDRESS=inline: tasks and actors run in its own process then."
)


def explain_quit(error: BaseException) -> None:
    """Have the exception by which `pdb` leaves say why; nothing for any other one."""
    kind = type(error)
    # As `bdb.BdbQuit` without importing it.
    if kind.__name__ == "BdbQuit" and kind.__module__ == "bdb" and not error.args:
        error.args = (_NO_TERMINAL,)
