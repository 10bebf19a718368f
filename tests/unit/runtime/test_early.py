"""Which of a task's variables its zygote must be started with."""

from __future__ import annotations

import pytest

from aiogpu.runtime.zygote.config import early_variables


@pytest.mark.parametrize(
    "name",
    [
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "PYTHONHASHSEED",
        "PYTHONOPTIMIZE",
        "MALLOC_ARENA_MAX",
        "GLIBC_TUNABLES",
        "OMP_PROC_BIND",
        "GOMP_CPU_AFFINITY",
        "KMP_BLOCKTIME",
        "MKL_DYNAMIC",
        "OPENBLAS_CORETYPE",
        "BLIS_JC_NT",
        "VECLIB_MAXIMUM_THREADS",
        "NUMEXPR_MAX_THREADS",
    ],
)
def test_what_is_read_at_exec_or_load(name: str) -> None:
    assert early_variables(((name, "1"),), (), ()) == ((name, "1"),)


@pytest.mark.parametrize(
    "name",
    [
        "MODE",
        "MY_OMP_NUM",
        "HF_HOME",
        "TORCH_LOGS",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
    ],
)
def test_what_a_worker_can_set_itself(name: str) -> None:
    assert early_variables(((name, "1"),), (), ()) == ()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "TORCH_LOGS"),
        ("torch", "PYTORCH_JIT"),
        ("numpy", "NUMPY_MADVISE_HUGEPAGE"),
        ("transformers", "HF_HOME"),
        ("transformers", "TRANSFORMERS_CACHE"),
        ("huggingface_hub", "HF_TOKEN"),
        ("tensorflow", "TF_CPP_MIN_LOG_LEVEL"),
        ("cupy", "CUPY_CACHE_DIR"),
        ("jax", "XLA_FLAGS"),
        ("jax", "JAX_PLATFORMS"),
        ("mine", "MINE_DEBUG"),
    ],
)
def test_what_belongs_to_a_preloaded_module(module: str, name: str) -> None:
    environment = (("A", "1"), (name, "2"), ("Z", "3"))
    assert early_variables(environment, ["sys", module], ()) == ((name, "2"),)
    assert early_variables(environment, ["sys"], ()) == ()


def test_what_was_read_while_modules_were_imported() -> None:
    environment = (("A", "1"), ("HOME", "/x"), ("OMP_NUM_THREADS", "2"))
    read = ["HOME", "B", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"]
    assert early_variables(environment, (), read) == (("HOME", "/x"),)
    assert early_variables((("CUDA_VISIBLE_DEVICES", "0"),), (), read) == ()


def test_no_variables_at_all() -> None:
    assert early_variables((), ["torch"], ["HOME"]) == ()
