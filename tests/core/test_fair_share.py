"""Programs that share a node: shares, turns and limits."""

from copy import copy
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

import pytest

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.queue import fair_share as clients_module
from aiogpu.core.queue.fair_share import LONGEST, Limits
from aiogpu.core.scheduler.placement import SLICE
from aiogpu.errors import AiogpuError, InfeasibleError, LimitError, OptionError
from tests.core.builders import GIB, World, status_of, submit, why_of

pytestmark = pytest.mark.usefixtures("few")


@dataclass
class Contender:
    """A program that always has waiting tasks.

    Attributes:
        seconds: how long its tasks take in the mean.
        had: resource-seconds that it has had of the contended one.
        ran: tasks that have ended.
    """

    id: int
    weight: float = 1.0
    seconds: float = 1.0
    jitter: float = 0.2
    cpus: float = 1
    gpus: float = 0
    flood: int = 20
    priority: int = 0
    has_own_environment: bool = True
    waits: int = 0
    had: float = 0.0
    ran: int = 0
    longest: float = 0.0

    @property
    def size(self) -> float:
        """The amount of the contended resource that one task holds."""
        return self.gpus or self.cpus


class Contest(World):
    """A simulation of contending programs."""

    def __init__(self, contenders, seed=0, **options) -> None:
        self._seen = 0
        super().__init__(**options)
        self._random = Random(seed)
        self._ends: list[tuple[float, str]] = []
        self._begun: dict[str, float] = {}
        self._came: dict[str, float] = {}
        self.contenders = {each.id: each for each in contenders}
        for each in contenders:
            self.join(each.id, each.weight)

    def check(self) -> None:
        """Check only sometimes: a check is slow."""
        self._seen += 1
        if self._seen % 97 == 0:
            super().check()

    def feed(self, contender) -> None:
        """Keep the program's number of waiting tasks."""
        missing = contender.flood - contender.waits
        for _ in range(missing):
            name = f"{contender.id}:{len(self.tasks)}"
            variables = {"P": str(contender.id)}
            self._came[name] = self.now
            contender.waits += 1
            self.submit(
                name,
                num_cpus=contender.cpus,
                num_gpus=contender.gpus,
                priority=contender.priority,
                function=contender.id,
                environment=variables if contender.has_own_environment else None,
                client=contender.id,
            )

    def play(self, seconds: float) -> None:
        """Run the simulation."""
        until = self.now + seconds
        self._note()
        while self._ends and self._ends[0][0] <= until:
            moment, name = heappop(self._ends)
            self.advance(max(moment - self.now, 0.0))
            contender = self._whose(name)
            self.took = moment - self._begun[name]
            contender.had += contender.size * self.took
            contender.ran += 1
            self.finish(name)
            self._note()
            self.feed(contender)
            self._note()
        self.advance(until - self.now)

    def _whose(self, name: str) -> Contender:
        return self.contenders[int(name.split(":")[0])]

    def _note(self) -> None:
        """Plan the ends of the running tasks."""
        for name in sorted(self.running - self._begun.keys()):
            contender = self._whose(name)
            contender.waits -= 1
            waited = self.now - self._came[name]
            contender.longest = max(contender.longest, waited)
            spread = contender.seconds * contender.jitter
            seconds = contender.seconds + self._random.uniform(-spread, spread)
            self._begun[name] = self.now
            heappush(self._ends, (self.now + seconds, name))


def jain(amounts) -> float:
    """Jain's index: 1 if all shares are equal, 1/n if one program has all."""
    amounts = list(amounts)
    return sum(amounts) ** 2 / (len(amounts) * sum(each**2 for each in amounts))


def play(contenders, seconds, **node) -> list[float]:
    """Return each program's usage divided by its weight, under full load."""
    contest = Contest(contenders, **node)
    for each in contenders:
        contest.feed(each)
    contest.play(seconds)
    contest.scheduler.check()
    return [each.had / each.weight for each in contenders]


@pytest.mark.parametrize(
    ("contenders", "node", "seconds", "least"),
    [
        ([Contender(number) for number in range(1, 5)], {"cpus": 3}, 60, 0.99),
        ([Contender(n, weight=n) for n in (1, 2, 3)], {"cpus": 4}, 90, 0.999),
        ([Contender(1, seconds=3), Contender(2, seconds=0.1)], {"cpus": 1}, 60, 0.99),
        # Short tasks are sent ahead; a slice of them is one turn.
        (
            [Contender(1, seconds=1e-3, flood=50), Contender(2, seconds=0.05)],
            {"cpus": 2},
            1,
            0.96,
        ),
        (
            [Contender(1, gpus=4, seconds=1), Contender(2, gpus=0.25, seconds=0.5)],
            {"cpus": 16, "gpus": 4},
            60,
            0.98,
        ),
    ],
    ids=["equal", "by weight", "long and short", "tiny", "wide and narrow"],
)
def test_programs_get_time_by_weight(contenders, node, seconds, least):
    had = play([copy(each) for each in contenders], seconds, **node)
    assert jain(had) > least
    weights = sum(
        each.weight * amount for each, amount in zip(contenders, had, strict=True)
    )
    assert weights > 0.85 * seconds * node.get("gpus", node["cpus"])


