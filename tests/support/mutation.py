"""Mutation testing: change `aiogpu/` in one place and see which test fails.

`python -m tests.support.mutation --package core --count 20 --map MAP --out FILE` draws
mutants by a seed, runs for each the tests that execute its line, and appends one JSON
line per mutant to FILE. Each runs in a private copy of the tree with an environment of
its own, so that every process of a test imports the copy. Tests from outside run first:
what another test kills has survived them. MAP says which tests execute which lines
(`tests.support.line_map`); it is made if it is missing, in ten minutes.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import pytest

from tests.support.line_map import RECORDS, LineMap, Record, prepare
from tests.support.mutants import KEY, Mutant, draw, mutants_of, package_of

ROOT: Final = Path(__file__).parents[2]
PUBLIC: Final = re.compile(r"aiogpu(\.(testing|errors|types)(\..*)?)?$")
PROCESS_FOLDERS: Final = ("cli", "faults", "contract", "docs")
PROCESS: Final = re.compile(
    r"\b(no_leaks|subprocess|pexpect|tests\.(support\.program|cli\.service))\b"
)
SILENCE: Final = 45.0  # seconds in which no test ends and little runs: a hang
ENDLESS: Final = 120.0  # seconds of processor time in which no test ends: a hang
TICKS: Final = os.sysconf("SC_CLK_TCK")  # of processor time, in a second
IDLE: Final = 5  # of these in five seconds, below which little runs
MEMORY: Final = 6 << 30  # bytes that each process of a run may have
UNSHRUNK: Final = """
from hypothesis import Phase, settings

def pytest_configure():
    phases = Phase.explicit, Phase.generate
    settings.register_profile("unshrunk", settings.default, phases=phases)
    settings.load_profile("unshrunk")
"""  # a plugin, as it takes minutes to make a failing example small


@cache
def is_outside(root: Path, file: str) -> bool:
    """Tell whether a file of tests sees only what users see.

    Such a file imports public names alone, drives processes, or tells the scheduler's
    stories through `World`.
    """
    if not (root / file).is_file():
        return False
    source = (root / file).read_text()
    imported: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            imported.append(node.module or "")
        elif isinstance(node, ast.Import):
            imported += [each.name for each in node.names]
    if all(PUBLIC.match(name) for name in imported if name.startswith("aiogpu")):
        return True
    if package_of(file) == "core":
        return bool(re.search(r"\b(World|NodeMachine)\b", source))
    return package_of(file) in PROCESS_FOLDERS and bool(PROCESS.search(source))


class Copy:
    """A private copy of a tree, with an environment that imports it."""

    def __init__(self, root: Path) -> None:
        self.used = 0.0  # seconds of processor time
        self.place = Path(tempfile.mkdtemp(prefix="mutants-"))
        listed = subprocess.check_output(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, text=True
        )
        for name in listed.splitlines():
            if (root / name).is_file():
                (self.place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.place / name)
        environment = self.place / ".venv"
        venv.create(environment, symlinks=True)
        self.python = environment / "bin" / "python"
        # A path file adds these packages, but not what their own path files add.
        packages = Path(pytest.__file__).parents[1]
        own = environment / packages.relative_to(sys.prefix)
        (own / "unshrunk.py").write_text(UNSHRUNK)
        (own / "copy.pth").write_text(f"{self.place}\n{packages}\n{ROOT}\n")
        for script in Path(sys.prefix, "bin").iterdir():
            moved = environment / "bin" / script.name
            text = script.read_bytes()
            if text.startswith(b"#!") and not moved.exists():
                here = sys.prefix.encode()
                moved.write_bytes(text.replace(here, str(environment).encode()))
                moved.chmod(0o755)

    def write(self, file: str, source: bytes) -> None:
        """Replace a file, and remove its bytecode, which is told apart by seconds."""
        (self.place / file).write_bytes(source)
        cached = importlib.util.cache_from_source(str(self.place / file))
        Path(cached).unlink(missing_ok=True)

    def run(self, *arguments: str, limit: float, log: Path) -> str:
        """Run Python in the copy: its exit status, or what ended it.

        All processes that are left are killed.
        """
        environ = {**os.environ, "PATH": f"{self.python.parent}:{os.environ['PATH']}"}
        environ.pop("PYTHONPATH", None)
        with log.open("wb") as output:
            run = subprocess.Popen(
                [str(self.python), *arguments],
                cwd=self.place,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        resource.prlimit(run.pid, resource.RLIMIT_DATA, (MEMORY, MEMORY))
        ended, size, used = "", 0, 0
        heard, used_then = time.monotonic(), 0
        while not ended:
            with suppress(subprocess.TimeoutExpired):
                ended = str(run.wait(timeout=5))
            before, used = used, max(used, self._ticks())
            if log.stat().st_size > size:
                size, heard, used_then = log.stat().st_size, time.monotonic(), used
            # On a busy machine a test may be slow, so what counts is processor time.
            is_idle = used - before < IDLE and time.monotonic() > heard + SILENCE
            if not ended and (is_idle or used - used_then > ENDLESS * TICKS):
                ended = "hang"
            elif not ended and used > limit * TICKS:
                ended = "limit"
        self.used += used / TICKS
        while left := list(self._processes()):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            run.poll()
        return ended

    def _ticks(self) -> int:
        """Return the processor time of all processes of the copy."""
        total = 0
        for pid in self._processes():
            with suppress(OSError):
                fields = (
                    Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                )
                total += sum(map(int, fields[11:15]))
        return total

    def _processes(self) -> Iterator[int]:
        """Yield all processes whose environment or command names the copy."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    told = (entry / "environ").read_bytes()
                    told += (entry / "cmdline").read_bytes()
                    if str(self.place).encode() in told:
                        yield int(entry.name)

    def pytest(self, *tests: str, limit: float) -> tuple[str, str]:
        """Run tests up to the first failure: what ended them, and the test."""
        shutil.rmtree(self.place / ".hypothesis", ignore_errors=True)
        log = self.place / "pytest.log"
        options = "-m pytest -vvxp no:cacheprovider -p unshrunk --tb=no -rfE"
        options += " --hypothesis-seed=0"
        ended = self.run(*options.split(), *tests, limit=limit, log=log)
        text = log.read_text(errors="replace")
        if ended in {"0", "5", "limit"}:
            return ended, ""
        if ended == "4" and "not found: " in text:
            raise RuntimeError(text[-2000:])
        if named := re.findall(r"^(?:FAILED|ERROR) (.+)", text, re.MULTILINE):
            ended = "failed"
        else:
            named = re.findall(r"^(tests/\S+::.+)", text, re.MULTILINE)
        # A name may contain spaces, so it is one of those that were given.
        for test in sorted(tests, key=len, reverse=True):
            if named and named[-1].startswith(test):
                return ended, test
        return ended, "pytest itself"


