"""Misspelt options of functions are told as those of tasks are, with the nearest."""

import inspect
from collections.abc import Callable

import pytest

import aiogpu
from aiogpu.api.options import unknown_option
from aiogpu.errors import MisuseError, OptionError


@aiogpu.remote
def length(text: str) -> int:
    return len(text)


@aiogpu.remote
class Counter:
    pass


MISSPELT = {
    "init": (lambda: aiogpu.init(num_gpu=1), "num_gpu", "a node", "num_gpus"),
    "lease": (lambda: aiogpu.lease(gpu=1), "gpu", "a lease", None),
    "placement": (
        lambda: aiogpu.placement([{"GPU": 1}], stratgy="PACK"),
        *("stratgy", "a placement", "strategy"),
    ),
    "batch": (lambda: aiogpu.batch(max_sise=2), "max_sise", "batch()", "max_size"),
    "pool": (
        lambda: aiogpu.ActorPool(Counter, maxsize=2),
        *("maxsize", "a pool of actors", "max_size"),
    ),
    "wait": (lambda: aiogpu.wait([], time_out=1), "time_out", "wait()", "timeout"),
    "get": (lambda: aiogpu.get([], timeot=1), "timeot", "get()", "timeout"),
    "map": (lambda: length.map([], limits=1), "limits", "map()", "limit"),
    "kill": (
        lambda: aiogpu.kill(None, norestart=True),
        *("norestart", "kill()", "no_restart"),
    ),
    "remote": (lambda: aiogpu.remote(num_gpu=1), "num_gpu", "a task", "num_gpus"),
    "method": (
        lambda: aiogpu.method(num_return=1),
        *("num_return", "a method", "num_returns"),
    ),
}


@pytest.mark.parametrize(
    ("call", "misspelt", "of_what", "nearest"), MISSPELT.values(), ids=MISSPELT
)
def test_a_misspelt_option_is_named_with_the_nearest_and_all_others(
    call: Callable[[], object], misspelt: str, of_what: str, nearest: str | None
) -> None:
    with pytest.raises(OptionError) as caught:
        call()
    said, _, known = str(caught.value).partition(" There are: ")
    hint = f" Did you mean {nearest}?" if nearest else ""
    assert said == f"{misspelt} is not an option of {of_what}.{hint}"
    assert known.endswith(".")
    assert nearest is None or nearest in known.rstrip(".").split(", ")


def test_the_options_of_a_node_are_all_told() -> None:
    with pytest.raises(OptionError) as caught:
        aiogpu.init(gpus=1)  # type: ignore[call-arg]
    names = inspect.signature(aiogpu.init).parameters
    told = unknown_option("gpus", names, "a node")
    assert str(caught.value) == str(told)


@pytest.mark.parametrize("function", [aiogpu.init, aiogpu.lease])
def test_an_option_without_its_name_is_told_so(function: Callable[..., object]) -> None:
    with pytest.raises(
        MisuseError, match=rf"^{function.__name__}\(4\): the options .* go by name\. "
    ):
        function(4)


async def test_what_is_spelt_well_is_no_matter_of_this() -> None:
    async with aiogpu.init(address="inline"):
        async with aiogpu.lease(num_cpus=1) as share:
            assert share.is_held
        found = [one async for one in length.map(iterable=["a", "bc"], limit=1)]
    assert found == [1, 2]
