"""Actors that another process has made, as an engine of this one knows them."""

from __future__ import annotations

from aiogpu.client.function_spec import ActorTerms, Function, Site
from aiogpu.core.model.request import Request, Shape, TaskSpec
from aiogpu.wire.messages import SERIAL


def site_of(name: str, face: object = None) -> Site:
    """Return what is known of the class of such an actor.

    Args:
        name: how errors call it.
        face: what handles are made of, None where they have come.
    """
    spec = TaskSpec(name, Shape(Request()))
    terms = ActorTerms(SERIAL, {}, {}, face=face)
    return Site(0, Function(0, b""), spec, {}, {}, False, False, actor=terms)
