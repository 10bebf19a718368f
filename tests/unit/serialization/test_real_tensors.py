"""Tensors of the installed torch survive pickling."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import warnings

import pytest

from aiogpu.errors import AiogpuWarning
from aiogpu.serialization import tensors
from aiogpu.serialization.pickler import dump, dump_whole
from aiogpu.serialization.references import SHARED_FROM
from tests.unit.serialization.payloads import load

torch = pytest.importorskip("torch", reason="its tensors are pickled here")


EDGE = SHARED_FROM // 4


KINDS = {
    "float": lambda: torch.arange(EDGE * 2.0).reshape(2, EDGE),
    "bfloat16": lambda: torch.arange(EDGE * 2).to(torch.bfloat16),
    "float8": lambda: torch.ones(SHARED_FROM).to(torch.float8_e4m3fn),
    "bool": lambda: torch.ones(SHARED_FROM, dtype=torch.bool),
    "complex": lambda: torch.ones(EDGE, dtype=torch.complex64) * 2j,
    "transposed": lambda: torch.arange(EDGE * 2.0).reshape(2, EDGE).T,
    "channels last": lambda: torch.rand(2, 3, 64, 64).to(
        memory_format=torch.channels_last
    ),
    "expanded": lambda: torch.arange(EDGE).expand(3, EDGE),
    "a part": lambda: torch.arange(EDGE * 4).reshape(2, -1)[:, EDGE:],
    "small": lambda: torch.arange(3),
    "no dimensions": lambda: torch.tensor(2.5),
    "empty": lambda: torch.zeros(0, 3),
    "conjugate": lambda: (torch.ones(EDGE, dtype=torch.complex64) * 2j).conj(),
    "negative": lambda: (torch.ones(EDGE, dtype=torch.complex64) * 2j).conj().imag,
    "with gradient": lambda: torch.ones(EDGE, requires_grad=True),
    "result": lambda: torch.ones(EDGE, requires_grad=True) * 2,
    "sparse": lambda: torch.eye(40).to_sparse(),
    "meta": lambda: torch.ones(EDGE, device="meta"),
    "parameter": lambda: torch.nn.Parameter(torch.ones(EDGE)),
    "inference": lambda: _inferred(),
}


def _inferred():
    with torch.inference_mode():
        return torch.ones(EDGE) * 2


def copied(value):
    stream, buffers = dump(value)
    # Copies, as in shared memory.
    return load(stream, [memoryview(bytes(buffer)) for buffer in buffers])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copy", [copied, lambda value: load(dump_whole(value))])
def test_tensor_arrives_unchanged(kind, copy):
    tensor = KINDS[kind]()
    (again,) = copy([tensor])
    assert type(again) is type(tensor)
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert (again.device, again.layout) == (tensor.device, tensor.layout)
    assert again.requires_grad == tensor.requires_grad
    if kind in {"transposed", "channels last", "expanded"}:
        assert again.stride() == tensor.stride()
    if kind != "meta":
        as_floats = [t.to_dense().to(torch.complex64) for t in (again, tensor)]
        assert torch.equal(*as_floats)


def test_tensor_is_not_copied_on_either_side():
    tensor = torch.arange(EDGE)
    stream, (buffer,) = dump(tensor)
    assert (len(stream) < 1000, buffer.nbytes) == (True, tensor.nbytes)
    again = load(stream, [buffer])
    assert again.data_ptr() == tensor.data_ptr()
    del tensor
    gc.collect()
    assert int(again[-1]) == EDGE - 1


def test_tensor_over_a_private_mapping_can_be_changed():
    """torch has no read-only memory; changes must stay in one process."""
    stream, (buffer,) = dump(torch.ones(EDGE))
    fd = os.memfd_create("tensor")
    os.write(fd, buffer)
    mapping = mmap.mmap(fd, buffer.nbytes, access=mmap.ACCESS_COPY)
    again = load(stream, [memoryview(mapping)])
    again.add_(1)
    assert float(again.sum()) == EDGE * 2
    assert os.pread(fd, 4, 0) == bytes(buffer[:4])
    os.close(fd)


def test_torch_does_not_warn_of_read_only_memory():
    program = (
        "import warnings, sys; warnings.simplefilter('error')\n"
        "import pickle, torch; from aiogpu.serialization.pickler import dump\n"
        "torch.set_warn_always(len(sys.argv) > 1)\n"
        "for _ in range(3):\n"
        "    stream, buffers = dump(torch.arange(100_000))\n"
        "    pickle.loads(stream, buffers=[b.toreadonly() for b in buffers])\n"
        "print(len(warnings.filters))"
    )
    for arguments in ([], ["always"]):
        subprocess.run([sys.executable, "-c", program, *arguments], check=True)


def test_model_computes_and_learns_after_pickling():
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU())
    given = torch.rand(3, 256)
    stream, buffers = dump(model)
    assert len(buffers) == 1
    again = load(stream, [memoryview(bytearray(buffer)) for buffer in buffers])
    assert torch.equal(model(given), again(given))
    again(given).sum().backward()
    assert again[0].weight.grad is not None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["float", "bfloat16", "small", "empty", "parameter"])
def test_cuda_tensor_arrives_on_its_device(kind, monkeypatch):
    monkeypatch.setattr(tensors, "_done", set())
    tensor = KINDS[kind]().cuda()
    with pytest.warns(AiogpuWarning, match="through host memory"):
        stream, buffers = dump(tensor)
    again = load(stream, [memoryview(bytes(buffer)) for buffer in buffers])
    assert again.device == tensor.device
    assert torch.equal(again, tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("gradient", [False, True])
def test_cuda_tensor_arrives_on_the_cpu_without_a_device(gradient, tmp_path):
    tensor = torch.ones(EDGE, device="cuda", requires_grad=gradient)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AiogpuWarning)
        (tmp_path / "stream").write_bytes(dump_whole(tensor))
    program = (
        "import pathlib, pickle, sys\n"
        "tensor = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "print(tensor.device, float(tensor.sum()), tensor.requires_grad)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "stream"],
        env={"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        check=True,
        text=True,
    )
    assert ran.stdout == f"cpu {float(EDGE)} {gradient}\n"
