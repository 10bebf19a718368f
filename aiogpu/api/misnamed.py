"""What to say of a name that the package has not: mostly it is one of Ray's.

Not loaded before somebody asks for such a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

NAMES_OF_RAY: Final = MappingProxyType(
    {
        "ObjectRef": "`Handle` is what .remote() gives",
        "ObjectRefGenerator": "`Stream` is what .remote() of a generator gives",
        "actor": "`aiogpu.exit_actor()`, and `aiogpu.ActorHandle`",
        "cancel": "write `handle.cancel()`",
        "exceptions": "errors are at `aiogpu` itself, as `aiogpu.TaskError`",
        "is_initialized": "`aiogpu.init(ignore_reinit_error=True)` gives the loop's "
        "node, should it have one",
        "nodes": "write `await aiogpu.status()`",
        "timeline": "run `aiogpu timeline FILE`",
        "util": "`aiogpu.placement`, `aiogpu.ActorPool` and `aiogpu.accelerators` are "
        "what it has here",
    }
)
"""Of names that Ray's users look for, what there is."""


def no_such_name(name: str, known: Sequence[str]) -> AttributeError:
    """The error for an attribute that the package has not.

    Args:
        name: what was asked for.
        known: the names that there are.
    """
    hint = NAMES_OF_RAY.get(name, "")
    if not hint and not name.startswith("_"):
        from difflib import get_close_matches

        near = get_close_matches(name, known, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]!r}?" if near else ""
    told = f"module 'aiogpu' has no attribute {name!r}" + (f": {hint}" if hint else "")
    return AttributeError(told)
