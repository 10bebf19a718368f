"""What `status()` and `why()` tell of the programs that share a node."""

import gc
import time
from dataclasses import replace

from aiogpu.core.model.ids import ClientId, TaskId
from aiogpu.core.model.request import Request, Shape, TaskSpec
from aiogpu.core.model.units import UNIT
from aiogpu.core.queue.fair_share import Limits
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.observe.snapshot import LISTED, snapshot, why
from aiogpu.observe.status import ClientStatus, Program
from aiogpu.testing import World

PROGRAMS = {1: Program("train.py", 4711), 2: Program("", 0)}


def look_at(w: World):
    return snapshot(w.scheduler, {}, w.now, programs=PROGRAMS)


def test_a_node_that_is_ones_alone_tells_of_nobody():
    w = World()
    w.submit("a")
    assert look_at(w).clients == ()
    assert "programs" not in str(look_at(w))


def test_each_program_tells_what_it_runs_wants_and_holds():
    w = World(cpus=2, gpus=1)
    limits = Limits(max_waiting=9)
    w.join(1, 2.0, limits)
    w.join(2)
    w.submit("own")
    w.submit("a", num_gpus=0.5, client=1)
    for number in range(3):
        w.submit(f"t{number}", client=1)
    w.submit("b", client=2)
    w.leave(2)
    status = look_at(w)
    nothing = Limits()
    assert status.clients == (
        ClientStatus(0, "the node's own program", 0, 1.0, 1, 0, {"CPU": 1.0}, nothing),
        ClientStatus(1, "train.py", 4711, 2.0, 1, 3, {"CPU": 1.0, "GPU": 0.5}, limits),
        ClientStatus(2, "", 0, 1.0, 0, 1, {}, nothing, has_left=True),
    )
    assert [shape.client for shape in status.shapes] == [2, 1]
    assert [task.client for task in status.waiting] == [2, 1, 1, 1]
    lines = str(status).splitlines()
    start = lines.index("programs")
    assert [line.split() for line in lines[start + 1 : start + 4]] == [
        [
            "train.py",
            "pid",
            "4711",
            "1",
            "run",
            "3",
            "wait",
            "weight",
            "2",
            "{CPU:",
            "1,",
            "GPU:",
            "0.5}",
        ],
        ["the", "node's", "own", "program", "1", "run", "0", "wait", "{CPU:", "1}"],
        ["program", "2", "0", "run", "1", "wait", "has", "left"],
    ]


def test_the_nodes_own_program_alone_is_no_news():
    w = World()
    w.join(1)
    w.leave(1)
    w.submit("own")
    assert len(look_at(w).clients) == 1
    assert "programs" not in str(look_at(w))


def test_a_node_whose_own_program_does_nothing_lists_the_others():
    w = World()
    w.join(1)
    assert [one.id for one in look_at(w).clients] == [1]


def test_a_node_that_is_being_stopped_says_so():
    w = World()
    status = replace(look_at(w), draining=12.0)
    told = "is being stopped: no new work; what runs has 12 s to end"
    assert str(status).splitlines()[0] == told
    assert repr(status).startswith(f"<NodeStatus {told}; CPU ")


def test_a_task_tells_whose_go_before_it():
    w = World(cpus=1)
    w.join(1)
    w.join(2)
    w.submit("own")
    w.submit("a", client=1)
    w.submit("b", client=2)
    w.submit("own2")
    for name, rivals in (("a", ()), ("own2", ("train.py", "program 2"))):
        record = w.scheduler.tasks[w.tasks[name].id]
        told = why(w.scheduler, record, {}, w.now, PROGRAMS)
        assert (told.rivals, told.rival_count) == (rivals, len(rivals))
    assert str(told).splitlines()[1] == (
        "  tasks of other programs go before it: train.py, program 2"
    )
    assert (told.position, told.of) == (1, 1)


def test_turns_are_foreseen_by_what_tasks_take():
    w = World(cpus=1)
    w.join(1)
    w.join(2, weight=2)
    w.submit("own")
    for number in range(6):
        w.submit(f"a{number}", client=1)
    for number in range(6):
        w.submit(f"b{number}", client=2)
    w.submit("urgent", client=1, priority=1)
    names = [record.spec.name for record in w.scheduler.ready.in_turn()]
    assert names == [
        "urgent",
        "b0",
        "b1",
        "a0",
        "b2",
        "b3",
        "a1",
        "b4",
        "b5",
        "a2",
        "a3",
        "a4",
        "a5",
    ]
    foreseen = [task.name for task in look_at(w).waiting]
    assert foreseen == names
    assert {r.spec.name for r in w.scheduler.ready} == set(names)


def test_sixty_four_programs_with_ten_thousand_tasks_each_are_seen_at_once():
    scheduler = Scheduler(Ledger({"CPU": 4 * UNIT}))
    specs = []
    for number in range(1, 65):
        scheduler.join(0.0, ClientId(number))
        shape = Shape(Request.of({"CPU": UNIT}, {}), (("P", str(number)),))
        specs.append((ClientId(number), TaskSpec("f", shape)))
    task = 0
    for _ in range(300):
        for client, spec in specs:
            task += 1
            scheduler.submit(0.0, TaskId(task), spec, None, None, client)
    gc.collect()
    began = time.process_time()
    status = snapshot(scheduler, {}, 1.0)
    took = time.process_time() - began
    assert len(status.clients) == 64
    assert sum(one.waiting for one in status.clients) == status.waiting_count
    assert len(status.waiting) == LISTED
    assert len({one.client for one in status.waiting}) == 64
    assert took < 0.1


def test_what_programs_have_is_theirs_until_the_node_closes():
    w = World(cpus=1)
    w.join(1)
    w.join(2)
    w.submit("a", client=1)
    w.submit("b", client=2)
    w.advance(3.0)
    w.close()
    assert set(w.told.values()) == {"abandoned"}
    w.run_dry()
    assert w.scheduler.is_closed
