"""Imports load few modules: a light worker forks fast."""

import subprocess
import sys

import pytest


def modules_loaded_by(statement: str) -> set[str]:
    """The modules that a statement loads in a new interpreter."""
    program = (
        "import sys\n"
        "before = set(sys.modules)\n"
        f"{statement}\n"
        "print(*set(sys.modules) - before)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], text=True, capture_output=True, check=True
    )
    return set(ran.stdout.split())


def within(packages: list[str], modules: set[str]) -> set[str]:
    """The modules that are one of the packages or lie in one."""
    return {
        module
        for module in modules
        if any(module == name or module.startswith(name + ".") for name in packages)
    }


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        pytest.param(
            "import aiogpu",
            [
                *("asyncio", "uvloop", "msgpack", "cloudpickle", "dataclasses"),
                *("pynvml", "click", "rich", "socket", "subprocess", "logging"),
                *("aiogpu.core", "aiogpu.runtime", "aiogpu.api", "aiogpu.errors"),
            ],
            id="the package",
        ),
        pytest.param(
            "import aiogpu.worker.zygote.main",
            [
                *("asyncio", "uvloop", "pynvml", "click", "rich", "numpy"),
                *("dataclasses", "subprocess", "multiprocessing", "logging"),
                *("aiogpu.core", "aiogpu.runtime", "aiogpu.api", "aiogpu.engines"),
                *("aiogpu.accelerators", "aiogpu.testing", "aiogpu.cli"),
            ],
            id="a worker",
        ),
        pytest.param(
            "from aiogpu import remote",
            [
                *("asyncio", "uvloop", "pynvml", "cloudpickle", "msgpack"),
                *("aiogpu.api.session", "aiogpu.engines", "aiogpu.accelerators"),
            ],
            id="a module of tasks",
        ),
        pytest.param(
            "from aiogpu import TaskError, get_gpu_ids, get_runtime_context",
            [
                *("asyncio", "uvloop", "pynvml", "cloudpickle", "msgpack"),
                *("aiogpu.api.session", "aiogpu.engines", "aiogpu.runtime"),
            ],
            id="runtime context and GPU ids",
        ),
        pytest.param(
            "import aiogpu\n"
            "@aiogpu.remote(num_gpus=0.25)\n"
            "def f(x: int) -> int: return x\n"
            "f.options(num_cpus=2)",
            [
                *("asyncio", "uvloop", "pynvml", "cloudpickle", "msgpack"),
                *("aiogpu.api.session", "aiogpu.engines", "aiogpu.accelerators"),
            ],
            id="a decorated task",
        ),
        pytest.param(
            "import aiogpu\n"
            "a = aiogpu.accelerators.NVIDIA_L4\n"
            "@aiogpu.remote(num_gpus=1, accelerator_type=a)\n"
            "def f(x: int) -> int: return x\n"
            "env = {'env_vars': {'A': '1'}}\n"
            "f.options(num_gpus=0, resources={'neuron_cores': 2}, runtime_env=env)",
            [
                *("asyncio", "pynvml", "subprocess", "json", "logging", "ctypes"),
                *("aiogpu.api.session", "aiogpu.engines", "aiogpu.runtime"),
                *(f"aiogpu.accelerators.{name}" for name in ("nvidia", "amd", "base")),
            ],
            id="a task for another vendor's devices",
        ),
        pytest.param(
            "import aiogpu\n"
            "@aiogpu.batch(max_size=8)\n"
            "async def f(items: list[int]) -> list[int]: return items",
            [
                *("asyncio", "uvloop", "pynvml", "cloudpickle", "msgpack"),
                *("aiogpu.api.results.handle", "aiogpu.api.session", "aiogpu.engines"),
            ],
            id="a batched function",
        ),
        pytest.param(
            "import aiogpu.core.scheduler.scheduler, aiogpu.wire.connection\n"
            "import aiogpu.errors",
            ["asyncio", "socket", "threading", "subprocess", "aiogpu.runtime"],
            id="packages without I/O",
        ),
    ],
)
def test_a_statement_loads_no_heavy_module(statement, unwanted):
    assert within(unwanted, modules_loaded_by(statement)) == set()


def test_loaded_modules_are_found():
    loaded = modules_loaded_by("import aiogpu.api.results.handle")
    assert "asyncio.events" in within(["asyncio"], loaded)
