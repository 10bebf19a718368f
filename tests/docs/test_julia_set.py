"""The Julia set of the demo: bands add up to the serial picture."""

from __future__ import annotations

import numpy as np
import pytest
from julia_set import STEPS, Band, Picture, Scene, escape_counts

RAN = ((0,), 1, 0.0, 1.0)


@pytest.mark.parametrize("bands", [1, 3, 17, 40])
def test_bands_add_up_to_the_serial_picture(bands: int) -> None:
    scene = Scene.of(40, 7)
    picture = Picture(scene)
    for number in range(bands):
        first, end = scene.band(number, bands)
        picture.add(Band(number, first, escape_counts(scene, first, end), *RAN))
    assert picture.equals_serial()


def test_a_wrong_pixel_is_found() -> None:
    scene = Scene.of(40, 7)
    picture = Picture(scene)
    counts = escape_counts(scene, 0, 40)
    counts[3, 5] ^= 1
    picture.add(Band(0, 0, counts, *RAN))
    assert not picture.equals_serial()


def test_the_set_is_symmetric_and_has_an_interior() -> None:
    counts = escape_counts(Scene.of(40, 7), 0, 40)
    assert np.array_equal(counts, counts[::-1, ::-1])
    assert counts.max() == STEPS
    assert counts.min() < 5


def test_a_preview_is_dark_where_bands_are_missing() -> None:
    scene = Scene.of(40, 7)
    picture = Picture(scene)
    assert picture.preview(3, 2) == [[0, 0, 0], [0, 0, 0]]
    picture.add(Band(1, 20, np.full((20, 40), STEPS, np.uint16), *RAN))
    assert picture.preview(3, 2) == [[0, 0, 0], [15, 15, 15]]


def test_a_seed_fixes_the_shape() -> None:
    assert Scene.of(40, 1) == Scene.of(40, 1) != Scene.of(40, 2)
