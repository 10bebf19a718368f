"""When a device is sick and when it is well again: the rule, on plain data."""

from __future__ import annotations

import pytest

from aiogpu.accelerators.base import Health, Sample
from aiogpu.runtime.devices.monitor import CALM, DeviceHealth

FINE = Sample({}, used=0)
LOST = Sample(problem="GPU is lost", is_lost=True)
MUTE = Sample(problem="Unknown Error")
CONTENT, SILENT = Health(action=""), Health()
XID = Health(("XID 79",), action="")
RESET = Health(action="GPU reset")
OLD_XID = Health(("XID 79",))


class Story:
    """One device's health, told in order; a look each second."""

    def __init__(self) -> None:
        self.health = DeviceHealth()
        self.now = 100.0

    def sees(self, health: Health, sample: Sample = FINE) -> str | None:
        """One look; gives the reason, having asserted that changes are told."""
        before = self.health.reason
        is_told = self.health.note(sample, health, self.now)
        assert is_told == (self.health.reason != before)
        self.now += 1.0
        return self.health.reason

    def seconds_until_well(self, health: Health, sample: Sample = FINE) -> int | None:
        """How often it must be said until the device is well, None for never."""
        for count in range(1, 10 * int(CALM)):
            if self.sees(health, sample) is None:
                return count
        return None


@pytest.mark.parametrize("health", [CONTENT, SILENT])
def test_a_well_device_stays_well(health: Health) -> None:
    story = Story()
    assert story.sees(health) is None
    assert story.sees(health, MUTE) is None, "a driver that fails tells nothing bad"


@pytest.mark.parametrize(
    ("health", "sample", "reason"),
    [
        (XID, FINE, "XID 79"),
        (OLD_XID, FINE, "XID 79"),
        (RESET, FINE, "the driver asks for this: GPU reset"),
        (SILENT, LOST, "the driver calls it lost"),
        (Health(is_lost=True), FINE, "the driver calls it lost"),
        (
            Health(("XID 79", "XID 48"), "node reboot"),
            FINE,
            "XID 79; XID 48; the driver asks for this: node reboot",
        ),
    ],
)
def test_each_bad_word_makes_it_sick(
    health: Health, sample: Sample, reason: str
) -> None:
    story = Story()
    assert story.sees(health, sample) == reason
    assert story.sees(health, sample) == reason, "and is told once"


@pytest.mark.parametrize("bad", [XID, RESET])
def test_it_is_well_when_the_driver_has_been_content_for_a_while(bad: Health) -> None:
    story = Story()
    story.sees(bad)
    assert story.seconds_until_well(CONTENT) == CALM


def test_a_further_error_begins_the_wait_anew() -> None:
    story = Story()
    story.sees(XID)
    for _ in range(5):
        story.sees(CONTENT)
    assert story.sees(Health(("XID 79", "XID 63"), "")) == "XID 79; XID 63"
    assert story.seconds_until_well(CONTENT) == CALM


def test_a_device_that_does_not_answer_is_not_well() -> None:
    story = Story()
    story.sees(XID)
    assert story.seconds_until_well(CONTENT, MUTE) is None
    assert story.seconds_until_well(CONTENT) == CALM


def test_a_driver_that_cannot_tell_is_not_believed_to_be_content() -> None:
    story = Story()
    story.sees(OLD_XID)
    assert story.seconds_until_well(SILENT) is None
    story.sees(SILENT, LOST)
    assert story.health.reason == "the driver calls it lost; XID 79"
    assert story.seconds_until_well(SILENT) == CALM, "it was reset"


def test_what_has_to_be_done_is_not_forgotten_when_the_driver_falls_silent() -> None:
    story = Story()
    story.sees(RESET)
    assert story.seconds_until_well(SILENT) is None
    story.sees(SILENT, LOST)
    assert story.seconds_until_well(SILENT) == CALM


def test_a_device_that_was_only_lost_is_well_once_it_answers() -> None:
    story = Story()
    story.sees(SILENT, LOST)
    assert story.seconds_until_well(SILENT) == CALM


def test_a_well_device_forgets_what_it_was_sick_of() -> None:
    story = Story()
    story.sees(XID)
    story.seconds_until_well(CONTENT)
    assert story.sees(Health(("XID 48",), "")) == "XID 48"


def test_of_many_errors_the_first_are_named() -> None:
    story = Story()
    errors = tuple(f"XID {number}" for number in range(9))
    told = "XID 0; XID 1; XID 2; XID 3; other errors"
    assert story.sees(Health(errors, "")) == told
    assert repr(story.health) == f"<DeviceHealth {told}>"