@pytest.fixture
def w() -> World:
    """A world of one CPU and two programs."""
    return World(cpus=1).play("join 1 2")


def order(w: World, seconds: float = 1.0) -> list[str]:
    """Finish tasks one after the other; return their order."""
    names = []
    while w.running:
        [name] = w.running
        names.append(name)
        w.advance(seconds)
        w.finish(name)
    return names


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (1.0, ["a1", "b1", "a2", "b2", "a3", "b3"]),
        (SLICE / 2, ["a1", "a2", "b1", "b2", "a3", "b3"]),
    ],
    ids=["a turn each", "a slice is one turn"],
)
def test_programs_take_turns_in_their_own_order(w, seconds, expected):
    for name in ("a1", "a2", "a3", "b1", "b2", "b3"):
        w.submit(name, client=1 if name[0] == "a" else 2)
    assert order(w, seconds) == expected


def test_program_that_holds_less_goes_first():
    World(cpus=2).play("""
        join 1 2; submit b0 client=2; advance 50; finish b0; submit a0 a1 a2 a3 client=1
        submit b1 b2 client=2; running = a0 a1
        advance 1; finish a0; running = a1 b1
    """)


def test_program_may_start_a_later_group_if_its_first_does_not_fit():
    """Program 1 holds all CPUs but no GPU; its first task needs both."""
    World(cpus=2, gpus=2).play("""
        join 1 2; submit cpus cpus=2 client=1; submit gpu cpus=0 gpus=1 client=2
        submit last cpus=0 gpus=0.6 client=2; submit stuck cpus=1 gpus=0.5 client=1
        submit mine cpus=0 gpus=0.7 client=1; submit theirs cpus=0 gpus=0.7 client=2
        advance 0.5; finish last; running = cpus gpu mine; waiting = stuck theirs
    """)


def test_reservation_gives_way_for_a_limited_time():
    """A program with less virtual time may be blocked for another reason for ever."""
    w = World(cpus=16, gpus=2, config=SchedulerConfig(reserve_after=0.0))
    for number in (1, 2, 3):
        w.join(number)
    w.play("""
        submit old gpus=1 client=1; advance 5; finish old
        submit life gpus=1 is_endless=True client=3; submit never gpus=2 client=2
        submit half gpus=0.5 client=3; submit one gpus=1 client=1
        submit half2 gpus=0.5 client=3; running = half half2 life
        submit x cpus=0; finish x
    """)
    w.play(f"advance {LONGEST + 1}; finish half")
    assert w.kept == "one"


def test_higher_priority_takes_the_reservation_of_another_program():
    w = World(cpus=16, gpus=1, config=SchedulerConfig(reserve_after=0.0)).play("""
        join 1 2; submit half other gpus=0.5 client=1; submit wide gpus=1 client=2
        submit low gpus=0.5 client=1; advance 1; finish half; running = other
        submit urgent gpus=0.5 client=1 priority=1; running = other urgent
    """)
    w.play("""
        submit urgent-wide gpus=1 client=1 priority=1; finish other; kept = urgent-wide
        cancel urgent-wide; finish urgent; running = wide
    """)


def test_program_that_has_waited_longest_does_not_give_way():
    """Its virtual time decides, although it holds more than others."""
    w = World(cpus=4, gpus=2).play("""
        join 1 2; submit life cpus=0 gpus=1 client=1; submit b0 b1 gpus=0.5 client=2
        submit a gpus=0.5 client=1
    """)
    submit(w, [f"b{n}" for n in range(2, 200)], num_gpus=0.5, client=2)
    began = 0
    while "a" in w.waiting:
        w.advance(1)
        w.finish(f"b{began}")
        began += 1
        assert began < 2 * LONGEST + 5
    assert began >= LONGEST


def test_running_tasks_count_when_a_second_program_joins():
    w = World(cpus=2).play("""
        submit a0 lent; submit child parent=lent; wait_for lent child; submit a1; join 7
        submit b0 client=7
    """)
    own, other = sorted(w.scheduler.clients, key=lambda one: one.id)
    assert (own.held, own.unfinished) == ({"CPU": 20_000}, 4)
    assert (other.held, other.unfinished) == ({}, 1)
    w.play("advance 1; finish child; running = a0 lent; finish a0; running = b0 lent")


