"""What is drawn covers each value, is always the same, and is few."""

from __future__ import annotations

from itertools import product

from tests.support.sampling import covering

MATRIX = {
    f"{engine}-{kind}-{size}": frozenset(
        {("engine", engine), ("kind", kind), ("size", size)}
    )
    for engine, kind, size in product(("local", "inline"), "abcde", range(3))
}


def test_each_value_is_in_a_case_and_no_more_than_needed() -> None:
    drawn = covering(MATRIX)
    found = set().union(*(MATRIX[name] for name in drawn))
    assert found == set().union(*MATRIX.values())
    assert len(drawn) == 5


def test_the_order_of_the_cases_does_not_matter() -> None:
    assert covering(MATRIX) == covering(dict(reversed(MATRIX.items())))


def test_a_case_by_itself_is_drawn() -> None:
    assert covering({"only": frozenset({("engine", "local")})}) == {"only"}
    assert covering({}) == set()
