"""Public tools for tests of aiogpu and of programs that use it.

`World` is a scheduler with simulated workers and GPUs, `HandClock` a clock moved by
hand. They start no process, open no socket and read no clock. Fixtures for pytest are
in `aiogpu.testing.fixtures`, the only module that needs pytest.
"""

from aiogpu.testing.clock import HandClock
from aiogpu.testing.world import World

__all__ = ["HandClock", "World"]
