"""Sends tasks' log records to the program, whose logging handles them.

Imported when a zygote starts its imports: `logging` takes a few milliseconds, and
cloudpickle, which all workers load, imports it anyway.
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
"""Depth of nested lists and dicts that a record's attribute keeps."""


class RecordSender(logging.Handler):
    """The handler of the root logger: sends records to the driver.

    It is installed before user code is imported. `logging.basicConfig` does nothing if
    there is a handler, so records are shown once, by the program.

    Attributes:
        aiogpu_channel: connection to the driver. None in a process that is no worker,
            where records are printed.
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
        except Exception:  # noqa: BLE001 - like all handlers
            self.handleError(record)


_as_text: Final = logging.Formatter().format
"""Formats the message, with the traceback and the stack if there are any."""


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the attributes of a record as plain values.

    Objects are not pickled: the program would have to import their classes, and a
    tensor would initialise CUDA there.
    """
    fields = {
        name: _plain(value, 0)
        for name, value in vars(record).items()
        if name not in ("args", "exc_info", "message", "msg")
    }
    msg, args = record.msg, record.args
    arguments = chain(*args.items()) if isinstance(args, dict) else args or ()
    is_plain = type(msg) is str and all(map(_is_plain, arguments))
    fields["msg"] = msg if is_plain else record.getMessage()
    fields["args"] = args if is_plain else None
    name = current.name
    if method := method_called.get()[0]:
        from aiogpu.wire.messages import plain_name  # loaded in workers already

        name += f".{plain_name(method)}"
    fields["aiogpu_task"] = current.task
    fields["aiogpu_task_name"] = name
    fields["aiogpu_devices"] = [*chain(*current.accelerators.values())]
    return fields


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN and (type(value) is not int or abs(value) < 1 << 63)


def _plain(value: Any, depth: int) -> Any:
    """Return an attribute as plain values, or its `repr`."""
    if _is_plain(value):
        return value
    if depth < _DEEPEST:
        if isinstance(value, list | tuple):
            return [_plain(item, depth + 1) for item in value]
        if isinstance(value, dict):
            return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    return repr(value)


def handle_records() -> None:
    """Install the handler of the root logger, with the program's level."""
    level = sys._xoptions.get(LOG_LEVEL)
    number = int(level) if isinstance(level, str) else logging.WARNING
    root = logging.getLogger()
    root.setLevel(number)
    root.addHandler(RecordSender(number))
    if logging.lastResort is not None:
        logging.lastResort.setLevel(number)
