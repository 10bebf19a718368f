"""Zygotes: their start, the generations that preload learnt modules, and deaths."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu.errors import NodeStartError, PreloadError
from aiogpu.runtime.node import Supervisor
from aiogpu.runtime.node_cgroup import NodeCgroup
from aiogpu.runtime.workers.death import UnavailableError
from aiogpu.runtime.zygote.config import (
    Bootstrap,
    Modules,
    early_variables,
    fitting,
    interpreter_flags,
    start_interpreter,
    start_variables,
)
from aiogpu.runtime.zygote.generations import (
    DEEPEST,
    HELD,
    INTENSITY,
    ZygoteGenerations,
)
from aiogpu.runtime.zygote.learning import (
    DEAR,
    DEVICE_MODULES,
    NOT_CHEAP,
    Learning,
    sees_devices,
)
from aiogpu.runtime.zygote.process import ZygoteEvents
from aiogpu.wire.messages import READ_DESCRIPTORS, Imported, Ready, Unfit
from tests.contract import tasks
from tests.support.program import run
from tests.support.waits import until

pytestmark = [pytest.mark.usefixtures("runtime_directory"), pytest.mark.either_loop]


AT_START = """LD_LIBRARY_PATH LD_PRELOAD PYTHONHASHSEED MALLOC_ARENA_MAX GLIBC_TUNABLES
OMP_PROC_BIND GOMP_CPU_AFFINITY KMP_BLOCKTIME MKL_DYNAMIC NUMEXPR_MAX_THREADS"""
IN_WORKER = """MODE MY_OMP_NUM HF_HOME OMP_NUM_THREADS MKL_NUM_THREADS
CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER"""
OF_MODULES = """torch TORCH_LOGS, torch PYTORCH_NVML_BASED_CUDA_CHECK,
tensorflow TF_CPP_MIN_LOG_LEVEL, transformers HF_HOME, jax XLA_FLAGS, jax JAX_PLATFORMS,
huggingface_hub HF_TOKEN, numpy NUMPY_MADVISE_HUGEPAGE, mine MINE_DEBUG"""


@pytest.mark.parametrize("name", [*AT_START.split(), *IN_WORKER.split()])
def test_zygote_gets_variables_that_libraries_read_at_their_start(name: str) -> None:
    early = ((name, "1"),) if name in AT_START.split() else ()
    assert early_variables(((name, "1"),), (), ()) == early


@pytest.mark.parametrize(
    ("module", "name"), [pair.split() for pair in OF_MODULES.split(",")]
)
def test_zygote_gets_the_variables_of_preloaded_modules(module: str, name: str) -> None:
    environment = (("A", "1"), (name, "2"), ("Z", "3"))
    assert early_variables(environment, ["sys", module], ()) == ((name, "2"),)
    assert early_variables(environment, ["sys"], ()) == ()


FLAGS = """
    import subprocess, sys
    from aiogpu.runtime.zygote.config import interpreter_flags
    code = (
        "import sys; f = sys.flags; "
        "print(f.optimize, f.dont_write_bytecode, f.no_user_site, sys.warnoptions, "
        "f.dev_mode, f.utf8_mode, sys._xoptions)"
    )
    options = [*interpreter_flags()]
    mine = [sys.executable, "-c", code]
    child = subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True
    )
    f = sys.flags
    print(
        *(f.optimize, f.dont_write_bytecode, f.no_user_site, sys.warnoptions),
        *(f.dev_mode, f.utf8_mode, sys._xoptions),
    )
    print(child.stdout + child.stderr, end="")
