"""The memory hog: never more than its cap, given back however its parent ends, refused if it cannot fit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from processes import ended

from benchmarks import hog
from benchmarks.hog import Hog, HogError

CAP = 160 * 2**20
GB = 10**9
PARENT = """
import sys, time
from benchmarks.hog import Hog
with Hog(int(sys.argv[1])) as held:
    print(held.pid, flush=True)
    time.sleep(600)
"""


def until(what: Callable[[], bool], seconds: float = 30) -> bool:
    """Whether it becomes true; a limit so generous that only a hang meets it."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def parent() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that holds a hog, in a process group of its own, and the hog's pid."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(CAP)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[1],
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    yield process, pid
    for left in (pid, process.pid):
        if not ended(left):
            os.kill(left, signal.SIGKILL)
    process.wait()


def test_it_holds_its_cap_and_never_more() -> None:
    with Hog(CAP) as held:
        process = psutil.Process(held.pid)
        assert CAP - 2 * hog.STEP_BYTES < held.held_bytes <= CAP
        for _ in range(10):
            assert CAP - 2 * hog.STEP_BYTES < process.memory_info().rss <= CAP
            time.sleep(0.05)
        if sys.platform == "linux":
            peak = next(
                line for line in Path(f"/proc/{held.pid}/status").read_text().splitlines() if "VmHWM" in line
            )
            assert int(peak.split()[1]) * 1024 <= CAP
        held.check()
    assert ended(held.pid)


def test_an_error_inside_gives_it_back() -> None:
    with pytest.raises(KeyError), Hog(CAP) as held:
        raise KeyError
    assert ended(held.pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_its_parent_ends_the_memory_is_free(
    parent: tuple[subprocess.Popen[str], int], number: signal.Signals
) -> None:
    process, pid = parent
    assert psutil.Process(pid).memory_info().rss > CAP / 2
    process.send_signal(number)
    process.wait()
    assert until(lambda: ended(pid))


def test_ctrl_c_reaches_parent_and_hog_together(parent: tuple[subprocess.Popen[str], int]) -> None:
    process, pid = parent
    os.killpg(process.pid, signal.SIGINT)
    process.wait()
    assert until(lambda: ended(pid))


def test_a_parent_that_ends_while_it_fills_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(hog, "_abandoned", lambda seconds: len(taken) == 2)
    monkeypatch.setattr(hog, "_step", lambda content: taken.append(1))
    monkeypatch.setattr(hog, "_offer_to_the_killer", lambda: None)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert hog.main(10 * GB, 0) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(taken) == 2


def test_a_machine_that_runs_low_gets_the_memory_back() -> None:
    held = Hog(CAP)
    held._floor = 2**60  # so much is never free
    with pytest.raises(HogError, match="gave its memory back"):
        held.__enter__()
    assert ended(held.pid)


def test_a_hog_that_was_ended_is_noticed() -> None:
    with Hog(CAP) as held:
        os.kill(held.pid, signal.SIGKILL)
        assert until(lambda: ended(held.pid))
        with pytest.raises(HogError, match="ended with -9"):
            held.check()


def test_a_cap_that_does_not_fit_is_refused_with_figures_and_nothing_is_taken() -> None:
    free = psutil.virtual_memory().available
    started = len(psutil.Process().children())
    with pytest.raises(ValueError, match=r"a hog of \d+\.\d+ GB does not fit: \d+\.\d+ GB is free"):
        Hog(free)
    assert len(psutil.Process().children()) == started


@pytest.mark.parametrize(
    ("cap", "free", "total", "words"),
    [
        (5 * GB, 8 * GB, 16 * GB, None),
        (7 * GB, 8 * GB, 16 * GB, "at most 6.39 GB can be taken"),
        (GB, 1650 * 10**6, 8 * GB, "nothing can be taken"),
        (10**6, 8 * GB, 16 * GB, "smaller than 0.07 GB"),
        (57 * GB, 60 * GB, 64 * GB, "4.00 GB must stay free"),
    ],
)
def test_what_is_safe(cap: int, free: int, total: int, words: str | None) -> None:
    found = hog.why_not(cap, free, total)
    assert found is None if words is None else words in (found or "")


@pytest.mark.skipif(sys.platform != "linux", reason="a file of Linux")
def test_the_kernel_would_take_the_hog_first() -> None:
    with Hog(CAP) as held:
        assert Path(f"/proc/{held.pid}/oom_score_adj").read_text().strip() == "1000"
