"""A worker that is an actor: made once, then called until it is to end."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NoReturn

from aiogpu.client.current import current, method_called, services
from aiogpu.errors import SerializationError
from aiogpu.memory.control_page import ALL
from aiogpu.serialization.exceptions import STOPPED
from aiogpu.serialization.serializer import NONE_PAYLOAD
from aiogpu.wire.messages import (
    Create,
    Created,
    Done,
    Drop,
    Exit,
    Failed,
    Invoke,
    Leave,
    Message,
)
from aiogpu.worker.chunk import method_of
from aiogpu.worker.connection import Channel
from aiogpu.worker.execute import Executor, unsendable
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.nested import task_client
from aiogpu.worker.stdio import Stdio

if TYPE_CHECKING:
    from aiogpu.worker.zygote.import_tracker import Imports


_ENDS: Final = (Leave, Exit)


def dropped(call: int) -> Failed:
    """The answer to a call that was dropped before it began."""
    return Failed(call, STOPPED, "", "", "", None)


class ActorRuntime:
    """What an actor's calls need of their process, however they are run.

    Attributes:
        end_fork: ends this process, if the user's code has come back in a fork of it.
        client: asks the node in the name of its calls; None outside a worker.
    """

    def __init__(
        self,
        channel: Channel,
        interrupts: Interrupts,
        executor: Executor,
        stdio: Stdio,
        imports: Imports,
        end_fork: Callable[[], NoReturn],
    ) -> None:
        self.channel = channel
        self.interrupts = interrupts
        self.executor = executor
        self.end_fork = end_fork
        self.client = None if services.client is None else task_client()
        self._stdio = stdio
        self._imports = imports

    def perform(
        self, creation: Create, play: Callable[[ActorRuntime, object, Create], None]
    ) -> bool:
        """Be this actor until it is to end; False if it could not be made.

        Args:
            creation: the actor.
            play: serves its calls, in the way in which its mode asks.
        """
        current.actor = creation.task
        actor = self.executor.make(creation)
        if self.channel.is_closed:
            self.end_fork()
        self._stdio.end_lines()
        self.tell_rest()
        if isinstance(actor, Failed):
            self.channel.send(actor)
            return False
        self.channel.send(Created(creation.task))
        play(self, actor, creation)
        # Now, so that what it does is still bounded and still heard.
        del actor
        gc.collect()
        self._stdio.end_lines()
        if self.client is not None and self.client.shares.due:
            self.client.hand_over()
        self.channel.send(Done(creation.task, NONE_PAYLOAD, 0))
        return True

    def answer(self, answer: Done | Failed) -> None:
        """Send an answer after what was printed before it."""
        if self.channel.is_closed:
            self.end_fork()
        self._stdio.end_lines()
        try:
            self.channel.send(answer)
        except SerializationError as error:
            self.channel.send(unsendable(answer, error))
        self.tell_rest()

    def answer_all(self, answers: list[Done | Failed]) -> None:
        """Send answers together after what was printed before them."""
        self._stdio.end_lines()
        try:
            self.channel.send_all(answers)
        except SerializationError:
            for answer in answers:
                self.answer(answer)
        self.tell_rest()

    def tell_rest(self) -> None:
        """Say what was imported, and what is not needed any more."""
        if self._imports.found:
            self.channel.send(self._imports.take())
        if self.client is not None:
            self.client.tell_dropped()


class Methods(dict[str, Callable[..., Any]]):
    """The methods of an actor, bound to it when they are first called."""

    def __init__(self, actor: object) -> None:
        super().__init__()
        self._actor = actor

    def __missing__(self, name: str) -> Callable[..., Any]:
        method = method_of(self._actor, name)
        self[name] = method
        return method


class SerialActor:
    """Runs one call at a time in the main thread, where it can be interrupted."""

    def __init__(self, stage: ActorRuntime, actor: object) -> None:
        self._stage = stage
        self._channel = stage.channel
        self._interrupts = stage.interrupts
        self._methods = Methods(actor)
        self._dropped: set[int] = set()
        self._drops = 0

    def play(self) -> None:
        """Obey until it is to end."""
        stage, interrupts, methods = self._stage, self._interrupts, self._methods
        executor, client = stage.executor, stage.client
        while True:
            message = self._channel.next()
            if type(message) is Invoke:
                call = message.call
                interrupts.note_begun(call)
                if interrupts.drops != self._drops and not self._read_drops(call):
                    return
                if call in self._dropped:
                    self._dropped.discard(call)
                    self._channel.send(dropped(call))
                    continue
                method_called.set(message.method)
                answer = executor.call(_bound(methods, message), message)
                stage.answer(answer)
                # These hold what the driver is to be told of.
                del message, answer
                if client is not None and client.loans.are_used:
                    stage.tell_rest()
                if executor.has_left:
                    return
            elif type(message) is Drop:
                self._drops += 1
            elif message is None or type(message) in _ENDS:
                return

    def _read_drops(self, call: int) -> bool:
        """Read on until all calls are known that nobody wants any more.

        Args:
            call: the one whose turn it is; those before it were answered.

        Returns:
            Whether there is anything left to do.
        """
        while True:
            for drop in self._channel.take(Drop):
                assert isinstance(drop, Drop)
                self._drops += 1
                if drop.call >= call:
                    self._dropped.add(drop.call)
            drops = self._interrupts.drops
            if drops == ALL:
                return False
            if self._drops >= drops:
                return True
            if not self._channel.read():
                return False


def _bound(methods: Methods, message: Invoke) -> Callable[..., Any]:
    """The method, or what raises what the lookup has raised."""
    try:
        return methods[message.method]
    except BaseException as error:  # noqa: BLE001 - a property of the user's may raise
        caught = error

        def fail(*_args: object, **_kwargs: object) -> None:
            raise caught

        return fail


def is_end(message: Message | None) -> bool:
    """Return whether the actor is to end now, or the driver has gone."""
    return message is None or type(message) in _ENDS
