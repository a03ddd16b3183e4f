"""A process that never outlives the one that started it, however that ends.

The standard input is the leash: `python leash.py COMMAND...` runs the command until it ends by itself or
until nobody holds the other end any more, which the system sees to also for whoever was killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

GRACE = 10.0
"""Seconds from Ctrl-C's signal until it is killed."""


@contextlib.contextmanager
def leashed(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """`command` in a process of its own, which gets Ctrl-C's signal at the end of the block.

    Args:
        command: as for `subprocess.Popen`.
        **options: as for `subprocess.Popen`, all but `stdin`.
    """
    # Isolated: what lies in this folder must not stand in for a module of the standard library.
    holder = [sys.executable, "-I", __file__, *command]
    process = subprocess.Popen(holder, stdin=subprocess.PIPE, **options)
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait(2 * GRACE)


def main(command: Sequence[str]) -> int:
    """Hold `command` on this process's standard input; its exit status."""
    # A shell's background jobs ignore Ctrl-C, and the command would inherit that.
    signal.signal(signal.SIGINT, lambda *_: None)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: child.kill())
    threading.Thread(target=_follow, args=(child,), daemon=True).start()
    return child.wait()


def _follow(child: subprocess.Popen[bytes]) -> None:
    os.read(
        sys.stdin.fileno(), 1
    )  # not sys.stdin.read(): it would hold a lock that the interpreter's end needs
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(signal.SIGINT)
    try:
        child.wait(GRACE)
    except subprocess.TimeoutExpired:
        child.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
