"""The claims of a run: how often each was checked, and when it did not hold."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

SHOWN: Final = 10
"""Failures of one claim that are shown."""


@dataclass(slots=True)
class Claim:
    """A statement that must hold at each check.

    Attributes:
        checks: how often it was checked.
        failures: each time that it did not hold, in words.
    """

    checks: int = 0
    failures: list[str] = field(default_factory=list)


class Record:
    """The claims and figures of a whole run.

    Attributes:
        figures: what was counted, by what it is.
        series: what was measured at each idle phase, by what it is.
    """

    def __init__(self) -> None:
        self.claims: dict[str, Claim] = {}
        self.figures: dict[str, Counter[str]] = {}
        self.series: dict[str, list[float]] = {}
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self._begun

    @property
    def holds(self) -> bool:
        """Whether no check of any claim has failed."""
        return not any(claim.failures for claim in self.claims.values())

    def check(self, claim: str, is_so: bool, detail: str = "") -> None:
        """Check a claim once; `detail` says what is so instead."""
        entry = self.claims.setdefault(claim, Claim())
        entry.checks += 1
        if not is_so:
            entry.failures.append(f"[{self.seconds:.0f} s] {detail}")
            print(f"FAILED: {claim}: {detail}", flush=True)

    def check_none(self, claim: str, wrong: list[str]) -> None:
        """Check a claim that holds if nothing is wrong."""
        self.check(claim, not wrong, "; ".join(wrong[:SHOWN]))

    def add(self, what: str, counted: Counter[str] | dict[str, int]) -> None:
        """Add to figures."""
        self.figures.setdefault(what, Counter()).update(counted)

    def table(self) -> str:
        """Render the figures and the claims."""
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
            lines += [f"    {failure}" for failure in claim.failures[:SHOWN]]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return all of it."""
        return {
            "seconds": round(self.seconds, 1),
            "held": self.holds,
            "figures": {what: dict(n) for what, n in self.figures.items()},
            "series": self.series,
            "claims": {
                name: {"checks": claim.checks, "failures": claim.failures}
                for name, claim in self.claims.items()
            },
        }
