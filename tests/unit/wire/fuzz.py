"""Fuzzes aiogpu's readers with mutations of valid bytes.

    python -m tests.unit.wire.fuzz --seconds 60 --seed 1
    python -m tests.unit.wire.fuzz --seconds 600 --seed 2 --keep

Begins with the kept cases and with conversations in which all is said that may be.
What is spoilt and takes a way through the code that none took before is spoilt further.
`--keep` replaces tests/unit/wire/corpus by few, short cases that take all ways found.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final
from zlib import crc32

from aiogpu.client.spec_codec import dump_spec
from aiogpu.serialization.payload import Contents, pack
from aiogpu.wire.codec import encode
from aiogpu.wire.codec import pack as pack_fields
from aiogpu.wire.connection import FROM_PEER, TO_PEER, greeting
from aiogpu.wire.messages import TAGS, Bind
from tests.unit.runtime import fakes
from tests.unit.wire.cases import (
    CORPUS,
    DESCRIPTORS,
    NODE,
    ROLES,
    TARGETS,
    Case,
    Step,
    example,
    kept,
    run,
)
from tests.unit.wire.spoiling import frames_in, spoilt

HANGS: Final = 60
"""Seconds after which a case that has not ended is said to hang."""
AT_ONCE: Final = 50
"""Cases between looks at the clock."""
LONGEST: Final = 1 << 20
"""Bytes of the longest case that is spoilt further."""
KEPT: Final = 1024
"""Bytes of the longest case that is kept."""
LEAST: Final = 3
"""Bytes, above which some are tried to leave out of what is kept."""


def valid() -> list[Case]:
    """Return valid conversations, and other valid input."""
    cases = []
    for role in ROLES:
        kinds = sorted(FROM_PEER[role], key=TAGS.__getitem__)
        heard = sorted(TO_PEER[role], key=TAGS.__getitem__)
        says = greeting(role, 1 << 26, 4711) + b"".join(
            encode(example(k)) for k in kinds
        )
        hears = b"".join(encode(example(kind)) for kind in heard)
        cases += [Case(NODE, 0, says), Case(role, 0, hears), Case(role, 7, hears)]
    whole = Contents(
        *(b"pickle", 1 << 60, 4096, (0, 10, 64, 20), (b"a", b"b"), (1, 2), (0, "x")),
        *((b"part", pack(Contents(b"within"))), (3, -4), 2),
    )
    cases += [Case("parcel", 0, pack(one)) for one in (Contents(b"p"), whole)]
    cases.append(Case("terms", 0, dump_spec(fakes.func())))
    grant = Bind({"A": "1"}, {"gpu": (0, "MIG-1")}, (5,), (0, 1))
    cases.append(Case("grant", 0, pack_fields(grant)))
    cases.append(Case("grant", 0, pack_fields((1, {}, (), {}))))
    cases.append(Case(DESCRIPTORS, 0, b"\1\10" + bytes(8) + b"\2\20" + bytes(16)))
    return cases


class Fuzzer:
    """Mutates cases, and keeps those that reach new code.

    Attributes:
        cases: those that have, and what they have gone through.
        tried: how many cases were run.
    """

    def __init__(self, seed: int) -> None:
        self.cases: dict[Case, frozenset[Step]] = {}
        self.tried = 0
        self._pools: defaultdict[str, list[Case]] = defaultdict(list)
        self._seen: set[Step] = set()
        self._random = random.Random(seed)

    def begin(self) -> None:
        """Run the kept cases and the valid ones."""
        for case in (*kept().values(), *valid()):
            self.try_out(case)

    def spoil(self) -> None:
        """Run one mutation of the known cases."""
        source = self._random
        pool = self._pools[source.choice(TARGETS)]
        self.try_out(spoilt(source.choice(pool), source.choice(pool), source))

    def try_out(self, case: Case) -> None:
        """Run a case, and remember it if it reaches new code.

        Raises:
            AssertionError: it breaks what a reader promises; the case is a note of it.
        """
        self.tried += 1
        try:
            went = run(case)
        except BaseException as error:
            error.add_note(repr(case)[:400])
            error.add_note(f"kept as {note(case)}")
            raise
        if not went <= self._seen and len(case.data) <= LONGEST:
            self.cases[case] = went
            self._pools[case.target].append(case)
            self._seen |= went


def note(case: Case) -> Path:
    """Write a failing case to a file; return the path."""
    path = Path(f"fuzz-{name_of(case)}")
    path.write_bytes(case.pack())
    return path


def name_of(case: Case) -> str:
    """Return the file name of a case, from its content."""
    return f"{case.target}-{crc32(case.pack()):08x}"


def few(cases: dict[Case, frozenset[Step]]) -> list[Case]:
    """Choose few short cases with the coverage of all short ones."""
    left = {case: went for case, went in cases.items() if len(case.data) <= KEPT}
    missing = set().union(*left.values())
    chosen = []
    while missing:
        best = max(left, key=lambda c: (len(left[c] & missing), -len(c.data), c))
        needed = left[best] & missing
        chosen.append(shortened(best, needed))
        missing -= needed
    return sorted(set(chosen))


def shortened(case: Case, needed: frozenset[Step] | set[Step]) -> Case:
    """Shorten a case without losing the needed steps."""
    if case.target in (NODE, *ROLES):
        frames = frames_in(case.data)
        for place in reversed(range(len(frames))):
            fewer = frames[:place] + frames[place + 1 :]
            if needed <= run(case._replace(data=b"".join(fewer))):
                frames = fewer
        case = case._replace(data=b"".join(frames))
    size = len(case.data) // 2
    while size > LEAST:
        start = 0
        while start < len(case.data):
            shorter = case._replace(data=case.data[:start] + case.data[start + size :])
            if needed <= run(shorter):
                case = shorter
            else:
                start += size
        size //= 2
    return case


def keep(cases: dict[Case, frozenset[Step]]) -> None:
    """Replace tests/unit/wire/corpus by a few of these cases."""
    chosen = few(cases)
    for path in CORPUS.iterdir():
        path.unlink()
    for case in chosen:
        (CORPUS / name_of(case)).write_bytes(case.pack())
    print(f"{len(chosen)} cases, {sum(len(case.data) for case in chosen)} bytes")


def fuzz(seconds: float, seed: int, tell: Callable[[str], object] = print) -> Fuzzer:
    """Fuzz for some seconds; raise the error of the first failing case."""
    fuzzer, ends = Fuzzer(seed), time.monotonic() + seconds
    fuzzer.begin()
    try:
        while time.monotonic() < ends:
            faulthandler.dump_traceback_later(HANGS, exit=True)
            for _ in range(AT_ONCE):
                fuzzer.spoil()
    finally:
        faulthandler.cancel_dump_traceback_later()
    tell(f"seed {seed}: {fuzzer.tried} cases, {len(fuzzer.cases)} of which were new")
    return fuzzer


def main() -> None:
    """Run the fuzzer from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="replace the corpus")
    options = parser.parse_args()
    fuzzer = fuzz(options.seconds, options.seed, partial(print, file=sys.stderr))
    if options.keep:
        keep(fuzzer.cases)


if __name__ == "__main__":
    main()
