"""The interrupt: only in the named task's user code, and at no bad moment."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import FrameType, ModuleType

import pytest

from aiogpu.memory.control_page import BEGUN, TOO_LATE, VOID, ControlPage
from aiogpu.worker.interrupts import Interrupts


def interrupt() -> None:
    """Runs the handler at once, in this frame."""
    signal.raise_signal(signal.SIGINT)


def own() -> str:
    """Stands for a frame of the worker's own."""
    signal.raise_signal(signal.SIGINT)
    return "to its end"


def own_around_user_code() -> None:
    interrupt()


def test_the_named_task_is_interrupted(
    page: ControlPage, interrupts: Interrupts
) -> None:
    page.ask(3, 7)
    interrupts.entered = 7
    assert interrupts.is_asked(7)
    with pytest.raises(KeyboardInterrupt, match="task 7 was cancelled"):
        interrupt()
    assert page.heard(3) == 7


def test_what_ends_its_code_is_not_cut_short(
    page: ControlPage, interrupts: Interrupts
) -> None:
    page.ask(3, 7)
    interrupts.entered = 7
    steps = []

    def user_code() -> None:
        try:
            interrupt()
        finally:
            interrupt()  # sent before the driver saw that the first was heard
            steps.append("to its end")

    with pytest.raises(KeyboardInterrupt):
        user_code()
    assert steps == ["to its end"]
    page.ask(3, 8)
    interrupts.entered = 8
    with pytest.raises(KeyboardInterrupt, match="task 8"):
        interrupt()


@pytest.mark.parametrize(
    ("asked", "entered", "slot"),
    [(7, 0, 3), (7, 8, 3), (0, 7, 3), (0, 0, 3), (7, 7, 2)],
)
def test_nothing_else_is(
    asked: int, entered: int, slot: int, page: ControlPage, interrupts: Interrupts
) -> None:
    page.ask(slot, asked)
    interrupts.entered = entered
    interrupt()
    assert page.heard(3) == 0


def test_own_frames_are_left_alone(page: ControlPage, interrupts: Interrupts) -> None:
    interrupts.spare(own.__code__, own_around_user_code.__code__)
    page.ask(3, 7)
    interrupts.entered = 7
    assert own() == "to its end"
    assert page.heard(3) == 0, "the driver will ask again"
    with pytest.raises(KeyboardInterrupt):
        own_around_user_code()


def test_a_shield_puts_it_off(page: ControlPage, interrupts: Interrupts) -> None:
    page.ask(3, 7)
    interrupts.entered = 7
    steps = []

    def shielded() -> None:
        with interrupts.shielded():
            interrupt()
            interrupt()
            steps.append("still here")
            assert page.heard(3) == 0

    with pytest.raises(KeyboardInterrupt):
        shielded()
    assert steps == ["still here"]
    assert page.heard(3) == 7
    with interrupts.shielded():
        steps.append("no more pending")
    assert len(steps) == 2


def test_a_shield_in_another_keeps_it_whole(
    page: ControlPage, interrupts: Interrupts
) -> None:
    page.ask(3, 7)
    interrupts.entered = 7
    steps = []

    def shielded() -> None:
        with interrupts.shielded():
            with interrupts.if_open():
                interrupt()
            interrupt()
            steps.append("still here")

    with pytest.raises(KeyboardInterrupt):
        shielded()
    assert steps == ["still here"]
    assert not interrupts.is_shielded


def test_what_goes_on_for_long_under_a_shield_looks_itself(
    page: ControlPage, interrupts: Interrupts
) -> None:
    page.ask(3, 7)
    interrupts.entered = 7
    steps = []

    def shielded() -> None:
        with interrupts.shielded():
            interrupts.catch_up()
            interrupt()
            in_a_thread(interrupts.catch_up)
            steps.append("one of two")
            interrupts.catch_up()
            steps.append("two of two")

    with pytest.raises(KeyboardInterrupt):
        shielded()
    assert steps == ["one of two"]
    assert not interrupts.is_shielded


def in_a_thread(work: Callable[[], object]) -> None:
    thread = Thread(target=work)
    thread.start()
    thread.join()


