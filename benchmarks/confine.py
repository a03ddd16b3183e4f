"""Linux: a memory limit for this process and its children alone, so that only they run short of memory.

A memory control group, of either version, where this process may make one (as root, in most containers, under
systemd with delegation). Elsewhere there is none, and running short means that the whole machine does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fusionml.machine import attempt

ROOT = Path("/sys/fs/cgroup")
NAME = "fusionml-"
LIMITS = ("memory.max", "memory.limit_in_bytes")
TRIES = 50


def available() -> bool:
    """Whether this process may make a memory control group here; nothing of the attempt is left."""
    made = _make()
    if made is None:
        return False
    made.rmdir()
    return True


@contextmanager
def confined(limit_bytes: int) -> Iterator[None]:
    """This process, and what it starts, may use so many bytes beyond what it has already.

    Raises:
        OSError: no group can be made.
    """
    made = _make()
    if made is None:
        raise OSError("no memory control group can be made here")
    home = _own(made)
    try:
        _limit(made).write_text(str(limit_bytes))
        (made / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()))
        _remove(made)


def _make() -> Path | None:
    """A group of our own below this process's or below the root, whichever has the memory controller."""
    for base in dict.fromkeys((*_candidates(), ROOT / "memory", ROOT)):
        made = base / f"{NAME}{os.getpid()}"
        try:
            for left in base.glob(f"{NAME}*"):  # of a process that was killed; one in use does not go
                attempt(left.rmdir)
            made.mkdir()
        except OSError:
            continue
        if any((made / name).exists() for name in LIMITS):
            return made
        made.rmdir()
    return None


def _candidates() -> Iterator[Path]:
    """This process's own groups that may have the memory controller."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield ROOT / "memory" / path.lstrip("/")
        elif not controllers:
            yield ROOT / path.lstrip("/")


def _limit(made: Path) -> Path:
    return next(made / name for name in LIMITS if (made / name).exists())


def _own(made: Path) -> Path:
    """The group that this process comes from and goes back to, in the hierarchy of `made`."""
    for candidate in _candidates():
        if (candidate / "cgroup.procs").exists() and _limit(made).name in os.listdir(candidate):
            return candidate
    return made.parent


def _remove(made: Path) -> None:
    """The group goes once the last child that was in it is gone."""
    for _ in range(TRIES):
        try:
            made.rmdir()
            return
        except OSError:
            time.sleep(0.1)
