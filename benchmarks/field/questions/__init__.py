"""The questions, a family a file. None of them knows whom it is asked of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from benchmarks.field.question import Question
from benchmarks.field.questions import (
    calls,
    days,
    isolation,
    starting,
    stopping,
    streams,
    values,
    waiting,
)

_FAMILIES: Final = (
    calls,
    values,
    streams,
    stopping,
    isolation,
    days,
    starting,
    waiting,
)

QUESTIONS: Final[Mapping[str, Question]] = {
    question.name: question for family in _FAMILIES for question in family.QUESTIONS
}
"""In the order in which they are asked."""
