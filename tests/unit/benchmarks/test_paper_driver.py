"""What drives aiogpu's scheduler on paper does what its effects say."""

import pytest

from aiogpu.core.effects import Ahead, Kill, Revoke
from aiogpu.core.scheduler.scheduler import Scheduler
from benchmarks.environments.aiogpu_paper import TOOK, AiogpuPaper
from benchmarks.port import Need

QUARTER = Need(num_gpus=0.25)


def drain(paper):
    """Finish all; gives how many there were."""
    count = 0
    while paper.busy:
        paper.finish()
        count += 1
    return count


def test_all_that_is_submitted_ends():
    paper = AiogpuPaper(16, 4)
    for _ in range(100):
        paper.submit(QUARTER)
    assert paper.busy == 16
    assert drain(paper) == 100
    paper._scheduler.check()
    assert not paper._scheduler.tasks
    assert not paper._needs


def test_the_need_of_what_ended_is_told():
    paper = AiogpuPaper(8, 4)
    needs = [Need(num_gpus=amount) for amount in (0.25, 0.5, 1, 2)]
    for need in needs:
        paper.submit(need)
    ended = [paper.finish() for _ in needs]
    assert sorted(need.num_gpus for need in ended) == [0.25, 0.5, 1, 2]


def test_the_time_in_the_scheduler_is_counted():
    paper = AiogpuPaper(1, 0)
    assert paper.spent == 0
    paper.submit(Need())
    assert paper.spent > 0


def test_isolated_tasks_end_their_workers():
    paper = AiogpuPaper(4, 1)
    for _ in range(10):
        paper.submit(Need(num_gpus=0.25, is_isolated=True))
    assert drain(paper) == 10
    assert len(paper._scheduler.workers) == 0


class Deaf:
    """Stands for a scheduler; notes what it is told, and wants what it is told to."""

    def __init__(self):
        self.told = []
        self.wants = []

    def hear(self, event):
        self.told.append(event)
        wants, self.wants = self.wants, []
        return wants

    def deadline(self):
        return None


def driver_of_three(monkeypatch):
    """One worker that runs task 1 and was sent 2 and 3 ahead, and whom it tells."""
    paper = AiogpuPaper(1, 0)
    for _ in range(3):
        paper.submit(Need())
    paper._scheduler = deaf = Deaf()
    monkeypatch.setattr(Scheduler, "finish", lambda *it: deaf.hear(("finish", *it[2:])))
    monkeypatch.setattr(Scheduler, "wake", lambda *it: deaf.hear(("wake", *it[2:])))
    monkeypatch.setattr(
        Scheduler, "revoked", lambda *it: deaf.hear(("revoked", *it[2:]))
    )
    paper._apply(Ahead(1, [2, 3]))
    return paper, paper._scheduler


def test_a_worker_runs_what_it_is_sent_ahead_in_order(monkeypatch):
    paper, scheduler = driver_of_three(monkeypatch)
    assert paper.busy == 1
    assert drain(paper) == 3
    assert [task for _, task, *_ in scheduler.told] == [1, 2, 3]
    assert all(event[-1] == TOOK for event in scheduler.told)


def test_a_worker_keeps_what_it_has_begun_and_gives_back_the_rest(monkeypatch):
    paper, scheduler = driver_of_three(monkeypatch)
    scheduler.wants = [Revoke(1, 7)]
    paper._feed(Scheduler.wake)
    assert scheduler.told == [("wake",), ("revoked", 1, 7, 1)]
    assert drain(paper) == 1


def test_an_idle_worker_has_begun_nothing(monkeypatch):
    paper, scheduler = driver_of_three(monkeypatch)
    drain(paper)
    scheduler.wants = [Revoke(1, 8)]
    paper._feed(Scheduler.wake)
    assert scheduler.told[-1] == ("revoked", 1, 8, None)


def test_short_tasks_are_sent_ahead_and_all_end():
    paper = AiogpuPaper(2, 0)
    for _ in range(400):
        paper.submit(Need())
    for _ in range(20):
        paper.finish()
    assert max(len(sent) for sent in paper._sent.values()) > 20
    assert drain(paper) == 380
    paper._scheduler.check()


def test_an_effect_that_paper_cannot_answer_is_named():
    with pytest.raises(NotImplementedError, match="Kill"):
        AiogpuPaper(1, 0)._apply(Kill(1))
