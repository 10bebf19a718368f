"""An asyncio-native task runtime for GPUs: `await f.remote()` on fractional GPUs.

This module has the names that most programs use. All errors are in `aiogpu.errors`,
types for annotations in `aiogpu.types`, device vendors in `aiogpu.accelerators`. Each
name is loaded from its module when it is first used, so importing `aiogpu` is cheap and
workers stay small.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` is slow to import; type checkers know the name

if TYPE_CHECKING:
    from aiogpu import accelerators as accelerators
    from aiogpu import errors as errors
    from aiogpu import sync as sync
    from aiogpu import types as types
    from aiogpu.api.actors.actor import ActorHandle as ActorHandle
    from aiogpu.api.actors.actor import exit_actor as exit_actor
    from aiogpu.api.actors.actor import get_actor as get_actor
    from aiogpu.api.actors.actor import kill as kill
    from aiogpu.api.actors.batch import batch as batch
    from aiogpu.api.actors.gang import gang as gang
    from aiogpu.api.actors.pool import ActorPool as ActorPool
    from aiogpu.api.actors.pool import typed as typed
    from aiogpu.api.actors.queue import Queue as Queue
    from aiogpu.api.calls import put as put
    from aiogpu.api.decorator import method as method
    from aiogpu.api.decorator import remote as remote
    from aiogpu.api.map import Results as Results
    from aiogpu.api.node import available_resources as available_resources
    from aiogpu.api.node import cluster_resources as cluster_resources
    from aiogpu.api.node import init as init
    from aiogpu.api.node import is_initialized as is_initialized
    from aiogpu.api.node import shutdown as shutdown
    from aiogpu.api.node import status as status
    from aiogpu.api.node import why as why
    from aiogpu.api.portal.calls import from_thread as from_thread
    from aiogpu.api.reservation import lease as lease
    from aiogpu.api.reservation import placement as placement
    from aiogpu.api.results.handle import Handle as Handle
    from aiogpu.api.results.reports import report as report
    from aiogpu.api.results.stream import Stream as Stream
    from aiogpu.api.results.wait import as_completed as as_completed
    from aiogpu.api.results.wait import get as get
    from aiogpu.api.results.wait import wait as wait
    from aiogpu.api.run import run as run
    from aiogpu.api.runtime_context import get_gpu_ids as get_gpu_ids
    from aiogpu.api.runtime_context import get_runtime_context as get_runtime_context
    from aiogpu.errors import ActorDiedError as ActorDiedError
    from aiogpu.errors import AiogpuError as AiogpuError
    from aiogpu.errors import GpuOutOfMemoryError as GpuOutOfMemoryError
    from aiogpu.errors import InfeasibleError as InfeasibleError
    from aiogpu.errors import NodeDiedError as NodeDiedError
    from aiogpu.errors import NoLoopError as NoLoopError
    from aiogpu.errors import OptionError as OptionError
    from aiogpu.errors import OutOfMemoryError as OutOfMemoryError
    from aiogpu.errors import TaskCancelledError as TaskCancelledError
    from aiogpu.errors import TaskError as TaskError
    from aiogpu.errors import TaskTimeoutError as TaskTimeoutError
    from aiogpu.errors import WorkerDiedError as WorkerDiedError
    from aiogpu.version import __version__ as __version__

_MODULES = {
    "api.actors.actor": (
        "ActorHandle",
        "exit_actor",
        "get_actor",
        "kill",
    ),
    "api.actors.batch": ("batch",),
    "api.results.wait": ("as_completed", "get", "wait"),
    "api.runtime_context": ("get_gpu_ids", "get_runtime_context"),
    "api.results.handle": ("Handle",),
    "api.results.reports": ("report",),
    "api.results.stream": ("Stream",),
    "api.map": ("Results",),
    "api.node": (
        "available_resources",
        "cluster_resources",
        "init",
        "is_initialized",
        "shutdown",
        "status",
        "why",
    ),
    "api.portal.calls": ("from_thread",),
    "api.reservation": ("lease", "placement"),
    "api.actors.pool": ("ActorPool", "typed"),
    "api.calls": ("put",),
    "api.actors.queue": ("Queue",),
    "api.run": ("run",),
    "api.decorator": ("method", "remote"),
    "api.actors.gang": ("gang",),
    "errors": (
        "ActorDiedError",
        "AiogpuError",
        "GpuOutOfMemoryError",
        "InfeasibleError",
        "NoLoopError",
        "NodeDiedError",
        "OptionError",
        "OutOfMemoryError",
        "TaskCancelledError",
        "TaskError",
        "TaskTimeoutError",
        "WorkerDiedError",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

_MODULE_OF["__version__"] = "version"

_PACKAGES = ("accelerators", "errors", "sync", "types")
"""Public modules; `from aiogpu import *` does not import them."""

__all__ = sorted({*_MODULE_OF} - {"__version__"})  # noqa: PLE0605 - a test holds it against the imports above

if not TYPE_CHECKING:
    # Hidden from type checkers, which would otherwise accept every misspelt name.
    def __getattr__(name):
        """Load a public name from its module, or a public module."""
        from importlib import import_module

        if name in _PACKAGES:
            return import_module(f"aiogpu.{name}")
        module = _MODULE_OF.get(name)
        if module is None:
            usage_errors = import_module("aiogpu.api.usage_errors")
            modules = [
                import_module(f"aiogpu.{each}") for each in _PACKAGES if each != "sync"
            ]
            raise usage_errors.no_such_name(name, __all__, modules)
        value = getattr(import_module(f"aiogpu.{module}"), name)
        globals()[name] = value
        return value

    def __dir__():
        """Return all public names."""
        return [*__all__, *_PACKAGES, "__version__"]
