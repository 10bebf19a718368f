"""Children between their parent's worker and the driver."""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from aiogpu.client.function_spec import FunctionSpec
from aiogpu.client.interface import Receiver
from aiogpu.client.spec_codec import dump_spec
from aiogpu.errors import AiogpuError, InfeasibleError, InternalError
from aiogpu.runtime.callers.requests import Requests
from aiogpu.runtime.workers.slots import LiveWorker
from aiogpu.wire.messages import (
    ChildDone,
    ChildFailed,
    Declare,
    Failed,
    Message,
    Submit,
    Wait,
    Withdraw,
)
from tests.unit.runtime import funcs
from tests.unit.runtime.paper import PaperPeer


class PaperDriver:
    """Notes what it is asked; tasks end when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.receivers: dict[int, Receiver] = {}
        self.funcs: list[FunctionSpec] = []
        self.ends_at_once = False
        self.actors = SimpleNamespace()
        self.scheduler = SimpleNamespace(clients=None)

    def submit(
        self,
        func: FunctionSpec,
        payload: bytes,
        receiver: Receiver,
        parent: int,
        _client: int = 0,
    ) -> int:
        task = 100 + len(self.funcs)
        self.funcs.append(func)
        self.asked.append(("submit", payload, parent))
        if self.ends_at_once:
            receiver.settle(InfeasibleError("at once"))
        else:
            self.receivers[task] = receiver
        return task

    def knows(self, task: int) -> bool:
        return task in self.receivers

    def cancel(self, task: int) -> None:
        self.asked.append(("cancel", task))

    def wait(
        self, task: int, children: tuple[int, ...], is_elsewhere: bool = False
    ) -> None:
        assert not is_elsewhere
        self.asked.append(("wait", task, children))

    def receiver_of(self, task: int) -> Receiver | None:
        return self.receivers.get(task)


class PaperStore:
    """Has lent nothing to anybody."""


class House:
    """A nest between a paper driver and workers with paper peers."""

    def __init__(self) -> None:
        self.driver = PaperDriver()
        self.refusal: AiogpuError | None = None
        self.driver.actors.check = self.check
        self.nested = Requests(self.driver, PaperStore())  # type: ignore[arg-type]

    def check(self, _func: FunctionSpec, _payload: bytes) -> None:
        if self.refusal is not None:
            raise self.refusal

    def worker(self, number: int = 1) -> tuple[LiveWorker, PaperPeer]:
        worker, peer = LiveWorker(number, None, None), PaperPeer()  # type: ignore[arg-type]
        worker.peer = peer  # type: ignore[assignment]
        return worker, peer

    def hear(self, worker: LiveWorker, *said: Message) -> None:
        for message in said:
            self.nested.on_message(worker, message)


@pytest.fixture
def house() -> House:
    return House()


def declaration(
    func: int = 7, payload: bytes = b"function", priority: int = 0, **changed: Any
) -> Declare:
    told = replace(funcs.func(), **changed)
    told = replace(told, spec=replace(told.spec, priority=priority))
    return Declare(func, told.spec.name, dump_spec(told), payload)


def error_in(failed: Message) -> Exception:
    assert isinstance(failed, ChildFailed)
    assert failed.payload is not None
    error: Exception = pickle.loads(failed.payload)
    return error


def test_a_result_goes_back_as_bytes(house: House) -> None:
    worker, peer = house.worker()
    house.hear(worker, declaration(), Submit(3, 1, 7, b"args"))
    assert house.driver.asked == [("submit", b"args", 3)]
    assert worker.children == {1: 100}
    house.driver.receivers[100].settle(b"result")
    assert peer.sent == [ChildDone(1, b"result")]
    assert worker.children == {}


def test_a_failure_goes_back_as_it_is(house: House) -> None:
    worker, peer = house.worker()
    house.hear(worker, declaration(), Submit(3, 1, 7, b""), Submit(3, 2, 7, b""))
    failed = Failed(100, "raised", "KeyError", "1", "trace", b"pickle")
    house.driver.receivers[100].settle(failed)
    house.driver.receivers[101].settle(InfeasibleError("too much"))
    first, second = peer.sent
    assert first == ChildFailed(1, *failed.why)
    assert repr(error_in(second)) == "InfeasibleError('too much')"
    assert worker.children == {}


def test_a_child_that_ends_at_once_is_not_remembered(house: House) -> None:
    worker, peer = house.worker()
    house.driver.ends_at_once = True
    house.hear(worker, declaration(), Submit(3, 1, 7, b""))
    assert worker.children == {}
    assert repr(error_in(peer.sent[0])) == "InfeasibleError('at once')"


def test_a_parent_that_has_gone_hears_nothing(house: House) -> None:
    worker, peer = house.worker()
    house.hear(worker, declaration(), Submit(3, 1, 7, b""))
    worker.peer = None
    house.driver.receivers[100].settle(b"result")
    assert peer.sent == []


def test_waits_name_tasks_of_the_node(house: House) -> None:
    worker, _ = house.worker()
    house.hear(worker, declaration())
    house.hear(worker, *(Submit(3, child, 7, b"") for child in (1, 2, 3)))
    house.driver.receivers.pop(101).settle(b"")
    house.driver.asked.clear()
    house.hear(worker, Wait(3, (1, 2, 3, 9)), Wait(3, ()))
    assert house.driver.asked == [("wait", 3, (100, 102)), ("wait", 3, ())]


def test_a_child_is_withdrawn_once(house: House) -> None:
    worker, _ = house.worker()
    house.hear(worker, declaration(), Submit(3, 1, 7, b""))
    house.driver.asked.clear()
    house.hear(worker, Withdraw(3, 1), Withdraw(3, 1), Withdraw(3, 8))
    assert house.driver.asked == [("cancel", 100)]


def test_what_two_workers_declare_alike_is_one_site(house: House) -> None:
    """So that `max_calls`, what is sent, and how long it takes are known of all."""
    (one, _), (two, _) = house.worker(1), house.worker(2)
    house.hear(one, declaration(7), declaration(8), Submit(3, 1, 7, b""))
    house.hear(one, Submit(3, 2, 8, b""))
    house.hear(two, declaration(9), Submit(4, 1, 9, b""))
    assert len(set(map(id, house.driver.funcs))) == 1
    house.hear(two, declaration(10, priority=5), Submit(4, 2, 10, b""))
    house.hear(two, declaration(11, b"other"), Submit(4, 3, 11, b""))
    *_, urgent, other = house.driver.funcs
    assert urgent.function is house.driver.funcs[0].function
    assert urgent.spec.priority == 5
    assert other.function.payload == b"other"
    assert len({func.id for func in house.driver.funcs}) == 3


def test_what_can_never_run_is_told_at_each_call(house: House) -> None:
    worker, peer = house.worker()
    house.refusal = InfeasibleError("it lacks GPU")
    house.hear(worker, declaration(), Submit(3, 1, 7, b""), Submit(3, 2, 7, b""))
    assert house.driver.asked == []
    errors = [repr(error_in(one)) for one in peer.sent]
    assert errors == ["InfeasibleError('it lacks GPU')"] * 2
    assert [one.child for one in peer.sent if isinstance(one, ChildFailed)] == [1, 2]


def test_a_retry_class_is_not_looked_at(house: House) -> None:
    worker, peer = house.worker()
    unloadable = b"cno_such_module\nNoError\n."
    house.hear(worker, declaration(retried=unloadable), Submit(3, 1, 7, b""))
    assert peer.sent == []
    (func,) = worker.declared.values()
    assert isinstance(func, FunctionSpec)
    assert func.retried == unloadable


def test_what_was_never_declared_is_told(house: House) -> None:
    worker, peer = house.worker()
    house.hear(worker, Submit(3, 1, 7, b""))
    assert isinstance(error_in(peer.sent[0]), InternalError)


def test_only_so_much_is_remembered(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiogpu.runtime.callers.requests.KEPT", 4)
    worker, peer = house.worker()
    for func in range(1, 20):
        house.hear(worker, declaration(func, b"%d" % func), Submit(3, func, func, b""))
        house.hear(worker, declaration(1, b"1"))
        house.hear(worker, Submit(3, 100 + func, 1, b""))
    assert peer.sent == [], "what was declared last is known"
    assert len(worker.declared) == 4
    assert len(house.nested._functions) + len(house.nested._funcs) < 12
