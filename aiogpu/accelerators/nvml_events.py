"""The XIDs that NVML tells of since it was asked last, of all GPUs in one queue.

Decides which GPU an event is of, and what it means that events cannot be had: a line
says so, once, and there are none. Which of them matter is not decided here. It never
waits for an event.
"""

from __future__ import annotations

from contextlib import suppress
from ctypes import c_void_p, cast
from dataclasses import dataclass
from logging import getLogger
from types import ModuleType
from typing import Any, Final

AT_ONCE: Final = 256
"""Events taken at one go; a GPU that reports without end must not hold us up."""
WHOLE: Final = 0xFFFFFFFF
"""NVML's id of an instance where an event is of none."""

_log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Xid:
    """One event.

    Attributes:
        number: the XID.
        gpu: UUID of its GPU; None if it cannot be told.
        instance: ids of the GPU instance and the compute instance that it is of, each
            `WHOLE` for all of them.
    """

    number: int
    gpu: str | None
    instance: tuple[int, int] = (WHOLE, WHOLE)

    def concerns(self, gpu: str, place: tuple[int, int] | None) -> bool:
        """Whether it is of a GPU, or of its MIG instance at `place`."""
        if self.gpu is None:
            return True
        if self.gpu != gpu:
            return False
        return place is None or all(
            its in (WHOLE, mine) for its, mine in zip(self.instance, place, strict=True)
        )


class XidEvents:
    """NVML's queue of events of those GPUs that were registered."""

    def __init__(self) -> None:
        self._set: Any = None
        # Their UUIDs by the address of their handle, which also a lost GPU has.
        self._gpus: dict[int | None, str] = {}
        self._is_quiet = False

    def __repr__(self) -> str:
        return f"<XidEvents of {len(self._gpus)} GPUs>"

    def register(self, nvml: ModuleType, uuid: str, handle: object) -> None:
        """Have events of a GPU told from now on; nothing happens if they are.

        Raises:
            NVMLError: NVML was shut down, or the GPU is lost.
        """
        address = _address(handle)
        if address in self._gpus:
            return
        try:
            if self._set is None:
                self._set = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(
                handle, nvml.nvmlEventTypeXidCriticalError, self._set
            )
        except (nvml.NVMLError_Uninitialized, nvml.NVMLError_GpuIsLost):
            raise
        except nvml.NVMLError as error:
            self._note(error)
        self._gpus[address] = uuid

    def withdraw(self, uuid: str) -> None:
        """A GPU was lost: it has to be registered again when it is back."""
        self._gpus = {at: gpu for at, gpu in self._gpus.items() if gpu != uuid}

    def take(self, nvml: ModuleType) -> list[Xid]:
        """Say what has happened since the last time.

        Raises:
            NVMLError: NVML was shut down.
        """
        found: list[Xid] = []
        while self._set is not None and len(found) < AT_ONCE:
            try:
                event = nvml.nvmlEventSetWait_v2(self._set, 0)
            except nvml.NVMLError_Uninitialized:
                raise
            except (nvml.NVMLError_Timeout, nvml.NVMLError_GpuIsLost):
                break  # Nothing is left; which one is lost is seen by asking it.
            except nvml.NVMLError as error:
                self._note(error)
                break
            if event.eventType == nvml.nvmlEventTypeXidCriticalError:
                place = (event.gpuInstanceId, event.computeInstanceId)
                found.append(Xid(event.eventData, self._gpu(nvml, event.device), place))
        return found

    def _gpu(self, nvml: ModuleType, handle: object) -> str | None:
        known = self._gpus.get(_address(handle))
        if known is not None:
            return known
        try:
            uuid: str = nvml.nvmlDeviceGetUUID(handle)
        except nvml.NVMLError:
            return None
        return uuid

    def forget(self) -> None:
        """NVML was shut down by others: all has to be registered again."""
        self._set = None
        self._gpus.clear()

    def close(self, nvml: ModuleType) -> None:
        """Want no more events."""
        events, self._set = self._set, None
        self._gpus.clear()
        if events is not None:
            with suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(events)

    def _note(self, error: Exception) -> None:
        if not self._is_quiet:
            self._is_quiet = True
            _log.warning(
                "! NVML does not tell of XIDs (%s); a GPU that fails is noticed only "
                "where its driver says so otherwise.",
                error,
            )


def _address(handle: Any) -> int | None:
    return cast(handle, c_void_p).value
