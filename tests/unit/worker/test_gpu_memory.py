"""PyTorch is told its limits when CUDA begins, and CUDA does not begin for it."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import BuiltinImporter, ModuleSpec, PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aiogpu.client.current import Context
from aiogpu.wire.messages import Bind
from aiogpu.worker import environment as environ
from aiogpu.worker.gpu import Watching, leave_with, limit_torch
from aiogpu.worker.zygote.preload import Imports

GIB = 1 << 30
TORCH = """
calls, fractions, begun = [], {}, []
def is_initialized():
    return bool(begun)
def _lazy_call(call):
    calls.append(call)
def init():
    begun.append(True)
    for call in calls:
        call()
def device_count():
    return 2
class Properties:
    total_memory = 80 << 30
def get_device_properties(index):
    return Properties()
def set_per_process_memory_fraction(fraction, index):
    fractions[index] = fraction
"""


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a small `torch.cuda`, ready to be imported."""
    finders = list(sys.meta_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("from torch import cuda as cuda\n")
    file = package / "cuda.py"
    file.write_text(TORCH)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield file
    for name in ("torch", "torch.cuda"):
        sys.modules.pop(name, None)
    sys.meta_path[:] = finders


def load() -> Any:
    return importlib.import_module("torch").cuda


def is_watched() -> bool:
    watching = [finder for finder in sys.meta_path if isinstance(finder, Watching)]
    return any(finder.is_waiting for finder in watching)


@pytest.mark.usefixtures("torch")
def test_it_is_told_when_it_is_imported_and_sets_it_when_cuda_begins() -> None:
    limit_torch((40 * GIB, 20 * GIB))
    assert is_watched()
    assert "torch" not in sys.modules
    cuda = load()
    assert not is_watched()
    assert "exec_module" not in vars(cuda.__loader__)
    assert not cuda.is_initialized()
    assert cuda.fractions == {}
    cuda.init()
    assert cuda.fractions == {0: 0.5, 1: 0.25}


@pytest.mark.usefixtures("torch")
def test_one_that_is_loaded_is_told_at_once() -> None:
    cuda = load()
    limit_torch((40 * GIB, 0))
    assert not is_watched()
    cuda.init()
    assert cuda.fractions == {0: 0.5}, "0 is no limit"
    limit_torch((8 * GIB, 200 * GIB))
    assert cuda.fractions == {0: 0.1}, "CUDA has begun; more than there is, is none"


@pytest.mark.usefixtures("torch")
def test_what_imports_are_noted_and_what_threads_import() -> None:
    imports = Imports()
    bootstrap: Any = importlib._bootstrap  # type: ignore[attr-defined]
    before = bootstrap._find_and_load
    assert imports.watch()
    try:
        limit_torch((40 * GIB, 40 * GIB))
        threads = [threading.Thread(target=load) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        bootstrap._find_and_load = before
    assert len(load().calls) == 1


@pytest.mark.usefixtures("torch")
def test_an_import_that_is_half_through_the_finders_goes_on(tmp_path: Path) -> None:
    """Another thread's, or that of a finder which imports PyTorch itself."""
    (tmp_path / "beside_torch.py").write_text("value = 7\n")
    importlib.invalidate_caches()

    class Between:
        """Stands before the last of the finders."""

        def find_spec(self, name: str, *_: object) -> None:
            if name == "beside_torch":
                load()

    limit_torch((40 * GIB,))
    sys.meta_path.insert(sys.meta_path.index(PathFinder), Between())
    try:
        assert importlib.import_module("beside_torch").value == 7
    finally:
        sys.modules.pop("beside_torch", None)
    assert not is_watched()


@pytest.mark.usefixtures("torch")
def test_one_loader_may_serve_many_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As that of a zip file does."""
    (tmp_path / "beside_torch.py").write_text("value = 7\n")
    monkeypatch.delitem(sys.modules, "beside_torch", raising=False)

    class One:
        """Finds both, and loads them."""

        def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
            if name not in ("torch.cuda", "beside_torch"):
                return None
            return ModuleSpec(name, self)  # type: ignore[arg-type]

        def create_module(self, _spec: ModuleSpec) -> None:
            return None

        def exec_module(self, module: Any) -> None:
            name = {"torch.cuda": "torch/cuda.py"}.get(module.__name__)
            exec((tmp_path / (name or "beside_torch.py")).read_text(), vars(module))

    sys.meta_path.insert(0, One())
    limit_torch((40 * GIB, 0))
    watching = sys.meta_path[0]
    for _ in range(2):  # as those do who only ask whether it is there
        assert watching.find_spec("torch.cuda", None) is not None
    assert importlib.import_module("beside_torch").value == 7
    assert is_watched()
    cuda = load()
    cuda.init()
    assert cuda.fractions == {0: 0.5}
    assert capsys.readouterr().err == ""


def test_an_import_that_fails_is_the_users_and_the_next_one_counts(
    torch: Path,
) -> None:
    torch.write_text("raise OSError('no driver')\n")
    limit_torch((40 * GIB,))
    with pytest.raises(OSError, match="no driver"):
        load()
    torch.write_text(TORCH)
    importlib.invalidate_caches()
    assert len(load().calls) == 1
    assert not is_watched()


def test_without_torch_nothing_happens(torch: Path) -> None:
    torch.unlink()
    limit_torch((40 * GIB,))
    with pytest.raises(ImportError, match="cuda"):
        load()


def test_a_torch_that_takes_no_such_call_is_not_limited(
    capsys: pytest.CaptureFixture[str], torch: Path
) -> None:
    torch.write_text("def is_initialized():\n    return False\n")
    limit_torch((40 * GIB,))
    load()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("aiogpu: PyTorch could not be told")
    assert "_lazy_call" in line


def test_a_loader_that_cannot_be_listened_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Watching(print)._listen(object())
    assert "is not limited: AttributeError" in capsys.readouterr().err
    before = dict(vars(BuiltinImporter))
    Watching(print)._listen(BuiltinImporter)
    assert "which loads others too" in capsys.readouterr().err
    assert dict(vars(BuiltinImporter)) == before


def test_cuda_begins_although_the_limit_cannot_be_set(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> int:
        raise RuntimeError("no driver")

    leave_with(SimpleNamespace(is_initialized=lambda: True, device_count=fail), (1,))
    assert "is not limited: RuntimeError: no driver" in capsys.readouterr().err


@pytest.mark.usefixtures("torch")
def test_where_all_gpus_are_seen_its_own_are_limited(context: Context) -> None:
    context.accelerators = {"GPU": (1,)}
    cuda = load()
    limit_torch((40 * GIB,))
    cuda.init()
    assert cuda.fractions == {1: 0.5}
    context.accelerators = {"GPU": ("GPU-abc",)}
    cuda.fractions.clear()
    limit_torch((20 * GIB,))
    assert cuda.fractions == {}, "nobody knows which it is"


@pytest.mark.usefixtures("torch")
def test_a_binding_without_limits_watches_nothing(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environ, "_found", {})
    environ.bind(Bind({}, {"GPU": (0,)}))
    assert not is_watched()
    environ.bind(Bind({}, {"GPU": (0, 1)}, (40 * GIB, 8 * GIB)))
    assert is_watched()
    load().init()
    assert load().fractions == {0: 0.5, 1: 0.1}
    assert context.accelerators == {"GPU": (0, 1)}
