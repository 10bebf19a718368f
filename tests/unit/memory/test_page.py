"""The control page: five words a slot, seen by every process that maps it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from aiogpu.memory.control_page import PAGE_SIZE, SLOTS, ControlPage


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = ControlPage.create()
    yield descriptor
    os.close(descriptor)


def test_a_fresh_page_asks_for_nothing(descriptor: int) -> None:
    page = ControlPage.open(descriptor)
    assert os.fstat(descriptor).st_size == PAGE_SIZE
    assert {page.asked(slot) for slot in range(SLOTS)} == {0}
    assert {page.heard(slot) for slot in range(SLOTS)} == {0}
    assert {page.begun(slot) for slot in range(SLOTS)} == {0}
    assert {page.revoked(slot) for slot in range(SLOTS)} == {0}
    page.close()


def test_each_slot_has_words_of_its_own(descriptor: int) -> None:
    page = ControlPage.open(descriptor)
    page.ask(0, 7)
    page.hear(0, 6)
    page.begin(0, 5)
    page.revoke(0, 4)
    for write in (page.ask, page.hear, page.begin, page.revoke):
        write(SLOTS - 1, 2**64 - 1)
    words = (page.asked, page.heard, page.begun, page.revoked)
    assert [read(0) for read in words] == [7, 6, 5, 4]
    assert [read(1) for read in words] == [0, 0, 0, 0]
    assert [read(SLOTS - 1) for read in words] == [2**64 - 1] * 4
    with pytest.raises(IndexError):
        page.ask(SLOTS, 1)
    with pytest.raises(IndexError):
        page.revoke(SLOTS, 1)
    page.close()


def test_what_is_left_for_values_is_plenty_until_somebody_counts(
    descriptor: int,
) -> None:
    driver, worker = ControlPage.open(descriptor), ControlPage.open(descriptor)
    assert worker.left() > 1 << 60
    for left in (0, 5, 1 << 40):
        driver.note_left(left)
        assert worker.left() == left
    driver.close()
    worker.close()


def test_two_mappings_share_their_words(descriptor: int) -> None:
    driver, worker = ControlPage.open(descriptor), ControlPage.open(descriptor)
    driver.ask(3, 11)
    assert worker.asked(3) == 11
    worker.hear(3, 11)
    assert driver.heard(3) == 11
    worker.close()
    assert driver.heard(3) == 11
    driver.close()


def test_a_fork_shares_them_too(descriptor: int) -> None:
    page = ControlPage.open(descriptor)
    pid = os.fork()
    if pid == 0:
        page.hear(5, 42)
        os._exit(0)
    os.waitpid(pid, 0)
    assert page.heard(5) == 42
    page.close()


def test_the_descriptor_is_not_inherited_by_programs(descriptor: int) -> None:
    assert not os.get_inheritable(descriptor)
    assert "aiogpu-page" in os.readlink(f"/proc/self/fd/{descriptor}")
