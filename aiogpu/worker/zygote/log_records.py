"""Sends what tasks log as records, for the program's own logging to handle.

Imported once a zygote begins to import: `logging` takes a few milliseconds, and
cloudpickle, which all workers have, imports it in any case.
"""

from __future__ import annotations

import logging
import sys
from itertools import chain
from types import NoneType
from typing import TYPE_CHECKING, Any, Final

from aiogpu.client.current import current, method_called
from aiogpu.wire.codec import pack
from aiogpu.wire.messages import LOG_LEVEL, Record

if TYPE_CHECKING:
    from aiogpu.worker.connection import Channel

_PLAIN: Final = frozenset({NoneType, bool, int, float, str})

_DEEPEST: Final = 4
"""Lists and dicts within each other that an attribute of a record keeps as such."""


class RecordSender(logging.Handler):
    """The handler of the root logger: sends records to the driver.

    It is there before anything of the user's is imported. `logging.basicConfig` does
    nothing where there is a handler, and the records are shown once, by the program.

    Attributes:
        aiogpu_channel: to the driver. None where this process speaks for no worker:
            then records are printed.
    """

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.aiogpu_channel: Channel | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record; see `logging.Handler`."""
        if self.aiogpu_channel is None:
            if logging.lastResort is not None:
                logging.lastResort.handle(record)
            return
        try:
            text = _as_text(record)
            self.aiogpu_channel.send(
                Record(current.task, text, pack((_fields(record),)))
            )
        except Exception:  # noqa: BLE001 - as all handlers do
            self.handleError(record)


_as_text: Final = logging.Formatter().format
"""The message, with the traceback and the stack if there are any."""


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """The attributes of a record as plain values.

    What is sent refers to no class: the program would have to import it, and a tensor
    would make it begin CUDA.
    """
    fields = {
        name: _plain(value, 0)
        for name, value in vars(record).items()
        if name not in ("args", "exc_info", "message", "msg")
    }
    msg, args = record.msg, record.args
    given = chain(*args.items()) if isinstance(args, dict) else args or ()
    is_plain = type(msg) is str and all(map(_is_plain, given))
    fields["msg"] = msg if is_plain else record.getMessage()
    fields["args"] = args if is_plain else None
    name = current.name
    if method := method_called.get()[0]:
        from aiogpu.wire.messages import plain_name  # workers have it

        name += f".{plain_name(method)}"
    fields["aiogpu_task"] = current.task
    fields["aiogpu_task_name"] = name
    fields["aiogpu_devices"] = [*chain(*current.accelerators.values())]
    return fields


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN and (type(value) is not int or abs(value) < 1 << 63)


def _plain(value: Any, depth: int) -> Any:
    """Return an attribute as it is sent, as its `repr` if need be."""
    if _is_plain(value):
        return value
    if depth < _DEEPEST:
        if isinstance(value, list | tuple):
            return [_plain(one, depth + 1) for one in value]
        if isinstance(value, dict):
            return {str(key): _plain(one, depth + 1) for key, one in value.items()}
    return repr(value)


def handle_records() -> None:
    """Log what the program logs, by a handler of the root logger."""
    level = sys._xoptions.get(LOG_LEVEL)
    number = int(level) if isinstance(level, str) else logging.WARNING
    root = logging.getLogger()
    root.setLevel(number)
    root.addHandler(RecordSender(number))
    if logging.lastResort is not None:
        logging.lastResort.setLevel(number)
