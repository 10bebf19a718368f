"""The kinds of devices that a node can share out, one module for each vendor.

Each vendor implements `base.Accelerator`: the name of its devices, their detection, the
variable that assigns them, and valid quantities. This package knows which devices
exist, not which processes use them.

`aiogpu.accelerators` is public: it has the names of the types, for
`accelerator_type=`, and `register`, which adds a vendor. Importing it loads no
vendor's module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import types
from .types import *  # noqa: F403 - its names are public here

if TYPE_CHECKING:
    from aiogpu.core.model.request import Device as Device

    from .base import Accelerator as Accelerator
    from .base import DeviceWatch as DeviceWatch
    from .base import Health as Health
    from .base import Sample as Sample
    from .base import Unwatched as Unwatched
    from .registry import register as register

if not TYPE_CHECKING:
    # Hidden from type checkers: with `__getattr__` they would accept every misspelt
    # name, and a computed `__all__` would hide the types.
    _HOME = {
        "Accelerator": "aiogpu.accelerators.base",
        "Device": "aiogpu.core.resources.devices",
        "DeviceWatch": "aiogpu.accelerators.base",
        "Health": "aiogpu.accelerators.base",
        "Sample": "aiogpu.accelerators.base",
        "Unwatched": "aiogpu.accelerators.base",
        "register": "aiogpu.accelerators.registry",
    }
    __all__ = list(_HOME)
    __all__ += [n for n in vars(types) if n != "Final" and not n.startswith("_")]

    def __getattr__(name):
        """Load a public name from its module."""
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
        """Return all public names."""
        return [*__all__]
