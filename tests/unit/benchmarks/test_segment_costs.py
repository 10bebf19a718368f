"""The costs of shared memory are measured in another process, on what it read."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import segments
from benchmarks.segments import Reader, medians, memory_ways, passing_ways


def test_both_tables_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(segments, "LARGE", 1 << 20)
    monkeypatch.setattr(segments, "SIZES", [1 << 14, 1 << 20])
    monkeypatch.setattr(segments, "BLOCKS", 2)
    segments.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line] == [
        *("memcpy", "write,", "write,", "write,", "write,", "map,", "map,"),
        *("bytes", "16384", "1048576"),
    ]
    assert all(float(cell) > 0 for cell in lines[-1].split())


def test_every_way_brings_the_array() -> None:
    reader = Reader()
    ways = passing_ways(reader, np.ones(4096, np.uint64))
    assert set(medians(ways, 2)) == {"frame", "cold segment", "warm segment"}
    # One segment was written again and again, and all others were closed.
    assert reader.warm.bytes_in_use == 0
    assert reader.warm.bytes_warm == 8 * 4096
    reader.close()


def test_writing_takes_time() -> None:
    took = medians(memory_ways(memoryview(bytes(1 << 16))), 1)
    assert len(took) == 7
    assert min(took.values()) > 0
