"""Which vendors aiogpu knows, in the order in which they are asked.

Apart from `base`, which every vendor's file describes itself by, so that no two
files import each other. Importing it loads no vendor's library.
"""

from __future__ import annotations

from typing import Final

from .base import Accelerator
from .nvidia import Nvidia

INSTALLED: Final[tuple[Accelerator, ...]] = (Nvidia(),)
