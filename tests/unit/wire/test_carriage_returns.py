"""What a terminal would show of a line with carriage returns in it."""

from __future__ import annotations

import pytest

from aiogpu.wire.messages import visible


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"", b""),
        (b"plain", b"plain"),
        (b"   ", b"   "),
        (b"from elsewhere\r", b"from elsewhere"),
        (b"\r10%\r20%", b"20%"),
        (b"10%\r20%\r", b"20%"),
        (b"\r10%\r    \r", b""),
        (b"\r10%\r    ", b""),
        (b"\r", b""),
    ],
)
def test_what_is_visible_of_a_line(line: bytes, shown: bytes) -> None:
    assert visible(line) == shown
