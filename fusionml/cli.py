"""The commands: `python -m fusionml {run,compare}`, and the console script `fusionml`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from . import __version__
from .settings import BOUNDARIES, CPU_DTYPES, GATES, home

SHORTEST_PROMPT = 2
"""Tokens: one for a chunk of prefill and the last, which MLX-LM runs alone."""


class UsageError(Exception):
    """Wrong use, told in one line; exit status 2."""


class Parser(argparse.ArgumentParser):
    """argparse that says what is wrong in one line, without the whole usage above it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.allow_abbrev = False

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: list[str] | None = None) -> int:
    """Run one command; its exit status is 0, 1 for a failure or 2 for wrong use."""
    args = _parser().parse_args(argv)
    try:
        return int(args.command(args))
    except UsageError as error:
        print(f"fusionml {args.name}: {error}", file=sys.stderr)
        return 2


def _parser() -> Parser:
    parser = Parser("fusionml", description="Faster prompts for MLX-LM.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="name", required=True)
    _add_compare(commands.add_parser("compare", help="stock and patched side by side on one model"))
    _add_run(commands.add_parser("run", help="run a module or a script patched"))
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ratio", type=float, help="CPU share of the rows (default: table, then built-in)")
    parser.add_argument("--min-rows", type=int, help="fewest rows that are split (default: 256)")
    parser.add_argument("--boundary", help=f"{', '.join(BOUNDARIES)} (default: eager)")
    parser.add_argument("--cpu-dtype", help=f"{', '.join(CPU_DTYPES)} (default: auto)")
    parser.add_argument("--gate", help=f"{', '.join(GATES)} (default: auto)")
    parser.add_argument("--table", help="path of the ratio table")


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings given on the command line, checked."""
    from . import split
    from .settings import resolve

    given = {n: getattr(args, n) for n in ("ratio", "min_rows", "boundary", "cpu_dtype", "gate", "table")}
    try:
        resolve(given, max_ratio=split.max_ratio())
    except ValueError as error:
        raise UsageError(str(error)) from None
    return given


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub id (default: a small one made on the spot)")
    parser.add_argument("--prompt-file", help="text to make the prompts from")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", help="prompt lengths (default: 512 2048)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each answer (default: 64)")
    parser.add_argument("--runs", type=int, default=2, help="runs of each arm at each length (default: 2)")
    parser.add_argument("--json", metavar="FILE", help="write every sample and the environment here")
    _add_settings(parser)
    parser.set_defaults(command=_compare)


def _compare(args: argparse.Namespace) -> int:
    from . import machine
    from .compare import compare, render
    from .patching import patched

    settings = _settings(args)
    _check_compare(args)
    source = None if args.prompt_file is None else _read(args.prompt_file)
    with patched(**settings, enabled=True):
        model, tokenizer, config, name = _load(args.model)
    context = _context(config)
    _check_context(args, context)
    print(f"{name}: stock against patched, {args.runs} runs each, A-B-B-A, greedy", file=sys.stderr)
    result = compare(
        model,
        tokenizer,
        context=context,
        lengths=args.prompt_tokens,
        max_tokens=args.max_tokens,
        pairs=args.runs,
        source=source,
        settings=settings,
        progress=_progress("compare"),
    )
    print(render(result, tokenizer))
    if args.json:
        result = {"model": name, "arguments": settings, "environment": machine.stamp(), **result}
        return _write(args.json, json.dumps(result, indent=1) + "\n")
    return 0


def _check_compare(args: argparse.Namespace) -> None:
    for name, least in (("max_tokens", 1), ("runs", 1)):
        if getattr(args, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)} is less than {least}")
    for length in args.prompt_tokens or []:
        if length < SHORTEST_PROMPT:
            raise UsageError(f"--prompt-tokens {length} is less than {SHORTEST_PROMPT}")
    if args.json and not Path(args.json).resolve().parent.is_dir():
        raise UsageError(f"--json {args.json}: there is no such folder")
    if args.json and Path(args.json).is_dir():
        raise UsageError(f"--json {args.json} is a folder, not a file")


def _check_context(args: argparse.Namespace, context: int | None) -> None:
    """Refuse what the model's context does not hold; without prompt lengths the shortest prompt must fit."""
    for length in args.prompt_tokens or [SHORTEST_PROMPT]:
        if context is not None and length + args.max_tokens > context:
            prompt = f"--prompt-tokens {length} and " if args.prompt_tokens else ""
            raise UsageError(f"{prompt}--max-tokens {args.max_tokens} exceed the context of {context}")


def _write(path: str, content: str) -> int:
    try:
        Path(path).write_text(content)
    except OSError as error:
        print(f"fusionml compare: --json {path} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _read(path: str) -> str:
    try:
        content = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompt-file {path}: {error}") from None
    if not content.strip():
        raise UsageError(f"--prompt-file {path} is empty")
    return content


def _load(model: str | None) -> tuple[Any, Any, dict[str, Any], str]:
    """Model, tokenizer, config and name; refused before its weights are read when they do not fit."""
    import mlx.core as mx
    import psutil
    from mlx.utils import tree_flatten
    from mlx_lm import load

    path = _demo() if model is None else model
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not Path(path).expanduser().is_dir():
        raise UsageError(f"--model {path}: there is no such folder")
    try:
        loaded, tokenizer, config = load(str(Path(path).expanduser()), lazy=True, return_config=True)
    except Exception as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(f"--model {path} cannot be loaded: {first[0]}") from None
    needed = sum(array.nbytes for _, array in tree_flatten(loaded.parameters()))
    free = psutil.virtual_memory().available
    if needed > free:
        raise UsageError(f"--model {path} needs {needed / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free")
    mx.eval(loaded.parameters())
    return loaded, tokenizer, config, "demo" if model is None else Path(path).resolve().name


def _demo() -> str:
    from .demo import demo_checkpoint

    try:
        return str(demo_checkpoint(home()))
    except OSError as error:
        where = f"FUSIONML_HOME {home()} cannot be written: {error.strerror}"
        raise UsageError(f"{where}; set it to another folder, or give --model") from None


def _context(config: dict[str, Any]) -> int | None:
    for part in (config, config.get("text_config") or {}):
        for key in ("max_position_embeddings", "n_positions"):
            if isinstance(part.get(key), int):
                return int(part[key])
    return None


def _progress(label: str) -> Any:
    """A bar on stderr where it is a terminal."""
    from tqdm import tqdm

    bar = tqdm(desc=label, disable=None, leave=False)

    def tell(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return tell


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.usage = "fusionml run [settings] MODULE_OR_SCRIPT [its arguments ...]"
    _add_settings(parser)
    # One argument, not two: argparse would take away a `--` that follows the first.
    parser.add_argument(
        "target",
        nargs=argparse.REMAINDER,
        metavar="MODULE_OR_SCRIPT ...",
        help="module (mlx_lm.generate) or script (file.py), and its arguments, untouched",
    )
    parser.set_defaults(command=_run)


def _run(args: argparse.Namespace) -> int:
    from . import launch

    settings = _settings(args)
    if not args.target:
        raise UsageError("nothing to run; name a module (mlx_lm.generate) or a script (file.py)")
    try:
        launch.run(args.target[0], args.target[1:], settings)
    except launch.NotFound as error:
        raise UsageError(str(error)) from None
    return 0
