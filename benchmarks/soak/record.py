"""What is claimed, how often it was looked at, and when it did not hold."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

TOLD: Final = 10
"""Failures of one claim that are told."""


@dataclass(slots=True)
class Claim:
    """One of them.

    Attributes:
        checks: how often it was looked at.
        failures: each time that it did not hold, in words.
    """

    checks: int = 0
    failures: list[str] = field(default_factory=list)


class Record:
    """Of a whole run.

    Attributes:
        figures: what was counted, by what it is.
        series: what was weighed at each rest, by what it is.
    """

    def __init__(self) -> None:
        self.claims: dict[str, Claim] = {}
        self.figures: dict[str, Counter[str]] = {}
        self.series: dict[str, list[float]] = {}
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        """For how long it has gone on."""
        return time.monotonic() - self._begun

    @property
    def has_held(self) -> bool:
        """Whether each claim has, as often as it was looked at."""
        return not any(claim.failures for claim in self.claims.values())

    def check(self, claim: str, is_so: bool, told: str = "") -> None:
        """Look once at a claim; `told` says what is so instead."""
        entry = self.claims.setdefault(claim, Claim())
        entry.checks += 1
        if not is_so:
            entry.failures.append(f"[{self.seconds:.0f} s] {told}")
            print(f"FAILED: {claim}: {told}", flush=True)

    def look(self, claim: str, wrong: list[str]) -> None:
        """The same; it holds if nothing is wrong."""
        self.check(claim, not wrong, "; ".join(wrong[:TOLD]))

    def add(self, what: str, counted: Counter[str] | dict[str, int]) -> None:
        """Add to figures."""
        self.figures.setdefault(what, Counter()).update(counted)

    def table(self) -> str:
        """The figures and the claims, for people."""
        lines = []
        for what, counted in self.figures.items():
            pairs = (f"{name} {n}" for name, n in counted.most_common())
            lines.append(f"{what}: {', '.join(pairs)}")
        for what, samples in self.series.items():
            lines.append(f"{what}: {' '.join(f'{each:g}' for each in samples)}")
        width = max(map(len, self.claims), default=0)
        lines += ["", f"{'claim':{width}}  checks  verdict"]
        for name, claim in self.claims.items():
            verdict = f"FAILED {len(claim.failures)} x" if claim.failures else "held"
            lines.append(f"{name:{width}}  {claim.checks:6}  {verdict}")
            lines += [f"    {told}" for told in claim.failures[:TOLD]]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "seconds": round(self.seconds, 1),
            "held": self.has_held,
            "figures": {what: dict(n) for what, n in self.figures.items()},
            "series": self.series,
            "claims": {
                name: {"checks": claim.checks, "failures": claim.failures}
                for name, claim in self.claims.items()
            },
        }