def test_what_was_put_off_is_softened_too(
    page: ControlPage, interrupts: Interrupts
) -> None:
    """As where a coroutine's loop reads the driver's socket."""
    page.ask(3, 7)
    interrupts.entered = 7
    asked: list[FrameType] = []

    def soften(frame: FrameType) -> bool:
        asked.append(frame)
        return True

    interrupts.soften = soften
    with interrupts.shielded():
        interrupt()
        assert not asked
    assert [frame.f_code.co_name for frame in asked] == [
        "test_what_was_put_off_is_softened_too"
    ]
    assert page.heard(3) == 0, "who softens it has it heard"


def test_an_error_under_a_shield_goes_with_it(
    page: ControlPage, interrupts: Interrupts
) -> None:
    interrupts.entered = 7
    with pytest.raises(BrokenPipeError), interrupts.shielded():
        raise BrokenPipeError
    page.ask(3, 7)

    def interrupted_and_failing() -> None:
        with interrupts.shielded():
            interrupt()
            raise BrokenPipeError

    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted_and_failing()
    assert isinstance(caught.value.__context__, BrokenPipeError)
    page.ask(3, 8)
    interrupts.entered = 8
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_a_blocked_signal_is_let_through_again(interrupts: Interrupts) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    interrupts.attend(3)
    interrupts.install()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_handler_that_a_task_has_changed_is_put_back(
    page: ControlPage, interrupts: Interrupts
) -> None:
    rehearsed = Interrupts(page)
    interrupts.install()
    handler = signal.getsignal(signal.SIGINT)
    rehearsed.restore()
    assert signal.getsignal(signal.SIGINT) is handler, "it was never installed"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.restore()
    assert signal.getsignal(signal.SIGINT) is handler


def test_what_was_sent_may_begin(page: ControlPage, interrupts: Interrupts) -> None:
    page.revoke(3, 7)
    page.revoke(2, 100)
    assert interrupts.begin(7) == BEGUN
    assert interrupts.begin(8) == BEGUN
    assert page.begun(3) == 8


def test_what_is_revoked_does_not_begin(
    page: ControlPage, interrupts: Interrupts
) -> None:
    assert interrupts.begin(5) == BEGUN
    page.revoke(3, 8)
    for number in (6, 7):
        assert interrupts.begin(number) == VOID
    assert page.begun(3) == 5, "the driver sees that none has begun"
    assert interrupts.begin(8) == BEGUN


class Racing(dict[int, int]):
    """Words of a page on which the driver revokes just when the worker begins."""

    def __setitem__(self, word: int, value: int) -> None:
        super().__setitem__(word, value)
        super().__setitem__(word + 1, value + 1)


def test_both_may_come_in_the_same_moment(
    page: ControlPage, interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = Racing.fromkeys(range(4 * 5), 0)
    monkeypatch.setattr(page, "_words", words)
    assert interrupts.begin(5) == TOO_LATE
    assert page.begun(3) == 5, "the driver may have read that it had begun"


def test_what_was_put_off_means_its_own_task(
    page: ControlPage, interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes again amid the shield's end, and is raised there: it is not put off."""
    page.ask(3, 7)
    interrupts.entered = 7
    with monkeypatch.context() as patch:
        patch.setattr(interrupts._shield, "_catch_up", lambda _frame: interrupt())
        with pytest.raises(KeyboardInterrupt), interrupts.shielded():
            interrupt()
    assert page.heard(3) == 7
    interrupts.entered = 8
    with interrupts.shielded():
        pass
    assert page.heard(3) == 7


@pytest.mark.parametrize("name", ["interrupt", "interrupt_under_a_shield"])
def test_an_import_is_not_broken_off(
    name: str,
    page: ControlPage,
    interrupts: Interrupts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is one that prints, which is done under a shield."""

    def interrupt_under_a_shield() -> None:
        with interrupts.shielded():
            interrupt()

    monkeypatch.setitem(sys.modules, "of_this_test", ModuleType("of_this_test"))
    is_plain = name == "interrupt"
    sys.modules["of_this_test"].interrupt = (  # type: ignore[attr-defined]
        interrupt if is_plain else interrupt_under_a_shield
    )
    body = "import of_this_test; of_this_test.interrupt(); is_whole = True"
    (tmp_path / "module_under_interrupt.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "module_under_interrupt", raising=False)
    page.ask(3, 7)
    interrupts.entered = 7
    module = importlib.import_module("module_under_interrupt")
    assert module.is_whole
    assert page.heard(3) == 0, "the driver will ask again"
    with pytest.raises(KeyboardInterrupt):
        interrupt()
