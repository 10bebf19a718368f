"""Preloaded into a zygote: this import kills the zygote, or waits.

The import kills the zygote while the file exists that `DOOM` names, and waits at the
gate that `HOLD` names.
"""

import os
import signal

from tests.support.gate import pass_gate

if os.path.exists(os.environ.get("DOOM", "")):
    os.kill(os.getpid(), signal.SIGKILL)
if path := os.environ.get("HOLD"):
    pass_gate(path, "import")
