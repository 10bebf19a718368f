"""`aiogpu demo`: as a user runs it, and the lanes and bars that it draws."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pexpect
import psutil
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from aiogpu.cli.demo import TaskTime, device_label, lanes, thumbnail, timeline
from aiogpu.cli.demo import demo as demo_command
from tests.support.program import clean_environment, run_command

COMMAND = [sys.executable, "-m", "aiogpu", "demo"]


SMALL = ["--size", "64", "--tasks", "6"]


GONE_WITHIN = 30.0
"""Seconds; a bound for a failing test, not a wait: `wait_procs` returns at once."""


TERMINAL = {"TERM": "xterm-256color", "COLUMNS": "80"}


def in_pipe(*options: str, **changes: str) -> subprocess.CompletedProcess[str]:
    variables = clean_environment(**TERMINAL | changes)
    return run_command(*COMMAND, *options, env=variables)


def in_terminal(*options: str, **changes: str) -> pexpect.spawn[str]:
    return pexpect.spawn(
        COMMAND[0],
        [*COMMAND[1:], *options],
        env=clean_environment(**TERMINAL | changes),
        dimensions=(50, 80),
        encoding="utf-8",
        # A terminal drops what it has not shown yet at Ctrl-C, also half characters.
        codec_errors="replace",
        timeout=60,
    )


def test_pipe_gets_plain_lines() -> None:
    ran = in_pipe(*SMALL, "--gpus", "2")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "\x1b" not in ran.stdout
    first, *lines = ran.stdout.splitlines()
    assert re.fullmatch(
        r"A Julia set of 64 x 64 points on GPU 0 \(.+\), GPU 1 \(.+\)\.", first
    )
    tasks = [re.match(r"task +(\d+)  GPU \d  pid \d+  from ", line) for line in lines]
    assert sorted(int(task[1]) for task in tasks if task) == [*range(6)]
    chart = [line for line in lines if "█" in line]
    assert all(len(line) < 80 for line in chart)
    assert lines[-4] == "tasks    6, each in a fresh process"
    assert re.fullmatch(r"at once  [1-4] on GPU 0, [0-2] on GPU 1", lines[-2])
    assert lines[-1] == "result   equals the serial one, bit by bit"


def test_terminal_gets_a_live_picture() -> None:
    demo = in_terminal(*SMALL, "--gpus", "1")
    demo.expect("A Julia set of 64 x 64 points")
    demo.expect("▀")
    demo.expect("GPU 0")
    demo.expect("equals the serial one, bit by bit")
    demo.expect(pexpect.EOF)
    demo.close()
    assert demo.exitstatus == 0


def test_plain_terminals_and_ascii_get_no_pixels() -> None:
    demo = in_terminal(*SMALL, NO_COLOR="1", TERM="dumb")
    demo.expect(pexpect.EOF)
    demo.close()
    assert "▀" not in demo.before
    assert "task   5  GPU" in demo.before
    assert demo.exitstatus == 0
    # Hidden GPUs leave logical ones.
    ran = in_pipe(*SMALL, PYTHONIOENCODING="ascii", CUDA_VISIBLE_DEVICES="")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.isascii()
    assert "=" in ran.stdout
    assert "GPU 1" in ran.stdout


def test_whole_gpus() -> None:
    ran = in_pipe("--size", "32", "--tasks", "3", "--gpus", "4", "--share", "2")
    assert ran.returncode == 0
    assert ran.stdout.count("GPU 0, GPU 1  pid") >= 1
    assert "at once  1 on GPU 0, 1 on GPU 1, " in ran.stdout


def test_visible_devices_are_those_shown() -> None:
    ran = in_pipe(*SMALL, CUDA_VISIBLE_DEVICES="5")
    if ran.returncode == 0:  # no NVML here: the entry is taken as it stands
        assert "on GPU 5 (logical)." in ran.stdout
    else:
        assert "there is no device '5'" in ran.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--share", "1.5"], "Invalid value for --share: num_gpus=1.5 mixes"),
        (["--share", "0"], "Invalid value for --share: it must be above 0."),
        (["--share", "nan"], "Invalid value for --share: num_gpus=nan"),
        (["--share", "much"], "'much' is not a valid float"),
        (["--gpus", "0"], "0 is not in the range"),
        (["--tasks", "65", "--size", "64"], "--tasks 65 is more than the 64 rows"),
        (["--gpu", "1"], "--gpus"),
        (["fast"], "unexpected extra argument (fast)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_named(options: list[str], message: str) -> None:
    ran = CliRunner().invoke(demo_command, options)
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert message in ran.stderr


def test_more_than_there_is_is_bad_input() -> None:
    for options, variables, message in (
        (["--share", "3"], {}, "asks for {CPU: 1, GPU: 3}"),
        ([], {"CUDA_VISIBLE_DEVICES": "0"}, "Error: num_gpus=2, but CUDA_VISIBLE_DEVI"),
    ):
        ran = in_pipe(*SMALL, "--gpus", "2", *options, **variables)
        assert (ran.returncode, ran.stdout) == (2, "")
        assert message in ran.stderr
        assert "Traceback" not in ran.stderr


def test_missing_numpy_is_told(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('not today')")
    ran = in_pipe(*SMALL, PYTHONPATH=str(tmp_path))
    assert ran.returncode == 1
    assert "(not today). Install it by: pip install 'aiogpu[demo]'" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_interrupt_leaves_nothing(runtime_directory: Path) -> None:
    demo = in_terminal("--size", "2048", "--tasks", "64", "--gpus", "2")
    demo.expect("0 s")  # the first frame: tasks run
    (directory,) = runtime_directory.iterdir()
    children = psutil.Process(demo.pid).children(recursive=True)
    assert len(children) > 2  # the zygote, keepers, workers
    demo.sendintr()
    demo.expect("Interrupted.")
    demo.expect(pexpect.EOF)
    demo.close()
    assert demo.exitstatus == 130
    assert "Traceback" not in demo.before
    assert psutil.wait_procs(children, timeout=GONE_WITHIN)[1] == []
    assert not directory.exists()


def test_reader_that_leaves_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(
        [*COMMAND, *SMALL],
        env=clean_environment(**TERMINAL),
        stdout=writer,
        stderr=subprocess.PIPE,
    ) as demo:
        os.close(writer)
        _, error = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert error == b""


# Lanes, and the chart as text.


def span(task: int, begin: float, end: float, *gpus: int) -> TaskTime:
    return TaskTime(task, gpus or (0,), 100 + task, begin, end)


def test_other_devices_do_not_count() -> None:
    both, other = span(1, 0, 2, 0, 1), span(2, 0, 2, 1)
    assert lanes([both, other], 0) == [[both]]
    assert lanes([both, other], 1) == [[both], [other]]
    assert lanes([both, other], 7) == []


TIMES = st.tuples(st.integers(0, 20), st.integers(1, 5))


@given(st.lists(TIMES, max_size=30))
def test_spans_lie_in_as_few_lanes_as_do_not_overlap(
    times: list[tuple[int, int]],
) -> None:
    spans = [span(n, begin, begin + long) for n, (begin, long) in enumerate(times)]
    drawn = lanes(spans, 0)
    at_once = [sum(s.begin <= t < s.end for s in spans) for t in range(26)]
    assert len(drawn) == max(at_once)
    assert sorted(s for lane in drawn for s in lane) == sorted(spans)
    for lane in drawn:
        assert all(first.end <= second.begin for first, second in pairwise(lane))


def test_labels_are_short() -> None:
    assert device_label(3) == "GPU 3"
    assert device_label("GPU-1234abcd-ffff-aaaa-bbbb-ccccccccdddd") == "GPU-1234abcd"


SPANS = [
    TaskTime(1, (0,), 11, 0.0, 5.0),
    TaskTime(2, (0,), 12, 0.0, 2.5),
    TaskTime(3, (0,), 13, 2.5, 2.6),
    TaskTime(14, (1,), 14, 5.0, 10.0),
]


def test_bars_lie_in_time() -> None:
    gpus = {0: "GPU 0", 1: "GPU 1", 2: "GPU 2"}
    assert timeline(SPANS, gpus, 28, is_ascii=True).plain.splitlines() == [
        "GPU 0  1=========..........",
        "       2====3..............",
        "GPU 1  ..........14========",
        "GPU 2  ....................",
        "       0 s          10.00 s",
    ]
    # Nothing has run yet; bars too narrow for their numbers.
    narrow = [TaskTime(100 + n, (0,), n, float(n), n + 1.0) for n in range(60)]
    for spans, bar in ((list[TaskTime](), "."), (narrow, "=")):
        drawn = timeline(spans, {0: "GPU 0"}, 28, is_ascii=True).plain
        assert drawn.splitlines()[0] == "GPU 0  " + 20 * bar
    assert thumbnail([[0, 1, 1], [0, 1, 1]]).plain == "▀▀▀\n"
