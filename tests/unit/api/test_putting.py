"""`put` gives a handle once it is awaited, and no sooner."""

import pytest

import aiogpu


@pytest.fixture
async def node():
    async with aiogpu.init(address="inline", num_cpus=1) as session:
        yield session


@aiogpu.remote
def same(value):
    return value


async def test_awaited_it_is_a_handle(node):
    handle = await aiogpu.put([1])
    assert isinstance(handle, aiogpu.Handle)
    assert await handle == [1]
    assert await same.remote(handle) == [1]


async def test_it_can_be_awaited_again(node):
    putting = aiogpu.put(1)
    assert await putting is await putting


@pytest.mark.parametrize("wrap", [lambda put: put, lambda put: [put]])
async def test_one_that_was_not_awaited_is_no_argument(wrap, node):
    # What to do is said once, and ends with one full stop.
    advice = r"await aiogpu\.put\(value\)`.*[^.]\.$"
    with pytest.raises(aiogpu.errors.SerializationError, match=advice) as caught:
        same.remote(wrap(aiogpu.put(1)))
    assert "Create it inside" not in str(caught.value)
