"""What is said of a name that the package has not."""

from __future__ import annotations

import pytest

import aiogpu
from aiogpu.api.usage_errors import NAMES_OF_RAY


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("wiat", ": did you mean 'wait'\\?$"),
        ("cancel", ": write `handle.cancel\\(\\)`$"),
        ("exceptions", "in `aiogpu.errors`"),
        ("nothing_like_it", "'nothing_like_it'$"),
        ("_wait", "'_wait'$"),
    ],
)
def test_the_nearest_name_or_what_there_is_in_place_of_rays(
    name: str, told: str
) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'") as raised:
        getattr(aiogpu, name)
    with pytest.raises(AttributeError, match=told):
        raise raised.value


def test_names_of_ray_that_it_has_are_not_among_them() -> None:
    assert not NAMES_OF_RAY.keys() & set(dir(aiogpu))
