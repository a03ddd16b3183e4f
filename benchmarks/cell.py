"""One cell in a process of its own: `python -m benchmarks.cell`, started by `runner`.

The request is one line of JSON on standard input; the result goes into the file that it names. Standard input
stays open for as long as the runner lives, so that no cell outlives it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from benchmarks import experiment
from fusionml import machine


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner gets it too, and ends us
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_die_with_the_runner, daemon=True).start()
    sys.stdout = sys.stderr  # what a library prints is not the runner's table
    answer: dict[str, Any]
    others = machine.OtherLoad()
    try:
        answer = {"result": _measure(request), "error": None}
    except BaseException as error:
        traceback.print_exc()
        answer = {"result": None, "error": last_line(error)}
    answer["others"] = others.share()
    Path(request["answer"]).write_text(json.dumps(answer))
    return 0


def _measure(request: dict[str, Any]) -> experiment.Cell:
    options = experiment.Options(**request["options"])
    chosen = importlib.import_module(request["module"]).EXPERIMENT
    result: experiment.Cell = chosen.measure(request["parameters"], options)
    json.dumps(result, allow_nan=False)  # what is no number is a cell that failed
    return result


def last_line(error: BaseException) -> str:
    """The error as the last line of a traceback has it."""
    return traceback.format_exception_only(type(error), error)[-1].strip().splitlines()[-1]


def _die_with_the_runner() -> None:
    # Not sys.stdin: its lock would be held when Python shuts down.
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
