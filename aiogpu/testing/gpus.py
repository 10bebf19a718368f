"""A pytest plugin that gives each test process a share of a GPU: `--gpus 0.25`.

A project enables it by `pytest_plugins = ["aiogpu.testing.gpus"]` in its top
`conftest.py`, or by `-p aiogpu.testing.gpus`. It is not enabled by itself, because
other projects have an option `--gpus` of their own.

With pytest-xdist each worker process has a lease of its own, so no two share more of a
GPU than it has. `CUDA_VISIBLE_DEVICES` is set when the worker starts, before it imports
a conftest or a test module. A worker that is started again in place of a crashed one
has the same lease. Without xdist the lease is taken before tests are collected.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

import pytest

from aiogpu.linux.interpreter import interpreter_command

OPTION: Final = "--gpus"
_PATIENCE: Final = 10.0
"""Seconds that the holder has to give the leases back."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option and its setting in the configuration file."""
    group = parser.getgroup("aiogpu", "shares of GPUs")
    about = "GPUs of each test process, such as 0.25 or 1"
    group.addoption(OPTION, metavar="SHARE", default=None, help=about)
    parser.addini("gpus", about, default="")


class GpuLeases:
    """The leases of this test run.

    Args:
        config: the configuration of the run.
        share: GPUs of each process.
    """

    def __init__(self, config: pytest.Config, share: float) -> None:
        self.share = share
        self._config = config
        self._holder: subprocess.Popen[str] | None = None

    def take(self, count: int) -> list[dict[str, str]]:
        """Wait for leases; return the variables of each process.

        Raises:
            pytest.UsageError: there will never be enough GPUs.
        """
        command = interpreter_command(
            sys.executable,
            "-m",
            "aiogpu.testing.lease_holder",
            str(count),
            repr(self.share),
            str(os.getpid()),
        )
        holder = self._holder = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert holder.stdout is not None, holder
        line = holder.stdout.readline()
        answer: dict[str, Any] = {"error": "the process that takes them has ended."}
        if line:
            answer = json.loads(line)
        if "error" in answer:
            self.give_back()
            raise pytest.UsageError(f"{OPTION} {self.share:g}: {answer['error']}")
        leases = answer["leases"]
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and self._config.get_verbosity() >= 0:
            devices = (",".join(map(str, lease["ids"])) for lease in leases)
            reporter.write_line(f"GPUs ({self.share:g} each): {' '.join(devices)}")
        return [lease["environ"] for lease in leases]

    def give_back(self) -> None:
        """Give the leases back."""
        holder, self._holder = self._holder, None
        if holder is None:
            return
        try:
            holder.communicate(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            holder.kill()
            holder.communicate()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: Sequence[Any]) -> None:
        """Give each worker of xdist a lease, before it starts."""
        elsewhere = [spec for spec in specs if not spec.popen]
        if elsewhere:
            raise pytest.UsageError(
                f"{OPTION}: {elsewhere[0]} is not started on this machine, whose GPUs "
                f"are shared out; use -n."
            )
        for spec, environ in zip(specs, self.take(len(specs)), strict=True):
            spec.env.update(environ)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Take a lease for this process, if it runs the tests itself."""
        if not session.config.pluginmanager.hasplugin("dsession"):
            (environ,) = self.take(1)
            os.environ.update(environ)

    def pytest_unconfigure(self) -> None:
        """Give the leases back at the end."""
        self.give_back()


def pytest_configure(config: pytest.Config) -> None:
    """Share GPUs out if that was asked for; a worker of xdist has its share already."""
    text = config.getoption(OPTION) or config.getini("gpus")
    if not text or hasattr(config, "workerinput") or config.option.collectonly:
        return
    try:
        share = float(text)
        is_valid = 0 < share < 1 or (share >= 1 and share.is_integer())
    except ValueError:
        is_valid = False
    if not is_valid:
        raise pytest.UsageError(
            f"{OPTION} {text}: give a part of a GPU, such as 0.25, or whole GPUs."
        )
    config.pluginmanager.register(GpuLeases(config, share), "aiogpu-gpus")
