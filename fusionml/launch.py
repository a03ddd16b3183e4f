"""`python -m fusionml run`: another program, patched, as if it had been started directly."""

from __future__ import annotations

import atexit
import contextlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import runpy
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from . import patching

Start = Callable[[], Any]

# What stands between us and the program's own first frame.
_MACHINERY = (__file__, runpy.__file__, "<frozen runpy>", importlib.__file__, importlib.metadata.__file__)


class NotFound(Exception):
    """There is no such command, module or script."""


def run(target: str, args: list[str], settings: dict[str, Any]) -> None:
    """Run `target` with `args` in this process, patched.

    Its exit status, standard streams, signals and tracebacks are its own.

    Args:
        target: a console script of an installed package (`mlx_lm.generate`, as its own command would start
            it), a module (as `python -m` would), a script (a path that ends in `.py` or has a slash),
            or a folder or zip archive with a `__main__.py`.
        args: its arguments, untouched.
        settings: as for `patch()`.

    Raises:
        NotFound: it is none of these; nothing is patched then.
        ValueError: a setting outside what is allowed; nothing is patched then.
    """
    start = _command(target) or _script(target) or _module(target) or _folder(target)
    if start is None:
        raise NotFound(f"{target!r} is no installed command, module or script")
    patching.patch(**settings)
    sys.argv = [target, *args]
    sys.excepthook = _without_our_frames(sys.excepthook)
    if patching.status()["patched"]:
        atexit.register(_last_line)
        _say("on; large linear layers of prompts are split")
    else:
        _say("off (FUSIONML_ENABLED=0); everything is stock")
    sys.exit(start())


def _command(target: str) -> Start | None:
    for point in importlib.metadata.entry_points(group="console_scripts", name=target):
        return lambda: point.load()()
    return None


def _script(target: str) -> Start | None:
    if not (target.endswith(".py") or os.path.sep in target) or not Path(target).is_file():
        return None
    if zipfile.is_zipfile(target):
        return None

    def start() -> None:
        # Not runpy.run_path(): its `__file__` is what was typed, Python's own is whole, also after a chdir.
        path = os.path.join(os.getcwd(), target)
        _put_first(str(Path(path).resolve().parent))
        main = ModuleType("__main__")
        main.__file__ = path
        sys.modules["__main__"] = main
        # Not with this file's own `from __future__`.
        exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)

    return start


def _folder(target: str) -> Start | None:
    """A folder or zip archive with a `__main__.py`."""
    path = os.path.join(os.getcwd(), target)
    spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
    if spec is None or spec.loader is None:
        return None
    loader, main = spec.loader, importlib.util.module_from_spec(spec)

    def start() -> None:
        # Not runpy.run_path(): it puts first in `sys.path` what was typed, which a chdir makes another place.
        _put_first(path, always=True)
        sys.modules["__main__"] = main
        loader.exec_module(main)

    return start


def _module(target: str) -> Start | None:
    _put_first(os.getcwd())
    try:
        if importlib.util.find_spec(target) is None:
            return None
    except (ImportError, ValueError):
        return None
    return lambda: runpy.run_module(target, run_name="__main__", alter_sys=True) and None


def _put_first(folder: str, *, always: bool = False) -> None:
    """Where Python looks first for a program started so; with `-P` only if it is the program itself."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
    elif always:
        sys.path.insert(0, folder)


def _last_line() -> None:
    tokens, share = patching.session().shared()
    _say(f"{tokens} prompt tokens, {share:.0%} of their linear arithmetic split")


def _say(line: str) -> None:
    if sys.stderr is not None:  # closed by whoever started us: print() would take stdout instead
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            print(f"fusionml: {line}", file=sys.stderr, flush=True)


def _without_our_frames(hook: Any) -> Any:
    """An excepthook that shows a traceback from the program's own first frame on."""

    def excepthook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        shown = tb
        while shown is not None and _file(shown) != __file__:
            shown = shown.tb_next
        if shown is None:  # not raised by the program
            return hook(kind, error, tb)
        while shown is not None and _is_machinery(shown):
            shown = shown.tb_next
        hook(kind, error.with_traceback(shown), shown)

    return excepthook


def _is_machinery(tb: TracebackType) -> bool:
    return _file(tb) in _MACHINERY or _file(tb).startswith("<frozen importlib")


def _file(tb: TracebackType) -> str:
    return tb.tb_frame.f_code.co_filename
