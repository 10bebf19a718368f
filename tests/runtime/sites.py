"""Sites and calls for the runtime's tests; nothing in them is ever run."""

from __future__ import annotations

from aiogpu.client.function_spec import Function, Site, new_function_id, new_site_id
from aiogpu.core.model.request import Request, Shape, TaskSpec
from aiogpu.core.model.units import UNIT
from aiogpu.runtime.pending_tasks import Call


def function() -> Function:
    return Function(new_function_id(), b"pickled")


def site(
    function_: Function | None = None,
) -> Site:
    request = Request.of({"CPU": UNIT}, {})
    spec = TaskSpec("train", Shape(request))
    known = function_ or function()
    return Site(new_site_id(), known, spec, request.as_numbers(), {}, False)


def call(site_: Site | None = None) -> Call:
    return Call(site_ or site(), b"arguments", None)
