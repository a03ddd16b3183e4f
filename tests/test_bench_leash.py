"""Nothing that a benchmark starts outlives it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from processes import ended

from benchmarks import leash

SAY = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " + SAY
HOLD = (
    "import sys; from benchmarks.leash import leashed\n"
    "with leashed([sys.executable, '-c', sys.argv[1]]) as process:\n    process.wait()"
)


def gone(pid: int, seconds: float = 20) -> bool:
    """Whether the process has ended, waiting for it."""
    deadline = time.monotonic() + seconds
    while not ended(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_it_is_gone_after_the_block() -> None:
    with leash.leashed([sys.executable, "-c", SAY], stdout=subprocess.PIPE) as process:
        pid = int(process.stdout.readline())
        assert pid != process.pid
        assert psutil.pid_exists(pid)
    assert gone(pid, 1)


def test_one_that_does_not_listen_to_ctrl_c_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    short = tmp_path / "leash.py"
    short.write_text(Path(leash.__file__).read_text().replace("GRACE = 10.0", "GRACE = 0.2"))
    monkeypatch.setattr(leash, "__file__", str(short))
    with leash.leashed([sys.executable, "-c", DEAF], stdout=subprocess.PIPE) as process:
        pid = int(process.stdout.readline())
    assert gone(pid, 1)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_is_gone_when_whoever_held_it_is_killed(how: signal.Signals) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, SAY], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert holder.stdout is not None
    pid = int(holder.stdout.readline())
    os.kill(holder.pid, how)
    holder.wait(20)
    holder.stdout.close()
    assert gone(pid)


def test_the_command_is_told_of_ctrl_c_where_we_were_started_deaf_to_it() -> None:
    code = (
        "import os, time\nprint(os.getpid(), flush=True)\n"
        "try: time.sleep(60)\nexcept KeyboardInterrupt: print('heard')"
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with leash.leashed([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
        assert process.stdout.read() == b"heard\n"
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_exit_status_is_the_commands() -> None:
    with leash.leashed([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        assert process.wait(20) == 3
