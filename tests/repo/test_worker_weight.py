"""What an import brings along: a worker stays light, and so does its fork."""

import subprocess
import sys

import pytest


def brought_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter has only after this statement."""
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


def among(modules: set[str], unwanted: list[str]) -> set[str]:
    """Those that are one of the unwanted packages or lie within."""
    return {
        module
        for module in modules
        if any(module == name or module.startswith(name + ".") for name in unwanted)
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
            id="the face",
        ),
        pytest.param(
            "import aiogpu.worker.zygote.main",
            [
                *("asyncio", "uvloop", "pynvml", "click", "rich", "numpy"),
                *("dataclasses", "subprocess", "multiprocessing", "logging"),
                *("aiogpu.core", "aiogpu.runtime", "aiogpu.api", "aiogpu.engines"),
                *("aiogpu.accelerators", "aiogpu.testing", "aiogpu.cli"),
            ],
            id="the worker",
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
            id="a task that asks where it runs",
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
            id="the pure rooms",
        ),
    ],
)
def test_an_import_brings_nothing_heavy(statement, unwanted):
    assert among(brought_by(statement), unwanted) == set()


def test_the_measure_sees_what_is_brought():
    brought = brought_by("import aiogpu.api.results.handle")
    assert "asyncio.events" in among(brought, ["asyncio"])
