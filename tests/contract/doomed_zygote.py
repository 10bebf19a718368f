"""Preloaded into a zygote: ends it while the file exists that `DOOM` names."""

import os
import signal

if os.path.exists(os.environ.get("DOOM", "")):
    os.kill(os.getpid(), signal.SIGKILL)
