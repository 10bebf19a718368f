"""What an import that a worker makes must not do: begin the module's program."""

from __future__ import annotations

import sys

from aiogpu.errors import MisuseError
from aiogpu.worker.context import current
from aiogpu.worker.interrupts import IMPORT


def refuse_to_begin_anew() -> None:
    """Refuse to start anything for a module that is being imported in this thread.

    Raises:
        MisuseError: one is. Each worker would start another one, without end.
    """
    module = _imported()
    if module:
        raise MisuseError(
            f"a worker imports {module} for {current.name}, and the module begins the "
            f"program once more: write `if __name__ == '__main__':` above the lines at "
            f"its end that start it, such as `aiogpu.run(main())`."
        )


def _imported() -> str:
    """The module that is being imported here, the innermost; "" for none."""
    inner = frame = sys._getframe()
    while frame.f_back is not None:
        inner, frame = frame, frame.f_back
        if frame.f_code.co_filename == IMPORT:
            return str(inner.f_globals.get("__name__", "a module"))
    return ""
