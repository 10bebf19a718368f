"""What drives aiogpu's scheduler on paper does what its effects say."""

import pytest

from aiogpu.core.effects import Assign, Kill
from benchmarks.environments.aiogpu_paper import AiogpuPaper
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


def test_a_worker_runs_what_it_is_sent_ahead_in_order():
    paper = AiogpuPaper(1, 0)
    answered = []

    class Ahead:
        """Sends the one worker all tasks, whatever it is doing."""

        def handle(self, event, _now):
            answered.append(event.task)
            return []

        def deadline(self):
            return None

    for _ in range(3):
        paper.submit(Need())
    (lease,) = (sent[0].lease for sent in paper._sent.values())
    paper._scheduler = Ahead()
    for task in (2, 3):
        paper._apply(Assign(task, 1, lease, is_first=False, is_last=False))
    assert paper.busy == 1
    assert drain(paper) == 3
    assert answered == [1, 2, 3]


def test_an_effect_that_paper_cannot_answer_is_named():
    with pytest.raises(NotImplementedError, match="Kill"):
        AiogpuPaper(1, 0)._apply(Kill(1))
