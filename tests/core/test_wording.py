"""How figures and lists are written for people."""

import pytest

from aiogpu.core.model.text import in_words, listing, printable, span, terms


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[(-0.1, "0.0 s"), (0.04, "0.0 s"), (0.25, "0.2 s"), (9.94, "9.9 s")],
        *[(9.95, "10 s"), (119.4, "119 s"), (119.5, "2 min"), (7100, "118 min")],
        *[(7170, "2 h"), (360_000, "100 h")],
    ],
)
def test_a_span_of_time(seconds, text):
    assert span(seconds) == text


def test_a_listing_tells_the_first_few():
    assert listing([], 0) == ""
    assert listing("abc", 3) == "a, b, c"
    assert listing("abcdefghij", 10) == "a, b, c, d, e, f, g, h, and 2 more"
    assert listing("ab", 5) == "a, b, and 3 more"


def test_words():
    assert [in_words(parts) for parts in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        *("", "a", "a and b", "a, b and c")
    ]


def test_terms():
    assert terms({"CPU": 1.0, "GPU": 0.25}.items()) == "{CPU: 1, GPU: 0.25}"


def test_names_can_do_nothing_to_a_terminal():
    assert printable("mödel 日本") == "mödel 日本"
    assert printable("a\nb\x1b[31m\u202ec") == "a?b?[31m?c"
