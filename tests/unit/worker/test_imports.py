"""What a worker imports: which modules count, and at what cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.program import run

WATCHING = """
    import sys, threading, traceback
    sys.path[:0] = sys.argv[1:3]
    from aiogpu.worker.zygote import preload as watching
    # On a busy machine an empty module may take milliseconds.
    watching.NOISE = 15_000
    imports = watching.Imports()
    assert imports.watch()
    def found():
        said = imports.take()
        assert len(said.names) == len(said.microseconds)
        assert imports.take().names == ()
        return {
            name: cost for name, cost in zip(*said) if name.startswith(("lib", "own"))
        }
    SLOW = 20_000
"""

LIBRARY = "import time\nt = time.perf_counter()\nwhile time.perf_counter() < t + 0.02:"
LIBRARY += " pass\n"


@pytest.fixture
def places(tmp_path: Path) -> tuple[str, str]:
    """A directory of installed packages and one of the user's own."""
    func, own = tmp_path / "site-packages", tmp_path / "project"
    func.mkdir()
    own.mkdir()
    (func / "lib_a.py").write_text("import lib_b\n" + LIBRARY)
    (func / "lib_b.py").write_text(LIBRARY)
    (func / "lib_quick.py").write_text("")
    (func / "lib_pack").mkdir()
    (func / "lib_pack" / "__init__.py").write_text(LIBRARY)
    (func / "lib_pack" / "part.py").write_text("")
    (func / "lib_bad.py").write_text("import lib_b\nraise ValueError('bad')\n")
    (own / "own_a.py").write_text("import own_b, lib_quick\n")
    (own / "own_b.py").write_text("import lib_a\nimport lib_b\n" + LIBRARY)
    (own / "own_bad.py").write_text("import lib_a\n1 / 0\n")
    return str(func), str(own)


def test_the_topmost_installed_module_counts(places: tuple[str, str]) -> None:
    source = f"""{WATCHING}
    import lib_a
    cost, = found().values()
    print("lib_a" in sys.modules, cost >= 2 * SLOW)
    import lib_a, lib_b, lib_quick
    print(found())
    """
    assert run(source, *places) == "True True\n{}\n"


def test_of_a_users_module_what_it_imports_counts(places: tuple[str, str]) -> None:
    source = f"""{WATCHING}
    import own_a
    print(list(found()))
    """
    assert run(source, *places) == "['lib_a']\n"


def test_a_part_of_a_package_brings_the_package(places: tuple[str, str]) -> None:
    source = f"""{WATCHING}
    import lib_pack.part
    (name, cost), = found().items()
    print(name, cost >= SLOW)
    """
    assert run(source, *places) == "lib_pack.part True\n"


def test_an_import_that_fails(places: tuple[str, str]) -> None:
    """What it has brought before stays, and the traceback is as it always was."""
    source = f"""{WATCHING}
    for name in ("lib_bad", "own_bad", "no_such_module"):
        try:
            exec(f"import {{name}}")
        except Exception as error:
            files = [f.filename for f in traceback.extract_tb(error.__traceback__)]
            print(type(error).__name__, [file.split("/")[-1] for file in files])
    print(list(found()))
    """
    assert run(source, *places) == (
        "ValueError ['<string>', '<string>', 'lib_bad.py']\n"
        "ZeroDivisionError ['<string>', '<string>', 'own_bad.py']\n"
        "ModuleNotFoundError ['<string>', '<string>']\n"
        "['lib_b', 'lib_a']\n"
    )


def test_threads_import_at_once(places: tuple[str, str]) -> None:
    source = f"""{WATCHING}
    def load(name):
        __import__(name)
    threads = [
        threading.Thread(target=load, args=(name,)) for name in ("lib_pack", "own_b")
    ]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(sorted(found()))
    """
    assert run(source, *places) == "['lib_a', 'lib_pack']\n"


def test_import_module_counts_too(places: tuple[str, str]) -> None:
    source = f"""{WATCHING}
    import importlib
    importlib.import_module("lib_a")
    importlib.import_module("lib_a")
    print(list(found()))
    """
    assert run(source, *places) == "['lib_a']\n"


def test_a_python_that_imports_in_another_way() -> None:
    source = """
    import importlib
    from aiogpu.worker.zygote.preload import Imports
    kept = importlib._bootstrap
    del importlib._bootstrap
    print(Imports().watch())
    importlib._bootstrap = kept
    """
    assert run(source) == "False\n"


def test_which_modules_are_installed(places: tuple[str, str]) -> None:
    source = f"""{WATCHING}
    from aiogpu.worker.zygote.preload import is_installed
    import json.decoder, _struct, zipimport, lib_a, own_a, types, importlib
    for module in (json.decoder, _struct, sys, zipimport, lib_a):
        assert is_installed(module), module
    odd = types.ModuleType("odd")
    for module in (own_a, odd, object()):
        assert not is_installed(module), module
    """
    run(source, *places)
