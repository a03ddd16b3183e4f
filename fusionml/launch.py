"""`python -m fusionml run`: another program, patched, as if it had been started directly."""

from __future__ import annotations

import atexit
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import Any

from . import patching

Start = Callable[[], Any]


class NotFound(Exception):
    """There is no such command, module or script."""


def run(target: str, args: list[str]) -> None:
    """Run `target` with `args` in this process, patched by what `patch()` was given.

    Its exit status, standard streams, signals and tracebacks are its own.

    Args:
        target: a console script of an installed package (`mlx_lm.generate`, as its own command would start
            it), a module (as `python -m` would) or a script (a path that ends in `.py` or has a slash).
        args: its arguments, untouched.

    Raises:
        NotFound: it is none of these.
    """
    start = _command(target) or _script(target) or _module(target)
    if start is None:
        raise NotFound(f"{target!r} is no installed command, module or script")
    sys.argv = [target, *args]
    sys.excepthook = _without_our_frames(sys.excepthook)
    atexit.register(_last_line)
    print("fusionml: on; large linear layers of prompts are split", file=sys.stderr)
    sys.exit(start())


def _command(target: str) -> Start | None:
    for point in entry_points(group="console_scripts", name=target):
        return lambda: point.load()()
    return None


def _script(target: str) -> Start | None:
    if not (target.endswith(".py") or os.path.sep in target) or not Path(target).exists():
        return None

    def start() -> None:
        sys.path[0] = str(Path(target).resolve().parent)
        runpy.run_path(target, run_name="__main__")

    return start


def _module(target: str) -> Start | None:
    try:
        if importlib.util.find_spec(target) is None:
            return None
    except (ImportError, ValueError):
        return None
    return lambda: runpy.run_module(target, run_name="__main__", alter_sys=True) and None


def _last_line() -> None:
    tokens, share = patching.session().shared()
    print(f"fusionml: {tokens} prompt tokens, {share:.0%} of their linear arithmetic split", file=sys.stderr)


def _without_our_frames(hook: Any) -> Any:
    """An excepthook that shows a traceback from the program's own first frame on."""

    def excepthook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        ours = (str(Path(__file__).parent), "<frozen runpy>", runpy.__file__)
        first = tb
        while first is not None and first.tb_frame.f_code.co_filename.startswith(ours):
            first = first.tb_next
        shown = first if first is not None else tb
        hook(kind, error.with_traceback(shown), shown)

    return excepthook
