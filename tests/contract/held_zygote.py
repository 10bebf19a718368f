"""Preloaded into a zygote: its import waits at the gate that `HOLD` names."""

import os

from tests.support.gate import pass_gate

if path := os.environ.get("HOLD"):
    pass_gate(path, "import")
