"""The three standard streams of the `aiogpu` command, whatever it was started with.

Each of them may be closed, be a pipe that nobody reads any more, or a file on a disk
that is full.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

BROKEN_PIPE: Final = 141
"""What shells report of a program that SIGPIPE ended: 128 + 13."""
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def open_streams() -> None:
    """Put nothing where a stream was closed, by `>&-`.

    Otherwise the next socket that is opened becomes the standard output. What an
    encoding cannot say, as ASCII none of the bars, is a question mark.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # What a command is run with, or a node, has it as well.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


@contextmanager
def written_out() -> Iterator[None]:
    """Have all written when the block ends.

    Raises:
        SystemExit: nobody reads it, as after `| head`; that is no error to be told.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        let_go()
        sys.exit(BROKEN_PIPE)


def let_go() -> None:
    """Write no more, nor let the exit try it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
