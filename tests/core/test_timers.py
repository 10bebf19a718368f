"""Alarms ring in order, and those that nobody needs do not pile up."""

from aiogpu.core.queue.timers import AT_ONCE, SWEPT, AlarmKind, Timers


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


def test_of_very_many_alarms_some_ring_in_the_next_go():
    timers = Timers()
    for subject in range(AT_ONCE + 2):
        timers.set(1.0, AlarmKind.EXPIRE, subject)
    assert subjects(timers, 5.0) == list(range(AT_ONCE))
    assert timers.earliest == 1.0
    assert subjects(timers, 5.0) == [AT_ONCE, AT_ONCE + 1]
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
    assert len(timers) < 60
    rung = subjects(timers, 60.0)
    assert set(rung) >= {98, 99, 5}
    assert rung == [*sorted(rung[:-1]), 5]
    assert timers.earliest is None


def test_a_few_needless_alarms_are_left_to_ring():
    timers = Timers()
    for subject in range(40):
        timers.set(60.0, AlarmKind.EXPIRE, subject)
        timers.note_stale(AlarmKind.EXPIRE, ())
    assert len(timers) == 40


def test_of_very_many_needless_alarms_each_step_sweeps_a_few():
    timers, alive = Timers(), CountedSet(range(10_000))
    for subject in alive:
        timers.set(60.0 + subject % 7, AlarmKind.EXPIRE, subject)
    most = 0
    for subject in range(9_900):
        alive.discard(subject)
        before, alive.looked_at = len(timers), 0
        timers.note_stale(AlarmKind.EXPIRE, alive)
        most = max(most, alive.looked_at)
        assert before - len(timers) <= SWEPT
    assert most == SWEPT
    assert len(timers) < 1_000


def test_alarms_ring_in_order_while_they_are_being_swept():
    timers, alive = Timers(), set(range(400))
    for subject in range(400):
        timers.set(float(subject), AlarmKind.EXPIRE, subject)
    for subject in range(1, 400, 3):
        alive.remove(subject)
        timers.note_stale(AlarmKind.EXPIRE, alive)
    for subject in range(2, 400, 3):
        alive.remove(subject)
        timers.note_stale(AlarmKind.EXPIRE, alive)
    assert 140 < len(timers) < 400
    timers.set(9.5, AlarmKind.STOP, 1)
    early = subjects(timers, 10.0)
    assert [subject for subject in early if subject in alive] == [0, 3, 6, 9]
    assert early[early.index(9) + 1] == 1
    assert timers.earliest is not None
    assert timers.earliest > 10
    late = subjects(timers, 400.0)
    assert timers.earliest is None
    assert late == sorted(late)
    assert set(late) >= {subject for subject in alive if subject > 10}


class CountedSet(set):
    """Counts how often somebody asks who is in it."""

    looked_at = 0

    def __contains__(self, subject):
        self.looked_at += 1
        return super().__contains__(subject)