"""


OPTIONS = "-X", "dev", "-X", "utf8=0", "-X", "pycache_prefix=/nowhere"


def test_zygote_gets_the_options_of_the_interpreter() -> None:
    options = ("-OO", "-B", "-s", "-Werror::UserWarning", "-Wonce", *OPTIONS)
    source = f"""
    import subprocess, sys, textwrap
    print(subprocess.run(
        [sys.executable, *{options!r}, "-c", textwrap.dedent({FLAGS!r})],
        capture_output=True, text=True, check=True,
    ).stdout, end="")
    """
    mine, childs = run(source).splitlines()
    assert mine == childs
    for option in options:
        if option.startswith("-W"):
            assert option.removeprefix("-W") in childs


def test_zygote_gets_no_options_that_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_xoptions", {"importtime": True, "dev": True})
    flags = list(interpreter_flags())
    assert flags[flags.index("-X") :][:2] == ["-X", "dev"]
    assert "importtime" not in flags


def test_warning_filters_of_the_environment_replace_inherited_ones() -> None:
    flags, before = ["-O", "-Werror"], {"PYTHONWARNINGS": "error"}
    assert fitting(flags, before, {}) == flags
    assert fitting(flags, before, before) == flags
    assert fitting(flags, before, {"PYTHONWARNINGS": "ignore"}) == ["-O"]
    assert fitting(flags, {}, {"PYTHONWARNINGS": "ignore"}) == ["-O"]


@pytest.mark.parametrize(
    ("flags", "variables", "started"),
    [
        ([], {}, {"PYTHONHASHSEED": "9"}),
        (["-I"], {"PYTHONX": "1", "A": "1"}, {"A": "1", "PYTHONHASHSEED": "9"}),
        (["-E"], {"PYTHONHASHSEED": "5"}, {"PYTHONHASHSEED": "9"}),
        ([], {"PYTHONHASHSEED": "random"}, {"PYTHONHASHSEED": "9"}),
        ([], {"PYTHONHASHSEED": ""}, {"PYTHONHASHSEED": "9"}),
        (["-O"], {"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "0"}),
    ],
)
def test_the_hash_seed_is_the_nodes_unless_the_user_has_chosen_one(
    flags: list[str], variables: dict[str, str], started: dict[str, str]
) -> None:
    assert start_variables(variables, flags, "9") == started


@pytest.mark.parametrize("program", ["", "/no/such/python", "/etc/passwd"])
def test_interpreter_that_cannot_be_started_leaves_no_descriptors(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    before = sorted(os.listdir("/proc/self/fd"))
    with (
        open("/dev/null", "wb") as page,
        open("/dev/null", "wb") as output,
        pytest.raises(NodeStartError, match=program or "sys.executable"),
    ):
        start_interpreter({"sys_path": []}, page.fileno(), output.fileno())
    assert sorted(os.listdir("/proc/self/fd")) == before


EARLY = """
    import asyncio, subprocess, sys
    import aiogpu
    start = subprocess.Popen
    def noting(*args, **options):
        global before
        before = set(sys.modules)
        return start(*args, **options)
    subprocess.Popen = noting
    async def main():
        async with aiogpu.init(num_cpus=1):
            late = set(sys.modules) - before
        print(*sorted(late & set(sys.argv[1:])))
    asyncio.run(main())
"""
LATE = """aiogpu.core.resources.ledger aiogpu.core.scheduler.scheduler
aiogpu.runtime.driver aiogpu.runtime.workers.pool aiogpu.wire.codec msgpack"""
FIRST = """
    import aiogpu, sys
    @aiogpu.remote
    def noop():
        return None
    async def main():
        async with aiogpu.init(num_cpus=1, num_gpus=0):
            await noop.remote()
        print(*sorted(set(sys.modules) & set(sys.argv[1:])))
    aiogpu.run(main())
