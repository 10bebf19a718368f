"""The methods of an actor whose class the node has yet to tell.

On a node of another process a name is looked up without waiting for the answer, since
that would block the event loop. Until it comes, methods can be called that give one
result; `await handle` waits for the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from aiogpu.api.face import Face, no_method
from aiogpu.api.generator_method import remote_method
from aiogpu.api.method import Link, Method, RemoteMethod
from aiogpu.errors import MisuseError

if TYPE_CHECKING:
    from aiogpu.api.actor_link import ActorLink
    from aiogpu.api.handle import Handle


class LateFace:
    """Stands for a `Face` until that is known.

    Attributes:
        name: how errors call the actor.
        known: the class's true face; None until the node has answered.
    """

    def __init__(self, name: str, own: Face | None = None) -> None:
        """Prepare for the answer.

        Args:
            name: how errors call the actor.
            own: the class that is made if there is no actor of that name.
        """
        self.name = name
        self.known: Face | None = None
        self._own = own

    @property
    def methods(self) -> dict[str, Method]:
        """Those that are known."""
        face = self.known or self._own
        return {} if face is None else face.methods

    def method(self, link: Link, name: str) -> RemoteMethod[..., Any]:
        """What a handle has under a name, while the class is not known."""
        if self._own is not None:
            found = self._own.methods.get(name)
            if found is None:
                raise no_method(self._own, name)
            return remote_method(link, found, self._own.group_names)
        if name.startswith("_"):
            raise AttributeError(f"{self.name} has no public method {name}.")
        return LateMethod(cast("ActorLink", link), name, self)

    def problem(self, name: str) -> Exception | None:
        """Why a call that was made before the answer cannot be carried out."""
        face = self.known
        assert face is not None, self
        method = face.methods.get(name)
        if method is None:
            return no_method(face, name)
        if method.window or method.returns:
            what = "is a generator" if method.window else "has several results"
            return MisuseError(
                f"{method.label} {what}, which was not known yet when it was called: "
                f"the node had not answered. Await the handle first: `actor = await "
                f"aiogpu.get_actor(...)`."
            )
        return None


class LateMethod(RemoteMethod[..., Any]):
    """A method that the class may have, or may not."""

    __slots__ = ("_face", "_late_link")

    def __init__(self, link: ActorLink, name: str, face: LateFace) -> None:
        super().__init__(link, Method(face.name, name, None), ())
        self._late_link = link
        self._face = face

    def _true(self) -> RemoteMethod[..., Any] | None:
        """The method itself, once the class is known."""
        face = self._face.known
        if face is None:
            return None
        found = face.methods.get(self._method.name)
        if found is None:
            raise no_method(face, self._method.name)
        link: Link = self._late_link
        return remote_method(link, found, face.group_names)

    def remote(self, *args: Any, **kwargs: Any) -> Handle[Any]:
        """Call it; a call that the class cannot serve fails when that is known."""
        method, true = self._method, self._true()
        if true is not None:
            return true.remote(*args, **kwargs)
        payload = method.pack(args, kwargs)
        return self._late_link.call_late(method.label, method.name, payload)

    def _remote_chunk(self, arguments: tuple[Any, ...]) -> Handle[Any]:
        true = self._true()
        if true is None:
            raise MisuseError(
                f"{self._method.label}.map() with chunk= needs to know the method, and "
                f"the node has not answered yet. Await the handle first: `actor = "
                f"await aiogpu.get_actor(...)`."
            )
        return true._remote_chunk(arguments)
