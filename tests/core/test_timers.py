"""Alarms ring in order, and those that nobody needs do not pile up."""

from aiogpu.core.timers import AlarmKind, Timers


def subjects(timers: Timers, now: float) -> list[int]:
    """Whom the alarms concern that ring now."""
    return [alarm.subject for alarm in timers.due(now)]


def test_alarms_ring_in_order_of_time_and_of_setting():
    timers = Timers()
    timers.set(2.0, AlarmKind.STOP, 1)
    timers.set(1.0, AlarmKind.END, 2)
    timers.set(2.0, AlarmKind.EXPIRE, 3)
    assert timers.earliest == 1.0
    assert subjects(timers, 0.9) == []
    assert subjects(timers, 1.0) == [2]
    assert timers.earliest == 2.0
    assert subjects(timers, 9.0) == [1, 3]
    assert timers.earliest is None


def test_an_alarm_set_while_others_ring_waits_for_its_own_time():
    timers = Timers()
    timers.set(1.0, AlarmKind.STOP, 1)
    for alarm in timers.due(1.0):
        timers.set(alarm.when + 0.5, alarm.kind, alarm.subject)
    assert timers.earliest == 1.5


def test_alarms_of_subjects_that_have_gone_are_swept():
    timers = Timers()
    for subject in range(100):
        timers.set(60.0, AlarmKind.EXPIRE, subject)
    timers.set(60.0, AlarmKind.STOP, 5)
    alive = set(range(100))
    for subject in range(98):
        alive.remove(subject)
        timers.note_stale(AlarmKind.EXPIRE, alive)
    assert len(timers) < 50
    assert subjects(timers, 60.0)[-3:] == [98, 99, 5]


def test_a_few_needless_alarms_are_left_to_ring():
    timers = Timers()
    for subject in range(40):
        timers.set(60.0, AlarmKind.EXPIRE, subject)
        timers.note_stale(AlarmKind.EXPIRE, ())
    assert len(timers) == 40
