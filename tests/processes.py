"""Whether a process is still there."""

from __future__ import annotations

import psutil


def ended(pid: int) -> bool:
    """Whether a process has ended; a zombie has, which an orphan stays without an init process that reaps.

    Asked in one go: between two looks it may end.
    """
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
