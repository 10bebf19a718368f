"""What is known of an actor's class without a process: its methods, its modes.

On a node of another process a name is looked up without waiting for the answer, since
that would block the event loop. Until it comes (`PendingInterface`), methods can be
called that give one result; `await handle` waits for the answer.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, Protocol, cast

from aiogpu.api.actor_options import INTERLEAVED, THREADS, ActorOptions
from aiogpu.api.definition import Parameters, signature_of
from aiogpu.api.method import (
    Link,
    Method,
    RemoteMethod,
    methods_of,
    mode_of,
    remote_method,
)
from aiogpu.errors import MisuseError, OptionError
from aiogpu.serialization.serializer import load_result
from aiogpu.wire.messages import ASYNC, DEFAULT_GROUP
from aiogpu.worker.chunk import CHUNKED, IN_GROUP

if TYPE_CHECKING:
    from aiogpu.api.handle import Handle
    from aiogpu.client.function_spec import ActorTerms


def stranger(name: str) -> MisuseError:
    """The error for a handle to an actor that is none of this node's."""
    return MisuseError(
        f"the handle of {name} belongs to another node, or to one that was closed. "
        f"Give tasks an actor of this node, as an argument: a function that uses a "
        f"handle of the program's keeps the one that it had at its first .remote()."
    )


class ActorInterface:
    """What is known of a class without a process: its methods and their options.

    Attributes:
        name: of the class.
        methods: those that may be called, by name.
        parameters: of the constructor.
        group_names: the concurrency groups that the class's options name.
    """

    def __init__(self, cls: type) -> None:
        self.name = cls.__name__
        self.group_names: tuple[str, ...] = ()
        self.methods = methods_of(cls)
        self.parameters = Parameters(self.name, signature_of(cls))

    def with_groups(self, options: ActorOptions) -> ActorInterface:
        """Return this description for a class with these concurrency groups."""
        names = tuple(options.concurrency_groups)
        if names == self.group_names:
            return self
        found = copy(self)
        found.group_names = names
        return found

    @property
    def known(self) -> ActorInterface:
        """Itself; see `late_face.LateFace`."""
        return self

    def limits(self, options: ActorOptions) -> tuple[str, dict[str, int]]:
        """How calls are run, and how many of each group at once."""
        groups = options.concurrency_groups
        mode = mode_of(self.methods, options.max_concurrency, groups)
        usual = INTERLEAVED if mode == ASYNC else THREADS
        return mode, {DEFAULT_GROUP: options.max_concurrency or usual, **groups}

    def windows(self) -> dict[str, int]:
        """Of each method that is a generator, how many items it may be ahead."""
        found = {
            name: method.window
            for name, method in self.methods.items()
            if method.window
        }
        # A call may name another group than its method's.
        return found | {
            f"{name}{IN_GROUP}{group}": window
            for name, window in found.items()
            for group in self.group_names
        }

    def groups(self, options: ActorOptions) -> dict[str, str]:
        """The group of each method that has one, by the name that a call says.

        Raises:
            OptionError: the class has no such group.
        """
        named = {
            name: method.group
            for name, method in self.methods.items()
            if method.group != DEFAULT_GROUP
        }
        for name, group in named.items():
            if group not in options.concurrency_groups:
                there = ", ".join(options.concurrency_groups) or "none"
                raise OptionError(
                    f"{self.name}.{name} is in the concurrency group {group!r}; its "
                    f"class names {there}. Say "
                    f"@aiogpu.remote(concurrency_groups={{{group!r}: 2}})."
                )
        # One call may name another group than its method's.
        named |= {
            f"{name}{IN_GROUP}{group}": group
            for name in self.methods
            for group in options.concurrency_groups
        }
        # A chunk of a map is a call of its own name.
        return named | {name + CHUNKED: group for name, group in named.items()}


def no_method(face: ActorInterface, name: str) -> AttributeError:
    """The error for a method that a class has not, or that is private."""
    from difflib import get_close_matches

    if name.startswith("_"):
        return AttributeError(
            f"{name} of {face.name} is private: actors are called by public methods."
        )
    near = get_close_matches(name, face.methods, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return AttributeError(
        f"{face.name} has no method {name}.{hint} There are: "
        f"{', '.join(face.methods) or 'none'}."
    )


def face_in(terms: ActorTerms) -> ActorInterface:
    """Return what handles are made of; it comes pickled from another process's class.

    Raises:
        DeserializationError: what it refers to cannot be imported here.
    """
    face = terms.face
    return cast("ActorInterface", load_result(face) if type(face) is bytes else face)


class PendingLink(Link, Protocol):
    """The link to an actor that its node has yet to find."""

    def call_late(self, label: str, method: str, payload: bytes) -> Handle[Any]:
        """Call a method that the class may have, once the node has answered."""
        ...


class PendingInterface:
    """Stands for a `ActorInterface` until that is known.

    Attributes:
        name: how errors call the actor.
        known: the class's true face; None until the node has answered.
    """

    def __init__(self, name: str, own: ActorInterface | None = None) -> None:
        """Prepare for the answer.

        Args:
            name: how errors call the actor.
            own: the class that is made if there is no actor of that name.
        """
        self.name = name
        self.known: ActorInterface | None = None
        self._own = own

    @property
    def methods(self) -> dict[str, Method]:
        """Those that are known."""
        face = self.known or self._own
        return {} if face is None else face.methods

    def method(self, link: Link, name: str) -> RemoteMethod[..., Any]:
        """Return what a handle has under a name, while the class is not known."""
        if self._own is not None:
            found = self._own.methods.get(name)
            if found is None:
                raise no_method(self._own, name)
            return remote_method(link, found, self._own.group_names)
        if name.startswith("_"):
            raise AttributeError(f"{self.name} has no public method {name}.")
        return LateMethod(cast("PendingLink", link), name, self)

    def problem(self, name: str) -> Exception | None:
        """Return why a call that was made before the answer cannot be carried out."""
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

    def __init__(self, link: PendingLink, name: str, face: PendingInterface) -> None:
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
