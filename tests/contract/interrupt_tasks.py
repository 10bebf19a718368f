"""Tasks that are interrupted where it matters: light to import."""

from __future__ import annotations

from pathlib import Path

import aiogpu
from tests.support.gate import pass_gate, say


class Cleaner:
    """Its `finally` takes its time."""

    def clean_up(self, path: str, cleaned: str) -> None:
        """Wait to be interrupted, then clean up as long as the gate holds."""
        try:
            pass_gate(path, "runs")
        finally:
            pass_gate(path, "cleans")
            Path(cleaned).touch()

    def rest(self) -> None:
        """Come after what was called before."""


@aiogpu.remote
def clean_up(path: str, cleaned: str) -> None:
    Cleaner().clean_up(path, cleaned)


CleanerActor = aiogpu.remote(Cleaner)


@aiogpu.remote
def write_and_go_on(path: str, size: int, went_on: str) -> None:
    """Print more than the socket takes, then go on."""
    say(path, "writes")
    print("-" * size)
    Path(went_on).touch()
