"""A process that holds memory up to a cap, so that what is measured beside it runs short of it.

It takes nothing beyond its cap, and gives everything back when whoever started it ends in any way, Ctrl-C
and `kill -9` among them: it waits on a pipe that closes with that process. It also gives everything back,
and says so, when the machine runs lower than was agreed, and the system's own last resort is told to take it
first.

`python -m benchmarks.hog CAP FLOOR` is the process itself, started by `Hog`.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import subprocess
import sys
from types import TracebackType

import psutil

STEP_BYTES = 16 * 2**20
RESERVE_BYTES, RESERVE_SHARE = 3 * 2**29, 16
LEAST_CAP = 4 * STEP_BYTES
LOOK_SECONDS = 0.1
SWEEP_LOOKS = 50
"""Looks in which every page is touched once, lest the system put the hog aside instead of the others."""
START_SECONDS = 300.0
LET_GO = 3
"""Exit status of a hog that gave its memory back because the machine ran low."""


# --- how much is safe


def reserve(total_bytes: int) -> int:
    """Bytes that stay free for the system: 1.5 GiB, a sixteenth of a large machine."""
    return max(RESERVE_BYTES, total_bytes // RESERVE_SHARE)


def why_not(cap: int, free_bytes: int, total_bytes: int) -> str | None:
    """Why a hog of `cap` bytes may not run here, with figures; None where it may."""
    if cap < LEAST_CAP:
        return f"a hog of {_gb(cap)} is smaller than {_gb(LEAST_CAP)}, which its own process needs"
    left, most = free_bytes - cap, free_bytes - reserve(total_bytes)
    if left >= reserve(total_bytes):
        return None
    allowed = f"at most {_gb(most)}" if most >= LEAST_CAP else "nothing"
    return (
        f"a hog of {_gb(cap)} does not fit: {_gb(free_bytes)} is free and {_gb(reserve(total_bytes))} must "
        f"stay free, so {allowed} can be taken"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


# --- the side that starts it


class HogError(Exception):
    """The hog does not hold what it should; the message says why."""


class Hog:
    """Context manager: while inside, another process holds memory.

    Args:
        cap_bytes: what that process takes in all, itself included.

    Raises:
        ValueError: the cap does not fit into what is free (see `why_not`); nothing was taken.
        HogError: the process ended before it held its memory.
    """

    def __init__(self, cap_bytes: int) -> None:
        memory = psutil.virtual_memory()
        refused = why_not(cap_bytes, memory.available, memory.total)
        if refused:
            raise ValueError(refused)
        self.cap_bytes, self._floor = cap_bytes, reserve(memory.total) // 2
        self.held_bytes = 0

    def __enter__(self) -> Hog:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.hog", str(self.cap_bytes), str(self._floor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            self.held_bytes = self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def pid(self) -> int:
        """Of the process that holds the memory."""
        return self._process.pid

    def check(self) -> None:
        """A HogError if the memory is no longer held."""
        code = self._process.poll()
        if code == LET_GO:
            raise HogError(f"less than {_gb(self._floor)} was free: the hog gave its memory back")
        if code is not None:
            raise HogError(f"the hog ended with {code}")

    def _wait(self) -> int:
        assert self._process.stdout is not None
        if select.select([self._process.stdout], [], [], START_SECONDS)[0]:
            line = self._process.stdout.readline()
            if line:
                return int(json.loads(line)["held"])
        else:
            raise HogError(f"the hog took more than {START_SECONDS:.0f} s to fill its memory")
        self._process.wait()
        self.check()
        raise HogError("the hog said nothing")

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


# --- the process itself


def main(cap: int, floor: int) -> int:
    """Hold `cap` bytes until standard input closes, or until less than `floor` bytes are free."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _offer_to_the_killer()
    own, steps = psutil.Process(), []
    content = os.urandom(STEP_BYTES) if _may_compress() else None
    while own.memory_info().rss + STEP_BYTES + mmap.PAGESIZE <= cap:
        if _abandoned(0):
            return 0
        if _low(floor):
            return LET_GO
        steps.append(_step(content))
    print(json.dumps({"held": own.memory_info().rss}), flush=True)
    look = 0
    while not _abandoned(LOOK_SECONDS):
        if _low(floor):
            return LET_GO
        for step in steps[look % SWEEP_LOOKS :: SWEEP_LOOKS]:
            step[:: mmap.PAGESIZE]
        look += 1
    return 0


def _step(content: bytes | None) -> mmap.mmap:
    """So many bytes of memory that are really taken."""
    if content is None and hasattr(mmap, "MAP_POPULATE"):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        return mmap.mmap(-1, STEP_BYTES, flags=flags)
    step = mmap.mmap(-1, STEP_BYTES)
    step[:] = content or bytes(STEP_BYTES)
    return step


def _may_compress() -> bool:
    """Whether the system would make room by squeezing pages of zeros to nothing."""
    return sys.platform == "darwin" or psutil.swap_memory().total > 0


def _abandoned(seconds: float) -> bool:
    """Whether whoever started this has ended; waits so long for it."""
    return bool(select.select([sys.stdin], [], [], seconds)[0]) and not os.read(sys.stdin.fileno(), 1)


def _low(floor: int) -> bool:
    return psutil.virtual_memory().available < floor


def _offer_to_the_killer() -> None:
    """Linux: should memory run out all the same, this process is the one to end."""
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
    except OSError:
        pass


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
