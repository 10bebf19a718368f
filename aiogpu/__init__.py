"""An asyncio-native task runtime for GPUs: `await f.remote()` on fractional GPUs.

Only names stand here; each is loaded from its module when it is first used, so that
importing `aiogpu` costs little and a worker stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiogpu import accelerators as accelerators
    from aiogpu.api.actor import ActorHandle as ActorHandle
    from aiogpu.api.actor import RemoteClass as RemoteClass
    from aiogpu.api.actor import exit_actor as exit_actor
    from aiogpu.api.actor import get_actor as get_actor
    from aiogpu.api.actor import kill as kill
    from aiogpu.api.actor_class import method as method
    from aiogpu.api.actor_pool import ActorPool as ActorPool
    from aiogpu.api.actor_pool import typed as typed
    from aiogpu.api.batch import batch as batch
    from aiogpu.api.calls import put as put
    from aiogpu.api.decorator import remote as remote
    from aiogpu.api.handle import Handle as Handle
    from aiogpu.api.handle import Stream as Stream
    from aiogpu.api.map import Results as Results
    from aiogpu.api.node import available_resources as available_resources
    from aiogpu.api.node import cluster_resources as cluster_resources
    from aiogpu.api.node import init as init
    from aiogpu.api.node import shutdown as shutdown
    from aiogpu.api.node import status as status
    from aiogpu.api.node import why as why
    from aiogpu.api.remote_function import RemoteFunction as RemoteFunction
    from aiogpu.api.remote_function import RemoteGenerator as RemoteGenerator
    from aiogpu.api.reservation import Lease as Lease
    from aiogpu.api.reservation import Placement as Placement
    from aiogpu.api.reservation import lease as lease
    from aiogpu.api.reservation import placement as placement
    from aiogpu.api.run import run as run
    from aiogpu.api.runtime_context import RuntimeContext as RuntimeContext
    from aiogpu.api.runtime_context import get_gpu_ids as get_gpu_ids
    from aiogpu.api.runtime_context import get_runtime_context as get_runtime_context
    from aiogpu.api.session import Session as Session
    from aiogpu.api.wait import as_completed as as_completed
    from aiogpu.api.wait import get as get
    from aiogpu.api.wait import wait as wait
    from aiogpu.errors import ActorDiedError as ActorDiedError
    from aiogpu.errors import ActorNameError as ActorNameError
    from aiogpu.errors import AiogpuError as AiogpuError
    from aiogpu.errors import AiogpuWarning as AiogpuWarning
    from aiogpu.errors import DeadlockError as DeadlockError
    from aiogpu.errors import DeserializationError as DeserializationError
    from aiogpu.errors import DeviceError as DeviceError
    from aiogpu.errors import GpuOutOfMemoryError as GpuOutOfMemoryError
    from aiogpu.errors import InfeasibleError as InfeasibleError
    from aiogpu.errors import InternalError as InternalError
    from aiogpu.errors import LimitError as LimitError
    from aiogpu.errors import MisuseError as MisuseError
    from aiogpu.errors import NodeClosedError as NodeClosedError
    from aiogpu.errors import NodeDiedError as NodeDiedError
    from aiogpu.errors import NodeError as NodeError
    from aiogpu.errors import NodeRunningError as NodeRunningError
    from aiogpu.errors import NodeStartError as NodeStartError
    from aiogpu.errors import NoLoopError as NoLoopError
    from aiogpu.errors import NoSuchTaskError as NoSuchTaskError
    from aiogpu.errors import ObjectMemoryError as ObjectMemoryError
    from aiogpu.errors import OptionError as OptionError
    from aiogpu.errors import OutOfMemoryError as OutOfMemoryError
    from aiogpu.errors import PlacementRemovedError as PlacementRemovedError
    from aiogpu.errors import PreloadError as PreloadError
    from aiogpu.errors import ProtocolError as ProtocolError
    from aiogpu.errors import SerializationError as SerializationError
    from aiogpu.errors import TaskCancelledError as TaskCancelledError
    from aiogpu.errors import TaskError as TaskError
    from aiogpu.errors import TaskTimeoutError as TaskTimeoutError
    from aiogpu.errors import WorkerDiedError as WorkerDiedError
    from aiogpu.observe.status import NodeStatus as NodeStatus
    from aiogpu.observe.why import Why as Why

_MODULES = {
    "api.actor": (
        "ActorHandle",
        "RemoteClass",
        "exit_actor",
        "get_actor",
        "kill",
    ),
    "api.batch": ("batch",),
    "api.wait": ("as_completed", "get", "wait"),
    "api.runtime_context": ("RuntimeContext", "get_gpu_ids", "get_runtime_context"),
    "api.handle": ("Handle", "Stream"),
    "api.map": ("Results",),
    "api.actor_class": ("method",),
    "api.node": (
        "available_resources",
        "cluster_resources",
        "init",
        "shutdown",
        "status",
        "why",
    ),
    "api.reservation": ("Lease", "Placement", "lease", "placement"),
    "api.actor_pool": ("ActorPool", "typed"),
    "api.calls": ("put",),
    "api.run": ("run",),
    "api.session": ("Session",),
    "api.decorator": ("remote",),
    "api.remote_function": ("RemoteFunction", "RemoteGenerator"),
    "observe.status": ("NodeStatus",),
    "observe.why": ("Why",),
    "errors": (
        "ActorDiedError",
        "ActorNameError",
        "AiogpuError",
        "AiogpuWarning",
        "DeadlockError",
        "DeserializationError",
        "DeviceError",
        "GpuOutOfMemoryError",
        "InfeasibleError",
        "InternalError",
        "LimitError",
        "MisuseError",
        "NoLoopError",
        "NodeClosedError",
        "NodeDiedError",
        "NodeError",
        "NodeRunningError",
        "NodeStartError",
        "NoSuchTaskError",
        "ObjectMemoryError",
        "OptionError",
        "OutOfMemoryError",
        "PlacementRemovedError",
        "PreloadError",
        "ProtocolError",
        "SerializationError",
        "TaskCancelledError",
        "TaskError",
        "TaskTimeoutError",
        "WorkerDiedError",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 - a test holds it against the imports above
__version__ = "0.1.0"

if not TYPE_CHECKING:
    # Visible, it would make type checkers accept every misspelt name.
    def __getattr__(name):
        """Load a public name from its module, or a public package."""
        from importlib import import_module

        if name == "accelerators":
            return import_module("aiogpu.accelerators")
        module = _MODULE_OF.get(name)
        if module is None:
            misnamed = import_module("aiogpu.api.usage_errors")
            raise misnamed.no_such_name(name, __all__)
        value = getattr(import_module(f"aiogpu.{module}"), name)
        globals()[name] = value
        return value

    def __dir__():
        """All public names."""
        return [*__all__, "__version__", "accelerators", "errors"]
