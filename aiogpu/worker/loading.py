"""What a worker's import of a module must not do: begin the program that is in it."""

from __future__ import annotations

from typing import NoReturn

from aiogpu.errors import MisuseError
from aiogpu.worker.context import current


def refuse_to_begin_anew() -> NoReturn:
    """Raise a `MisuseError`: each worker would start another one, without end."""
    raise MisuseError(
        f"a worker imports the module of {current.name} to find it, and the module "
        f"begins the program once more: write `if __name__ == '__main__':` above the "
        f"lines at its end that start it, such as `aiogpu.run(main())`."
    )
