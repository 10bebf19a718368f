"""Sites and calls for the runtime's tests; nothing in them is ever run."""

from __future__ import annotations

from aiogpu.client.function_spec import (
    Function,
    FunctionSpec,
    new_func_id,
    new_function_id,
)
from aiogpu.core.model.request import Request, Shape, TaskSpec
from aiogpu.core.model.units import UNIT
from aiogpu.runtime.pending_tasks import Call


def function() -> Function:
    return Function(new_function_id(), b"pickled")


def func(
    function_: Function | None = None,
) -> FunctionSpec:
    request = Request.of({"CPU": UNIT}, {})
    spec = TaskSpec("train", Shape(request))
    known = function_ or function()
    return FunctionSpec(new_func_id(), known, spec, request.as_numbers(), {}, False)


def call(site_: FunctionSpec | None = None) -> Call:
    return Call(site_ or func(), b"arguments", None)
