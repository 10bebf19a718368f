"""Programs that stand in documents, run as a reader would run them."""

import os
import re
import subprocess
import sys


def printed_by(program, place):
    """What it prints, process ids as N; it ends well and complains of nothing."""
    path = place / "program.py"
    path.write_text(program)
    ran = subprocess.run(
        [sys.executable, path],
        env={k: v for k, v in os.environ.items() if not k.startswith(("CUDA", "AIO"))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return re.sub(r"\bpid([= ])\d+", r"pid\1N", ran.stdout)