@dataclass
class Judgement:
    """What the tests said of a mutant.

    Attributes:
        verdict: "killed" or "survived", and how.
        killer: the test that killed it.
        outside: whether that test is one from outside.
    """

    verdict: str
    killer: str = ""
    outside: bool = False


def judge(copy: Copy, tests: Sequence[Record], limit: float) -> Judgement:
    """Run a mutant's tests in its copy, up to the one that kills it.

    Of the tests from outside run those that take `limit` seconds in all, and so of the
    others.
    """
    verdict = "survived" if tests else "survived: no test executes it"
    for outside in True, False:
        left, chosen = limit, []
        for each in tests:
            if is_outside(copy.place, each.test.partition("::")[0]) == outside:
                left -= each.seconds + 0.05
                chosen.append(each.test)
                if left < 0:
                    verdict = "survived: time limit"
                    break
        while chosen:
            ended, killer = copy.pytest(*chosen, limit=3 * limit)
            if ended == "limit":
                verdict = "survived: time limit"
            if not killer:
                break
            is_certain = killer not in chosen or package_of(killer) == "core"
            if ended != "failed" or is_certain:
                return Judgement(f"killed: {ended}", killer, outside)
            # A test that drives processes or waits may have failed by chance.
            ended, repeated = copy.pytest(killer, limit=2 * ENDLESS)
            if repeated or ended == "limit":
                return Judgement(f"killed: {ended}", killer, outside)
            chosen = [test for test in chosen if test != killer]
    return Judgement(verdict)


def line_map(root: Path, options: argparse.Namespace) -> LineMap:
    """Read the map, or make it: run all tests, in copies that mark lines."""
    tree, path, jobs = digest(root), options.map.absolute(), options.jobs

    def run(number: int) -> bytes:
        copy = Copy(root)
        prepare(copy.place)
        ended = copy.run(
            *("-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.support.line_map"),
            *("--line-map-part", f"{number}/{jobs}"),
            limit=3600,
            log=path.with_suffix(f".{number}.log"),
        )
        records = (copy.place / RECORDS).read_bytes()
        print(f"part {number} of the map: pytest ended with {ended}", flush=True)
        shutil.rmtree(copy.place)
        return records

    if not path.exists():
        with ThreadPoolExecutor(jobs) as pool:
            path.write_bytes(tree + b"".join(pool.map(run, range(jobs))))
    with path.open("rb") as file:
        if file.read(len(tree)) != tree:
            raise SystemExit(f"{path} is the map of another tree; delete it")
        return LineMap.read(root, file)


