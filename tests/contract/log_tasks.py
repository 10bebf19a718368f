"""Tasks that print and log: light to import, since workers import them."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import aiogpu


def talk(word: str) -> int:
    print(word)
    print(f"{word} on stderr", file=sys.stderr)
    os.write(1, f"{word} raw\n".encode())
    return os.getpid()


def parent(word: str) -> int:
    pid: int = aiogpu.get(aiogpu.remote(talk).remote(word))
    return pid


def flood(lines: int) -> int:
    for _ in range(lines):
        print("x" * 1000)
    return lines


def fail() -> None:
    raise KeyError("x")


class Strange:
    """Cannot be pickled, and is no plain value."""

    def __reduce__(self) -> Any:
        raise TypeError

    def __repr__(self) -> str:
        return "<Strange>"


class Logs:
    def talk(self) -> int:
        log = logging.getLogger("lib.part")
        log.warning("%s of %d", "one", 2, extra={"mine": {"a": [1]}})
        log.error("%s", Strange(), extra={"mine": Strange()})
        try:
            raise KeyError("x")
        except KeyError:
            log.exception("failed")
        log.debug("not shown")
        return os.getpid()


def log_by_child() -> int:
    return aiogpu.get(aiogpu.remote(Logs().talk).remote())
