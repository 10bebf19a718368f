"""Public tools for tests of aiogpu and of what is built on it.

`World` is a scheduler with paper workers and paper GPUs, `HandClock` a clock moved by
hand. Nothing here starts a process, opens a socket or reads a clock. Fixtures for
pytest stand apart, in `aiogpu.testing.fixtures`, which alone needs pytest.
"""

from aiogpu.testing.clock import HandClock
from aiogpu.testing.world import World

__all__ = ["HandClock", "World"]
