"""Public tools for tests of aiogpu and of what is built on it.

`World` is a scheduler with paper workers, paper GPUs and a clock moved by hand.
Nothing here starts a process, opens a socket or reads a clock.
"""

from aiogpu.testing.world import World

__all__ = ["World"]
