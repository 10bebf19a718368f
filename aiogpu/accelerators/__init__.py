"""The kinds of devices that a node can share out, one file a vendor.

Each vendor gives the same four answers, those of `base.Accelerator`: what is it
called, how is it detected, which variable assigns it, which quantities are valid.
A room that knows no tasks: it says which devices there are and never who has them.

`aiogpu.accelerators` is public: it holds the names of the types, for
`accelerator_type=`, and `register`, for a vendor of one's own. Importing it loads no
vendor's file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import types
from .types import *  # noqa: F403 - its names are public here

if TYPE_CHECKING:
    from aiogpu.core.devices import Device as Device

    from .base import Accelerator as Accelerator
    from .base import DeviceWatch as DeviceWatch
    from .health import Health as Health
    from .registry import register as register
    from .sample import Sample as Sample
    from .unwatched import Unwatched as Unwatched

__all__ = [
    "Accelerator",
    "Device",
    "DeviceWatch",
    "Health",
    "Sample",
    "Unwatched",
    "register",
]
__all__ += types.__all__

if not TYPE_CHECKING:
    # Visible, it would make type checkers accept every misspelt name.
    _HOME = {
        "Accelerator": "aiogpu.accelerators.base",
        "Device": "aiogpu.core.devices",
        "DeviceWatch": "aiogpu.accelerators.base",
        "Health": "aiogpu.accelerators.health",
        "Sample": "aiogpu.accelerators.sample",
        "Unwatched": "aiogpu.accelerators.unwatched",
        "register": "aiogpu.accelerators.registry",
    }

    def __getattr__(name):
        """Load a public name from its file."""
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(
                f"module 'aiogpu.accelerators' has no attribute {name!r}"
            )
        from importlib import import_module

        value = getattr(import_module(home), name)
        globals()[name] = value
        return value

    def __dir__():
        """All public names."""
        return [*__all__]