"""
UNNEEDED = """aiogpu.core.scheduler.placement_groups
aiogpu.core.scheduler.contention.reservation
aiogpu.core.scheduler.invariants aiogpu.observe.snapshot aiogpu.runtime.devices.monitor
aiogpu.runtime.callers.leases aiogpu.runtime.callers.requests aiogpu.accelerators.base
"""
"""Modules for devices, placement groups, leases, status and nested tasks."""


def test_first_call_imports_only_what_it_needs() -> None:
    needed = "aiogpu.core.scheduler.scheduler"
    assert run(FIRST, needed, *UNNEEDED.split()).split() == [needed]


def test_remaining_modules_are_imported_while_the_zygote_starts() -> None:
    assert run(EARLY, *LATE.split()).split() == sorted(LATE.split())


async def test_bootstrap_that_fails_leaves_no_files_and_descriptors(
    runtime_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with pytest.raises(NodeStartError, match="/no/such/python"):
        Bootstrap(NodeCgroup(asyncio.get_running_loop()), [], False)
    assert os.listdir(runtime_directory) == []
    assert os.listdir("/proc/self/fd") == before


def hear(learning: Learning, **costs: int) -> bool:
    return learning.note(tuple(costs), tuple(costs.values()))


def test_module_of_medium_cost_is_learnt_from_the_second_worker() -> None:
    learning = Learning(())
    assert not hear(learning, a=NOT_CHEAP, b=NOT_CHEAP - 1)
    assert hear(learning, a=NOT_CHEAP, b=NOT_CHEAP - 1)
    assert learning.modules == ["a"]


def test_the_dearest_modules_leave_out_what_only_a_busy_machine_made_slow() -> None:
    learning = Learning(())
    assert learning.dearest() == []
    hear(learning, small=DEAR, large=19 * DEAR, medium=5 * DEAR)
    assert learning.dearest() == ["large", "medium"]


def test_no_module_with_a_tenth_of_the_time_leaves_the_dearest() -> None:
    learning = Learning(())
    hear(learning, first=DEAR + 1, **{f"m{number}": DEAR for number in range(11)})
    assert learning.dearest() == ["first"]


def test_module_left_out_is_not_learnt_again() -> None:
    learning = Learning(())
    hear(learning, bad=DEAR, good=DEAR)
    learning.leave_out("bad", "it left 1 threads running")
    assert learning.modules == ["good"]
    assert not hear(learning, bad=DEAR)
    learning.leave_out("good", "it crashed")
    assert learning.modules == []
    assert set(learning.left_out) == {"bad", "good"}
    learning.leave_out("never seen", "")


@pytest.mark.parametrize(
    ("module", "is_seen"),
    [
        *((module, True) for module in sorted(DEVICE_MODULES)),
        ("cupy.linalg", True),
        ("numba", False),
        ("cupyx", False),
        ("torch.cuda", False),
    ],
)
def test_module_that_must_see_devices_is_not_learnt(module: str, is_seen: bool) -> None:
    assert sees_devices(module) is is_seen
    assert Learning(()).note([module], [DEAR]) is not is_seen


LEARNT = Imported(("slow",), (DEAR,))


class FakeProcess:
    """A zygote that the test makes ready and ends."""

    def __init__(
        self,
        number: int,
        modules: Modules,
        events: ZygoteEvents,
        parent: FakeProcess | None,
    ) -> None:
        self.generation = number
        self.preload, self.added = modules
        self.parent = parent
        inherited: frozenset[str] = frozenset() if parent is None else parent.modules
        self.modules = inherited.union(self.preload, self.added)
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.ready: Ready | None = None
        self.importing = self.unforked = ""
        self.learner_since: float | None = None
        self.started_at = 0.0
        self.held: list[float] = []
        self.unfit: Unfit | None = None
        self.problem: Exception | None = None
        self.status, self.last = 0, ("last words",)
        self.executable = sys.executable
        self.is_closing = self.is_over = self.is_stale = self.is_late = False
        self.importing = ""
        self.is_started = False
        self.calls: list[str] = []
        self.fault: Exception | None = None
        self.events: Any = events
        self.on_message = self.events.on_message

    def start(self, _launched: object = None) -> None:
        self.calls.append("start")
        if self.fault is not None:
            raise self.fault
        self.is_started = True

    def retire(self) -> None:
        self.calls.append("retire")

    def end(self) -> None:
        self.is_closing = True
        self.calls.append("end")

    @property
    def left_to_import(self) -> tuple[str, ...]:
        return self.added

    def hold(self, until: float) -> None:
        self.held.append(until)

    def end_learning(self) -> None:
        self.learner_since = None

    def become_ready(self, *microseconds: int, memory: int = 0) -> None:
        self.ready = Ready((), (), microseconds, memory)
        self.events.on_ready(self)

    def die(self, status: int = -9, unfit: Unfit | None = None) -> None:
        self.status, self.unfit, self.is_over = status, unfit, True
        self.events.on_end(self)


class Generations:
    """The generations under test and the fake zygotes that they start."""

    def __init__(self, preload: tuple[str, ...] = (), starts: bool = True) -> None:
        self.made: list[FakeProcess] = []
        self.events: list[tuple[str, int]] = []
        self.fault: Exception | None = None
        self.zygotes = ZygoteGenerations(
            asyncio.get_running_loop(),
            self.make,
            self,  # type: ignore[arg-type]
            (("A", "1"),),
            preload,
        )
        if starts:
            self.zygotes.current.start()

    def on_zygote_death(self, zygote: FakeProcess) -> None:
        self.events.append(("death", zygote.generation))

    def on_superseded(self, zygote: FakeProcess) -> None:
        self.events.append(("superseded", zygote.generation))

    def on_better_zygote(self, zygote: FakeProcess) -> None:
        self.events.append(("better", zygote.generation))

    def make(
        self,
        environment: object,
        modules: Modules,
        events: ZygoteEvents,
        parent: Any,
    ) -> Any:
        assert environment == (("A", "1"),)
        process = FakeProcess(len(self.made), modules, events, parent)
        process.fault = self.fault
        self.made.append(process)
        return process

    @property
    def last(self) -> FakeProcess:
        return self.made[-1]

    @property
    def current(self) -> int:
        return self.zygotes.current.generation

    async def follower(self, count: int = 2) -> FakeProcess:
        """Wait until `count` zygotes were made; return the last one."""
        await until(lambda: len(self.made) >= count)
        return self.last

    async def settle(self) -> None:
        """Wait for the timer, if there is one."""
        timer = self.zygotes._timer
        await until(lambda: timer is None or self.zygotes._timer is not timer)


@pytest.fixture(autouse=True)
def no_debounce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiogpu.runtime.zygote.generations.DEBOUNCE", 0.01)


@pytest.fixture
async def generations() -> AsyncIterator[Generations]:
    generations = Generations(("named",))
    generations.last.become_ready()
    yield generations
    generations.zygotes.end()


async def test_module_learnt_during_a_start_is_added(generations: Generations) -> None:
    generations.zygotes.note_imports(LEARNT)
    second = await generations.follower()
    generations.zygotes.note_imports(Imported(("late",), (DEAR,)))
    await generations.settle()
    assert len(generations.made) == 2
    second.become_ready()
    third = await generations.follower(3)
    assert (third.parent, third.added) == (second, ("late",))


async def test_generation_spoilt_by_a_module_is_repeated_without_it(
    generations: Generations, caplog: pytest.LogCaptureFixture
) -> None:
    generations.zygotes.note_imports(Imported(("bad", "good"), (DEAR, DEAR)))
    follower = await generations.follower()
    follower.die(0, Unfit("bad", "it left 1 threads running", False))
    assert generations.current == 0
    third = await generations.follower(3)
    assert third.added == ("good",)
    assert "bad is not preloaded" in caplog.text
    assert generations.events == [("death", 1)], "workers that wait for it move"


async def test_module_in_whose_import_a_generation_dies_is_left_out(
    generations: Generations, caplog: pytest.LogCaptureFixture
) -> None:
    generations.zygotes.note_imports(Imported(("good", "slow"), (DEAR, DEAR)))
    follower = await generations.follower()
    follower.importing = "slow"
    follower.die(-11)
    reason = "its import was ended by SIGSEGV"
    assert generations.zygotes.learning.left_out == {"slow": reason}
    assert f"slow is not preloaded: {reason}" in caplog.text
    assert (await generations.follower(3)).added == ("good",)
    assert generations.current == 0


async def test_dead_zygote_is_followed_by_one_that_imports_anew(
    generations: Generations,
) -> None:
    generations.zygotes.note_imports(LEARNT)
    (await generations.follower()).become_ready()
    generations.last.die()
    interpreter = await generations.follower(3)
    assert (interpreter.parent, interpreter.preload) == (None, ("named",))
    assert generations.events == [("superseded", 0), ("death", 1)]
    assert generations.current == 2, "waiting callers can use it"
    interpreter.become_ready()
    branch = await generations.follower(4)
    assert (branch.parent, branch.added) == (interpreter, ("slow",))


async def test_fork_that_fails_is_no_fault_of_a_module(
    generations: Generations, caplog: pytest.LogCaptureFixture
) -> None:
    generations.zygotes.note_imports(LEARNT)
    follower = await generations.follower()
    follower.unforked = "it could not be forked: too many processes"
    follower.die(0)
    assert "not preloaded: it could not be forked" in caplog.text
    assert generations.zygotes.learning.modules == ["slow"]
    assert (generations.current, len(generations.made)) == (0, 2)


async def test_branches_are_not_nested_without_end(generations: Generations) -> None:
    for number in range(DEEPEST + 1):
        generations.zygotes.note_imports(Imported((f"m{number}",), (DEAR,)))
        (await generations.follower(number + 2)).become_ready()
    assert [zygote.depth for zygote in generations.made] == [*range(DEEPEST + 1), 1]
    assert len(generations.last.added) == DEEPEST + 1


async def test_large_zygote_learns_no_more(generations: Generations) -> None:
    generations.zygotes.note_imports(LEARNT)
    (await generations.follower()).become_ready(memory=1 << 60)
    assert choose(generations, "more") == 1
    assert generations.zygotes.learning.modules == ["slow"]


# Workers that wait for imports


def choose(generations: Generations, *needs: str) -> int:
    return generations.zygotes.choose(needs).generation


async def test_first_worker_imports_itself_and_others_wait(
    generations: Generations,
) -> None:
    assert choose(generations) == choose(generations, "named") == 0
    assert len(generations.made) == 1
    assert choose(generations, "dear") == 0, "it finds out what comes later"
    assert generations.last.added == ("dear",)
    assert [choose(generations, "dear") for _ in range(3)] == [1, 1, 1]
    assert choose(generations) == choose(generations, "cupy") == 0


async def test_worker_does_not_wait_for_imports_of_others(
    generations: Generations,
) -> None:
    assert choose(generations, "dear") == 0
    assert choose(generations, "other") == 0, "the zygote does not import it"
    assert choose(generations, "dear", "other") == 1, "it imports the other itself"
    generations.last.become_ready(DEAR)
    assert (await generations.follower(3)).added == ("other",)


@pytest.mark.parametrize(("rest", "waits"), [(10, True), (13, False)])
async def test_worker_waits_if_the_zygote_is_ready_sooner(
    rest: int, waits: bool, generations: Generations
) -> None:
    """Of imports whose costs are known; "own" costs 10."""
    learning = generations.zygotes.learning
    learning.costs.update(own=10, others=rest - 10)
    learning.want(["others"])
    learning.needed.add("others")
    assert choose(generations, "own") == (1 if waits else 0)


async def test_imports_of_an_earlier_run_give_way_to_what_is_needed(
    generations: Generations,
) -> None:
    learning = generations.zygotes.learning
    learning.costs.update(first=4 * DEAR, second=DEAR, third=DEAR)
    learning.want(["first", "second"])
    generations.zygotes.renew()
    assert generations.last.added == ("first", "second")
    assert choose(generations, "second") == 2
    assert generations.made[1].calls == ["start", "end"]
    assert generations.last.added == ("second",)
    assert choose(generations, "third") == 0, "what is needed does not give way"
    generations.last.become_ready(DEAR)
    assert (await generations.follower(4)).added == ("third",)
    generations.last.become_ready(DEAR)
    assert (await generations.follower(5)).added == ("first",)


async def test_imports_of_an_earlier_run_give_way_once_an_import_is_slow(
    generations: Generations,
) -> None:
    generations.zygotes.learning.want(["first"])
    generations.zygotes.learning.costs.update(first=DEAR)
    generations.zygotes.renew()
    assert choose(generations, "new") == 0
    assert choose(generations, "new") == 0, "it may be cheap"
    generations.zygotes.note_slow_import("new")
    assert generations.made[1].calls == ["start", "end"]
    assert generations.last.added == ("new",)
    assert generations.events == [("better", 0)]
    assert choose(generations, "new") == 2


async def test_a_zygote_that_reads_edited_files_anew_does_not_give_way(
    generations: Generations,
) -> None:
    generations.zygotes.current.is_stale = True
    generations.zygotes.renew()
    generations.zygotes.learning.costs.update(dear=DEAR)
    assert choose(generations, "dear") == 0
    assert generations.last.calls == ["start"]


async def test_what_another_module_has_brought_keeps_its_cost() -> None:
    learning = Learning(())
    hear(learning, small=2 * NOT_CHEAP, large=DEAR)
    learning.note_zygote(["large", "small", "new"], [DEAR, 0, 1])
    assert learning.costs == {"small": 2 * NOT_CHEAP, "large": DEAR, "new": 1}
    learning.note_zygote(["large", "small"], [NOT_CHEAP, 0])
    assert learning.costs["small"] == NOT_CHEAP, "at most what brought it"


async def test_late_import_moves_workers_that_were_not_forked(
    generations: Generations,
) -> None:
    assert choose(generations, "dear") == 0
    generations.zygotes.note_slow_import("late")
    assert len(generations.made) == 2, "one after the other"
    generations.last.become_ready(DEAR)
    assert (generations.last.parent, generations.last.added) == (
        generations.made[1],
        ("late",),
    )
    assert generations.events == [
        ("better", 0),
        ("superseded", 0),
        ("better", 1),
    ]
    assert choose(generations, "dear", "late") == 2


async def test_ready_zygote_waits_for_its_learner(generations: Generations) -> None:
    now = asyncio.get_running_loop().time()
    assert choose(generations, "dear") == 0
    zygote = generations.last
    zygote.started_at = now - 10
    zygote.become_ready(DEAR)
    (until,) = zygote.held
    assert until - now == pytest.approx(10 * (1 + HELD), rel=0.1)
    assert choose(generations, "second") == generations.current == 1
    generations.zygotes.note_imports(Imported((), ()))
    generations.last.become_ready(DEAR)
    assert generations.last.held == [], "its learner has ended before"


async def test_zygote_is_restarted_on_request_only_after_too_many_deaths(
    generations: Generations, caplog: pytest.LogCaptureFixture
) -> None:
    zygotes = generations.zygotes
    for _ in range(INTENSITY):
        generations.last.die()
        generations.last.become_ready()
    last = generations.last
    last.die()
    assert len(generations.made) == INTENSITY + 1, "the next one starts on request"
    assert zygotes.problem is None
    assert isinstance(last.problem, UnavailableError)
    assert str(last.problem) == "the zygote ended with status -9: last words"
    assert generations.events[-1] == ("death", last.generation)
    for _ in range(10):
        made = len(generations.made)
        assert zygotes.serving() is zygotes.current is generations.last
        assert zygotes.serving() is generations.last
        assert len(generations.made) == made + 1
        generations.last.die()
        assert isinstance(generations.last.problem, UnavailableError)
    zygotes.serving()
    generations.last.become_ready()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == INTENSITY + 2, "a lasting problem is logged once"
    assert "no worker can be started: the zygote ended with stat" in warnings[INTENSITY]
    assert warnings[-1].startswith("workers can be started again: zygote ")


async def test_replacement_that_fails_is_tried_again(generations: Generations) -> None:
    zygotes = generations.zygotes
    generations.fault = NodeStartError("python cannot be started: no file")
    generations.last.die()
    for _ in range(3):
        with pytest.raises(UnavailableError, match="no file"):
            zygotes.serving()
    assert zygotes.problem is None
    generations.last.fault = None
    assert zygotes.serving() is generations.last
    assert len(generations.made) == 2, "the same zygote"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EAGAIN, errno.ENOENT])
async def test_first_zygote_is_tried_again_if_resources_were_short(number: int) -> None:
    generations = Generations(starts=False)
    error = NodeStartError("python cannot be started")
    error.__cause__ = OSError(number, os.strerror(number))
    generations.last.fault = error
    if number != errno.ENOENT:
        with pytest.raises(UnavailableError):
            generations.zygotes.serving()
        generations.last.fault = None
        assert generations.zygotes.serving() is generations.last
        return
    lengths = []
    for _ in range(3):
        with pytest.raises(NodeStartError) as caught:
            generations.zygotes.serving()
        assert not isinstance(caught.value, UnavailableError)
        lengths.append(len(caught.traceback))
    assert lengths[1] == lengths[2], "each call raises a new error"
    assert generations.zygotes.problem is not None


async def test_new_generation_serves_if_old_is_dead(generations: Generations) -> None:
    generations.zygotes.note_imports(LEARNT)
    follower = await generations.follower()
    for _ in range(INTENSITY + 1):
        generations.zygotes.current.die()
        if generations.zygotes.current.is_over:
            break
        generations.zygotes.current.become_ready()
    follower.become_ready()
    assert generations.zygotes.serving() is follower


@pytest.mark.parametrize(
    ("end", "error", "message"),
    [
        (1, NodeStartError, "status 1"),
        (-9, PreloadError, "'named', whose import did not"),
        (
            Unfit("named", "ModuleNotFoundError: named", True),
            *(PreloadError, "'named', which cannot be imported"),
        ),
        # A sitecustomize may start a thread; another start would not help.
        (
            Unfit("cloudpickle", "it left 1 threads running", False),
            *(NodeStartError, "cannot be forked here: it left 1 thr"),
        ),
    ],
    ids=["death", "imports too long", "missing module", "unfit interpreter"],
)
async def test_first_zygote_that_fails_is_an_error(
    end: int | Unfit, error: type[NodeStartError], message: str
) -> None:
    """It ends with a status, or because a module is unfit; -9 after a time limit."""
    generations = Generations(("named",))
    generations.last.is_late = end == -9
    generations.last.importing = "named" if end == -9 else ""
    status, unfit = (end, None) if isinstance(end, int) else (0, end)
    generations.last.die(status, unfit)
    with pytest.raises(error, match=message):
        await generations.zygotes.ready()
    assert len(generations.made) == 1
    generations.zygotes.end()


async def test_no_generation_starts_after_the_end(generations: Generations) -> None:
    generations.zygotes.note_imports(LEARNT)
    follower = await generations.follower()
    generations.zygotes.note_imports(Imported(("late",), (DEAR,)))
    generations.zygotes.end()
    assert follower.calls == ["start", "end"]
    follower.die()
    generations.made[0].die()
    generations.zygotes.note_imports(Imported(("later",), (DEAR,)))
    await generations.settle()
    assert len(generations.made) == 2
    assert repr(generations.zygotes).startswith("<ZygoteGenerations <")


@pytest.mark.usefixtures("no_leaks")
async def test_node_closed_now_leaves_no_directory(runtime_directory: Path) -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=0) as session:
        supervisor: Supervisor = session._session._engine._supervisor  # type: ignore[attr-defined]
        parts: Any = supervisor._parts
        pool, memory = parts.driver.pool, parts.descriptor_server
        supervisor.close_now()
        supervisor.close_now()
        assert os.listdir(runtime_directory) == []
        await pool.close()
        await pool.zygotes.close()
        for server in parts.servers:
            server.close()
        memory.close()


@pytest.mark.usefixtures("no_leaks")
async def test_first_request_during_the_close_of_the_node_is_handled() -> None:
    """A worker's last values return while the node closes its parts."""
    async with aiogpu.init(num_cpus=1, num_gpus=0) as session:
        assert await tasks.add.remote(1) == 2
        supervisor: Supervisor = session._session._engine._supervisor  # type: ignore[attr-defined]
        driver = supervisor._open_parts.driver
        (worker,) = driver.workers.values()
    driver.requests.on_message(worker, READ_DESCRIPTORS)