def test_programs_take_turns_at_the_worker_limit():
    w = World(cpus=4).play("join 1 2")
    w.scheduler.worker_limit.bound(1)
    for name in ("a1", "a2", "b1", "b2"):
        w.submit(name, client=1 if name[0] == "a" else 2, environment={"P": name[0]})
    assert order(w) == ["a1", "b1", "a2", "b2"]


def test_program_gives_way_only_if_that_helps():
    w = World(cpus=2, gpus=1).play("""
        join 1 2; submit life gpus=1 is_endless=True; submit a0 a1 a2 client=1
        submit b gpus=1 client=2
    """)
    for number in range(3):
        assert w.running == {"life", f"a{number}"}
        w.advance(1)
        w.finish(f"a{number}")
    assert w.waiting == {"b"}


def test_no_reservation_for_resources_held_without_end():
    w = World(cpus=4, gpus=2, config=SchedulerConfig(reserve_after=0.0)).play("""
        join 1 2; submit life gpus=1 is_endless=True; submit half gpus=0.5 client=1
        submit wide gpus=1 client=2; advance 1; submit x cpus=0; finish x
    """)
    kept = w.scheduler.reservation
    assert kept is not None
    w.play("submit never gpus=2 client=1 priority=1; submit y cpus=0; finish y")
    assert w.scheduler.reservation.record is kept.record


def test_settling_device_counts_for_its_program():
    w = World(cpus=4, gpus=1)
    w.play("let settles=True; submit before gpus=1 max_calls=1; finish before; join 1")
    assert all(not client.held for client in w.scheduler.clients), "nobody's"
    w.play("settle; submit a gpus=1 max_calls=1 client=1; finish a")
    [_, client] = w.scheduler.clients
    assert client.held == {"GPU": 10_000}
    w.play("join 2; settle")
    assert client.held == {}


def test_cache_of_shares_is_bounded(monkeypatch):
    monkeypatch.setattr(clients_module, "CACHED", 3)
    w = World(cpus=1).play("join 1")
    for number in range(1, 9):
        w.submit(f"t{number}", num_cpus=number / 10, client=1)
    assert len(w.scheduler.clients._portions) <= 3
    w.play("run_dry; left = 0")


# Limits of one program.


@pytest.mark.parametrize(
    ("terms", "match"),
    [
        *(
            ({"limits": {"max_waiting": most}}, f"max_waiting={most!r} is not a number")
            for most in (0, 1.5, True, "many")
        ),
        *(
            (
                {"limits": {"max_share": {"CPU": share}}},
                r"max_share\['CPU'\].* not a part",
            )
            for share in (0, 1.1)
        ),
        (
            {"limits": {"max_share": {"license": 1}}},
            "'license' cannot be limited.*CPU, GPU",
        ),
        *(
            ({"weight": weight}, f"weight={weight!r} is not a weight")
            for weight in (0, float("inf"), float("nan"))
        ),
    ],
    ids=str,
)
def test_invalid_weights_and_limits_are_refused(terms, match):
    w = World(cpus=2)
    with pytest.raises(OptionError, match=match):
        w.join(1, terms.get("weight", 1.0), Limits(**terms.get("limits", {})))
    assert w.scheduler.clients is None


def test_max_waiting_limits_unfinished_tasks():
    w = World(cpus=1)
    assert Limits(max_waiting=1).max_waiting == 1
    w.join(1, limits=Limits(max_waiting=2))
    submit(w, "a b", client=1)
    with pytest.raises(LimitError) as caught:
        w.submit("c", client=1)
    assert isinstance(caught.value, AiogpuError)
    assert str(caught.value) == (
        "this program has 2 unfinished tasks; its limit on this node is 2 "
        "(max_waiting). Await some of them before submitting more, or join the node "
        "with a higher limit."
    )
    w.play("submit other; finish a; submit c client=1")
    with pytest.raises(LimitError):
        w.submit("child", client=1, parent="b")


def test_max_share_limits_a_program_but_not_others():
    w = World(cpus=8, gpus=4)
    w.join(1, limits=Limits(max_share={"GPU": 0.5}))
    w.play("""
        submit a b c gpus=1 client=1; running = a b
        submit small gpus=0.5 client=1; submit cpus client=1; submit d gpus=2
        running = a b cpus d; kept = None
        advance 5; submit x cpus=0; finish x; kept = None
        finish a; running = b c cpus d
    """)


