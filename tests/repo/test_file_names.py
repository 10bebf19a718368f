"""Each file of tests has a name of its own: pytest imports them by that alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_two_files_of_tests_have_one_name() -> None:
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert len(names) > 100
    assert [name for name, count in names.items() if count > 1] == []
