"""Written stories: a false expectation fails at its step."""

import pytest

from tests.core.builders import World


@pytest.mark.parametrize(
    "wrong",
    [
        *("running =", "running = a", "running = a b c", "running has c"),
        *("running lacks a", "waiting = a", "told = b:settled", "told = c:lost"),
        *("told has d:settled", "free = CPU:1", "free has GPU:1", "killed = 1"),
        *("free_gpus = 0 1", "free_gpus has 0", "gpus_of a = 1"),
    ],
)
def test_false_expectation_in_a_story_fails(wrong):
    w = World(cpus=3, gpus=2).play("""
        submit a gpus=0.25 environment=X:1; submit c b cpus=0.5 (they are small)
        finish c; running = a b; running has b; running lacks c; told = c:settled
        told lacks a b; free = CPU:1.5 GPU:1.75; free has CPU:1.5; killed =
        free_gpus = 0.75 1; gpus_of a = 0
    """)
    with pytest.raises(AssertionError, match=wrong.split(maxsplit=1)[0]):
        w.play(f"pass_over; {wrong}")