def digest(root: Path) -> bytes:
    """Return what tells one `aiogpu/` from another, as a line."""
    paths = sorted((root / "aiogpu").rglob("*.py"))
    sources = b"".join(path.read_bytes() for path in paths)
    return hashlib.sha256(sources).hexdigest().encode() + b"\n"


def find(root: Path, files: Sequence[str], earlier: Sequence[Any]) -> Iterator[Mutant]:
    """Find the mutants of an earlier result, also where their lines have moved."""
    found = [mutant for file in files for mutant in mutants_of(root, file)]
    known = {mutant.key: mutant for mutant in found}
    for key in earlier:
        alike = [
            each for each in found if (each.text, *each.key[3:]) == (key[1], *key[3:])
        ]
        if key in known:
            yield known[key]
        elif len(alike) == 1:
            yield alike[0]
        else:
            print(f"gone: {key}")


def table(results: Sequence[Any]) -> Iterator[str]:
    """Yield the lines of a table of kill rates by package."""
    yield "package          mutants  killed   rate  from outside   rate"
    rows = defaultdict(list)
    for each in results:
        rows[package_of(each["file"])].append(each)
        rows["~ all"].append(each)
    for package, row in sorted(rows.items()):
        killed = [each for each in row if each["verdict"].startswith("killed")]
        outside = sum(each["outside"] for each in killed)
        rates = f"{len(killed) / len(row):.0%}", f"{outside / len(row):.0%}"
        yield (
            f"{package:16}{len(row):8}{len(killed):8}{rates[0]:>7}{outside:14}"
            f"{rates[1]:>7}"
        )


def read(path: Path | None) -> dict[tuple[object, ...], Any]:
    """Return the results in a file by the keys of their mutants."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    results = [json.loads(line) for line in lines]
    return {tuple(each[name] for name in KEY): each for each in results}


def run(root: Path, options: argparse.Namespace) -> list[Any]:
    """Draw mutants, or take those of an earlier result, and judge each."""
    tests_of = line_map(root, options).tests_of
    copies: SimpleQueue[Copy] = SimpleQueue()
    places = []
    for _ in range(options.jobs):
        copies.put(copy := Copy(root))
        places.append(copy.place)
    root = places[0]  # what is changed meanwhile in the tree does not matter
    paths = sorted((root / "aiogpu").rglob("*.py"))
    files = [str(path.relative_to(root)) for path in paths]
    files = [file for file in files if "/ray/" not in file]  # run by marked tests alone
    earlier, judged = read(options.earlier), read(options.out)
    if earlier:
        mutants = list(find(root, files, list(earlier)))
    else:
        packages = options.package or {package_of(file) for file in files}
        files = [file for file in files if package_of(file) in packages]
        mutants = list(draw(root, files, options.count, options.seed, set(judged)))

    def one(mutant: Mutant) -> dict[str, Any]:
        copy, began = copies.get(), time.monotonic()
        source = (copy.place / mutant.file).read_bytes()
        copy.write(mutant.file, mutant.apply(source))
        judgement = judge(copy, tests_of(mutant), options.limit)
        copy.write(mutant.file, source)
        copies.put(copy)
        where = f"{mutant.file}:{mutant.line}: {mutant.text[:60]} [{mutant.change}]"
        print(f"{judgement.verdict} {judgement.killer}\n    {where}", flush=True)
        before = earlier.get(mutant.key, {"verdict": judgement.verdict})["verdict"]
        if before.partition(":")[0] != judgement.verdict.partition(":")[0]:
            print(f"    CHANGED: was {before}", flush=True)
        result = asdict(mutant) | asdict(judgement)
        result["seconds"] = round(time.monotonic() - began, 1)
        if options.out:
            with options.out.open("a") as out:
                out.write(json.dumps(result) + "\n")
        return result

    try:
        with ThreadPoolExecutor(options.jobs) as pool:
            return list(pool.map(one, mutants))
    finally:
        for place in places:
            shutil.rmtree(place)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> None:
    """Judge mutants and print a table."""
    parser = argparse.ArgumentParser("python -m tests.support.mutation")
    add = parser.add_argument
    add("--package", nargs="+", help="draw from these; default: all")
    add("--count", type=int, default=20)
    add("--seed", type=int, default=1)
    add("--map", type=Path, required=True, help="which test runs what; made if missing")
    add("--out", type=Path, help="append JSON lines; what is in it is not drawn again")
    add("--from", type=Path, dest="earlier", help="judge the mutants of a result again")
    add("--jobs", type=int, default=1)
    add("--limit", type=float, default=60, help="seconds of tests per mutant")
    options = parser.parse_args(arguments)
    print("\n".join(table(run(root, options))))


if __name__ == "__main__":
    main()
