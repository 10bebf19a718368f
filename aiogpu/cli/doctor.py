"""`aiogpu doctor`: what this machine allows, tried and told.

One line for each mechanism; what is not well says what that means and what to do.
What is tried, and how, is `aiogpu.runtime.checks`'s business.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Final

import click
from rich.console import Console
from rich.text import Text

from aiogpu.runtime.checks.doctor import all_checks
from aiogpu.runtime.checks.finding import Check, Finding, Level, examine

STYLES: Final = {Level.OK: "green", Level.WARN: "yellow", Level.MISSING: "red"}


@click.command()
@click.option(
    "--imports",
    is_flag=True,
    help="Import numpy, torch and the like too, each in a process of its own.",
)
@click.option("--json", "as_json", is_flag=True, help="Tell programs, not people.")
def doctor(imports: bool, as_json: bool) -> int:
    """Try which mechanisms this machine allows, and say what to do.

    Nothing is changed or left behind. The exit code is 1 if no node can start here,
    0 otherwise.
    """
    return run(all_checks(with_imports=imports), as_json=as_json)


def run(checks: Sequence[Check], *, as_json: bool = False) -> int:
    """Run checks and print what they find; gives the exit code."""
    # What a check logs, it finds as well.
    logging.getLogger("aiogpu").addHandler(logging.NullHandler())
    if as_json:
        findings = list(examine(checks))
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        findings = list(_shown(examine(checks), Console(highlight=False)))
    return int(any(finding.is_fatal for finding in findings))


def _shown(findings: Iterable[Finding], screen: Console) -> Iterator[Finding]:
    """Print each finding as it comes, and a line that sums up."""
    counts = dict.fromkeys(Level, 0)
    is_fatal = False
    for finding in findings:
        screen.print(line(finding), soft_wrap=True)
        counts[finding.level] += 1
        is_fatal = is_fatal or finding.is_fatal
        yield finding
    told = ", ".join(f"{count} {level.value}" for level, count in counts.items())
    verdict = "No node can start here" if is_fatal else "Nodes can start here"
    screen.print(f"{verdict}: {told}.", soft_wrap=True)


def line(finding: Finding) -> Text:
    """One finding on one line."""
    text = Text()
    text.append(f"{finding.level.value:<8}", STYLES[finding.level])
    text.append(f"{finding.name:<14}  ", "bold")
    told = finding.found.rstrip(".")
    after = [part for part in (finding.means, finding.advice) if part]
    text.append(" ".join([f"{told}.", *after]) if after else told)
    return text
