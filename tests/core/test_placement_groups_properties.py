"""The same stories as those of the scheduler, with placement groups in them."""

from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from aiogpu.core.scheduler.workers import BOUNDLESS
from aiogpu.errors import InfeasibleError, LimitError
from tests.core.test_scheduler_properties import (
    PATIENCE,
    SETTINGS,
    NodeMachine,
    lies_in_bundles,
)
from tests.support.sampling import examples

BUNDLES = st.lists(
    st.sampled_from(
        [
            {"GPU": 1},
            {"GPU": 0.5},
            {"GPU": 0.3, "CPU": 1},
            {"CPU": 1},
            {"GPU": 1, "CPU": 1, "type": "A100"},
            {"license": 0.5},
            {"GPU": 0.5, "gpu_memory": 3 << 30},
            {"gpu_memory": 5 << 30},
        ]
    ),
    min_size=1,
    max_size=3,
)


def is_placement_group(task) -> bool:
    """Whether a paper task is a placement group."""
    return lies_in_bundles(task.spec.shape.request)


class SharedGangMachine(NodeMachine):
    """A node of several programs, some of which ask for placement groups."""

    @rule(
        bundles=BUNDLES,
        strategy=st.sampled_from(["PACK", "SPREAD"]),
        priority=st.integers(-1, 1),
        client=st.integers(0, 3),
    )
    def ask_for_a_gang(self, bundles, strategy, priority, client):
        name = f"t{len(self.w.tasks)}"
        options = {
            "strategy": strategy,
            "priority": priority,
            "client": self.joined(client),
        }
        with suppress(LimitError, InfeasibleError):
            self.w.placement_group(name, *bundles, **options)

    @rule(
        data=st.data(),
        index=st.integers(-1, 1),
        amounts=st.sampled_from([(0, 0.25), (0, 0.5), (1, 0), (1, 0.5), (0, 1)]),
        options=st.fixed_dictionaries(
            {},
            optional={
                "max_calls": st.integers(0, 2),
                "is_endless": st.booleans(),
                "retries_oom": st.booleans(),
                "timeout": st.sampled_from([0.5, 3.0]),
                "priority": st.integers(-1, 1),
            },
        ),
    )
    def submit_in_a_gang(self, data, index, amounts, options):
        placement_groups = [
            name for name, task in self.w.tasks.items() if is_placement_group(task)
        ]
        if not placement_groups:
            return
        placement_group = data.draw(st.sampled_from(placement_groups))
        bundles = self.w.tasks[
            placement_group
        ].spec.shape.request.placement_group.bundles
        parents = sorted(self.w.running | self.w.blocked)
        parent = data.draw(st.sampled_from([None, *parents])) if parents else None
        cpus, gpus = amounts
        with suppress(LimitError):
            self.w.submit_in(
                placement_group,
                f"t{len(self.w.tasks)}",
                min(index, len(bundles) - 1),
                num_cpus=cpus,
                num_gpus=gpus,
                parent=parent,
                **options,
            )

    @precondition(lambda self: self.w.placement_groups)
    @rule(data=st.data())
    def remove_a_gang(self, data):
        self.w.cancel(data.draw(st.sampled_from(sorted(self.w.placement_groups))))


class GangMachine(SharedGangMachine):
    """The same where one program has the node."""

    @initialize(
        starts=st.booleans(),
        exits=st.booleans(),
        revokes=st.booleans(),
        config=PATIENCE,
        most=st.one_of(st.just(BOUNDLESS), st.integers(1, 4)),
    )
    def begin(self, starts, exits, revokes, config, most) -> None:
        super().begin(starts, exits, revokes, config, most, [])

    def join(self) -> None:
        """Nobody else joins."""


class TestGangs(GangMachine.TestCase):
    """The same stories each time, in some seconds."""

    settings = settings(SETTINGS, max_examples=examples(150))


@pytest.mark.slow
class TestGangsAtLength(SharedGangMachine.TestCase):
    """Other stories each time."""

    settings = settings(SETTINGS, derandomize=False, max_examples=1_000)