def test_max_share_limits_explicit_gpu_memory():
    w = World(cpus=8, gpus=2, gpu_memory="40GiB")
    w.join(1, limits=Limits(max_share={"gpu_memory": 0.375}))
    w.play("submit a b gpu_memory=20GiB client=1; running = a")
    [_, client] = w.scheduler.clients
    assert client.held == {"CPU": 10_000, "gpu_memory": 20 * GIB * 10_000}
    with pytest.raises(InfeasibleError, match="asks for 40GiB GPU memory"):
        w.submit("pair", num_gpus=2, gpu_memory="20GiB", client=1)


def test_why_names_the_limit_until_it_is_raised():
    w = World(cpus=8, gpus=4)
    w.join(1, limits=Limits(max_share={"GPU": 0.25, "CPU": 0.25}))
    w.play("submit a cpus=2 gpus=1 client=1; submit b gpus=1 client=1")
    limit = "2 of at most 2 CPU and 1 of at most 1 GPU"
    [seen] = status_of(w).waiting
    assert seen.reason == f"waits for its program's own limit: it holds {limit}"
    reason = why_of(w, "b")
    assert reason.limit == limit
    assert str(reason) == (
        f"b (task 1) has waited 0.0 s for its program's own limit: it holds {limit}"
    )
    w.join(1, limits=Limits(max_share={"GPU": 0.5}))
    assert w.running == {"a", "b"}


def test_child_fails_if_its_parent_uses_up_the_limit():
    w = World(cpus=8, gpus=4)
    w.join(1, limits=Limits(max_share={"GPU": 0.25}))
    w.play("""
        submit parent gpus=1 client=1; submit child gpus=1 parent=parent
        submit fine parent=parent; wait_for parent child fine; told = child:deadlocked
    """)
    assert w.tasks["child"].reason == (
        "child asks for {CPU: 1, GPU: 1}, which waiting tasks hold: parent holds "
        "{CPU: 1, GPU: 1} and waits for child; this program already holds 1 of at "
        "most 1 GPU"
    )


def test_cpus_of_a_waiting_parent_do_not_count():
    w = World(cpus=8)
    w.join(1, limits=Limits(max_share={"CPU": 0.125}))
    w.play("""
        submit parent client=1; submit child parent=parent; submit next client=1
        wait_for parent child; running = child parent
        wait_for parent; running = child parent
        finish child; waiting = next (its program holds too much as it is)
        finish parent; running = next
    """)


def test_retry_with_a_whole_device_respects_the_limit():
    w = World(cpus=8, gpus=2)
    w.join(1, limits=Limits(max_share={"GPU": 0.25}))
    w.join(2, limits=Limits(max_share={"GPU": 0.5}))
    w.play("""
        submit a gpus=0.5 retries_oom=True client=1
        submit b gpus=0.5 retries_oom=True client=2; finish a ran_out=True
        told = a:settled; finish b ran_out=True; running = b
    """)


def test_exclusive_retry_respects_the_limit():
    w = World(cpus=8, gpus=2)
    w.join(1, limits=Limits(max_share={"GPU": 0.5}))
    w.submit("greedy", num_gpus=0.5, client=1)
    w.submit("actor", num_gpus=0.5, client=1, is_endless=True)
    w.join(1, limits=Limits(max_share={"GPU": 0.25}))
    w.play("starve greedy; running lacks greedy; join 1; running has greedy")


def test_program_is_forgotten_after_its_last_task():
    w = World(cpus=1, exits=False).play("""
        leave 9; join 1; leave 9; submit a client=1 max_calls=1; leave 1
    """)
    assert repr(w.scheduler.clients) == "<Accounts [0, 1]>"
    w.finish("a")
    assert repr(w.scheduler.clients) == "<Accounts [0, 1]>", "its process is there"
    w.die(1)
    assert repr(w.scheduler.clients) == "<Accounts [0]>"
    w.play("submit b client=1; leave 1; join 1; finish b")
    assert repr(w.scheduler.clients) == "<Accounts [0, 1]>"
    w.leave(1)
    assert repr(w.scheduler.clients) == "<Accounts [0]>"


# A program that does not read its results.


def test_program_that_is_behind_starts_nothing():
    w = World(cpus=2).play("""
        fall_behind 7; join 1 2; fall_behind 7; submit a0 a1 a2 a3 client=1
        submit b client=2
    """)
    assert len(w.running) == 2
    w.fall_behind(1)
    while mine := w.running - {"b"}:
        w.finish(min(mine))
    w.submit("a4", client=1)
    w.play("running = b (others have what it leaves); waiting has a4")
    reason = "for its program to read its results"
    assert why_of(w, "a4").is_behind
    assert reason in str(why_of(w, "a4"))
    assert {task.reason for task in status_of(w).waiting} == {f"waits {reason}"}
    w.fall_behind(1, is_behind=False)
    assert len(w.running) == 2
    w.play("fall_behind 1; leave 1; run_dry; waiting =")
