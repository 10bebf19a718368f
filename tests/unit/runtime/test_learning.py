"""Which modules are learnt: by their cost, how often, and never some."""

from __future__ import annotations

import pytest

from aiogpu.runtime.zygote.generations import (
    DEAR,
    DEVICE_MODULES,
    MOST,
    NOT_CHEAP,
    REMEMBERED,
    Learning,
    sees_devices,
)


def heard(learning: Learning, **costs: int) -> bool:
    return learning.hear(tuple(costs), tuple(costs.values()))


def test_what_was_dear_once_is_learnt_at_once() -> None:
    learning = Learning(())
    assert not heard(learning, cheap=DEAR - 1)
    assert heard(learning, dear=DEAR)
    assert learning.modules == ["dear"]


def test_what_is_not_cheap_is_learnt_from_the_second_worker() -> None:
    learning = Learning(())
    assert not heard(learning, a=NOT_CHEAP, b=NOT_CHEAP - 1)
    assert heard(learning, a=NOT_CHEAP, b=NOT_CHEAP - 1)
    assert learning.modules == ["a"]


def test_nothing_is_learnt_twice() -> None:
    learning = Learning(["named"], ["given"])
    assert not heard(learning, named=DEAR, given=DEAR)
    assert heard(learning, new=DEAR)
    assert not heard(learning, new=DEAR)
    assert learning.modules == ["given", "new"]


def test_the_order_is_that_in_which_they_were_seen() -> None:
    learning = Learning(())
    heard(learning, b=DEAR, a=DEAR)
    assert learning.modules == ["b", "a"]


def test_what_is_unfit_never_comes_back() -> None:
    learning = Learning(())
    heard(learning, bad=DEAR, good=DEAR)
    learning.leave_out("bad", "it left 1 threads running")
    assert learning.modules == ["good"]
    assert not heard(learning, bad=DEAR)
    learning.prove(["bad", "good"])
    assert learning.proven == {"good"}
    learning.leave_out("good", "it crashed")
    assert (learning.modules, learning.proven) == ([], set())
    assert set(learning.left_out) == {"bad", "good"}
    learning.leave_out("never seen", "")


def test_what_is_given_was_proven() -> None:
    assert Learning((), ["a", "b"]).proven == {"a", "b"}


@pytest.mark.parametrize(
    ("module", "is_seen"),
    [
        *((module, True) for module in sorted(DEVICE_MODULES)),
        ("cupy.linalg", True),
        ("numba.cuda.random", True),
        ("numba", False),
        ("cupyx", False),
        ("torch.cuda", False),
    ],
)
def test_what_must_see_devices_is_not_learnt(module: str, is_seen: bool) -> None:
    assert sees_devices(module) is is_seen
    assert Learning(()).hear([module], [DEAR]) is not is_seen


def test_there_is_an_end_of_learning() -> None:
    learning = Learning(())
    names = [f"m{number}" for number in range(MOST + 1)]
    assert learning.hear(names, [DEAR] * len(names))
    assert learning.modules == names[:-1]


def test_what_is_remembered_is_bounded() -> None:
    learning = Learning(())
    names = [f"m{number}" for number in range(REMEMBERED + 1)]
    costs = [NOT_CHEAP] * len(names)
    assert not learning.hear(names, costs)
    assert not learning.hear(names[-1:], costs)
    assert learning.hear(names[:1], costs)
