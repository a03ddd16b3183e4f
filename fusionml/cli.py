"""The commands: `python -m fusionml {run,compare,calibrate,doctor}`, and the console script `fusionml`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from . import __version__
from .loading import UsageError
from .ratios import DEFAULT_ROWS
from .settings import BOUNDARIES, CPU_DTYPES, GATES, Settings, check_ratio

if TYPE_CHECKING:
    from .table import RatioTable

CHUNK = 2048
"""Rows of MLX-LM's usual chunk."""
BUDGET = 60.0
"""Seconds that a calibration takes."""
DEMO_BUDGET, DEMO_ROWS = 16.0, (512, 1024)
"""Seconds to calibrate the small model in, and its rows; what holds for 1024 serves longer prompts too."""
SHORTEST_PROMPT = 2
"""Tokens: one for a chunk of prefill and the last, which MLX-LM runs alone."""


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
    _add_calibrate(commands.add_parser("calibrate", help="measure the best CPU share of a model's layers"))
    _add_doctor(commands.add_parser("doctor", help="is it on, for which layers, and why not for the others"))
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
    given = {n: getattr(args, n) for n in ("ratio", "min_rows", "boundary", "cpu_dtype", "gate", "table")}
    _resolved(given)
    return given


def _resolved(given: dict[str, Any]) -> Settings:
    """All settings: those given, else the environment's, else the defaults."""
    from . import split
    from .settings import resolve

    try:
        return resolve(given, max_ratio=split.max_ratio())
    except ValueError as error:
        raise UsageError(str(error)) from None


def _table(settings: Settings) -> RatioTable:
    """The ratio table that `patch()` would use, whether or not there is one yet."""
    from .session import open_table

    if settings.table is not None and Path(settings.table).is_dir():
        raise UsageError(f"--table {settings.table} is a folder, not a file")
    return open_table(settings.table)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub id (default: a small one made on the spot)")
    parser.add_argument("--prompt-file", help="text to make the prompts from")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", help="prompt lengths (default: 512 2048)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each answer (default: 64)")
    parser.add_argument("--runs", type=int, default=2, help="runs of each arm at each length (default: 2)")
    parser.add_argument("--json", metavar="FILE", help="write every sample and the environment here")
    parser.add_argument("--calibrate", action="store_true", help="measure the model's ratios first")
    _add_settings(parser)
    parser.set_defaults(command=_compare)


def _compare(args: argparse.Namespace) -> int:
    from . import loading, machine
    from .compare import compare, render
    from .patching import patched

    settings = _settings(args)
    _check_compare(args)
    source = None if args.prompt_file is None else _read(args.prompt_file)
    with patched(**settings, enabled=True):
        model, tokenizer, config, name = loading.load(args.model)
    context = loading.context(config)
    _check_context(args, context)
    rows: tuple[int, ...] = DEMO_ROWS if args.model is None else DEFAULT_ROWS
    rows = rows if args.prompt_tokens is None else _rows_of(args.prompt_tokens)
    # The small model has too few layers to learn from a prompt or two, as a real one does.
    if rows and (args.calibrate or args.model is None):
        budget = DEMO_BUDGET if args.model is None else BUDGET
        _measure(model, name, args.name, _resolved(settings), not args.calibrate, rows=rows, budget=budget)
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


def _rows_of(lengths: list[int]) -> tuple[int, ...]:
    """Rows of the calls worth measuring that prompts of so many tokens make.

    MLX-LM runs the last token alone, and a long prompt in chunks.
    """
    from .calibrate import LEAST_ROWS

    rows = {min(length - 1, CHUNK) for length in lengths}
    return tuple(sorted(n for n in rows if n >= LEAST_ROWS))


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


def _progress(label: str) -> Any:
    """A bar on stderr where it is a terminal."""
    from tqdm import tqdm

    bar = tqdm(desc=label, disable=None, leave=False)

    def tell(done: float, total: float, what: str = "") -> None:
        bar.set_postfix_str(what, refresh=False)
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return tell


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub id (default: a small one made on the spot)")
    parser.add_argument("--config", help="a config.json: measures its shapes with made-up weights")
    parser.add_argument(
        "--rows", type=int, nargs="+", help=f"rows of a call (default: {_list(DEFAULT_ROWS)})"
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET, help=f"seconds to spend (default: {BUDGET:.0f})"
    )
    parser.add_argument(
        "--grid", type=float, nargs="*", help="only these CPU shares; alone, the paper's 0 to 0.5 by 0.1"
    )
    parser.add_argument("--cpu-dtype", help=f"{', '.join(CPU_DTYPES)} (default: auto, both where safe)")
    parser.add_argument("--table", help="path of the ratio table")
    parser.add_argument("--show", action="store_true", help="print the table and measure nothing")
    parser.add_argument("--clear", action="store_true", help="forget the table and measure nothing")
    parser.add_argument("--force", action="store_true", help="measure on a battery or a busy machine too")
    parser.add_argument("--explain", action="store_true", help="say what a model of the two units expects")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.set_defaults(command=_calibrate, ratio=None, min_rows=None, boundary=None, gate=None)


def _calibrate(args: argparse.Namespace) -> int:
    from . import calibrate, loading, machine, pair_model

    settings = _resolved(_settings(args))
    grid = _grid(args.grid)
    if args.model is not None and args.config is not None:
        raise UsageError("--model and --config exclude each other; a config needs no model")
    if args.show or args.clear:
        if args.explain:
            raise UsageError("--explain needs a measurement; --show and --clear make none")
        return _show_or_clear(_table(settings), args)
    rows = args.rows or DEFAULT_ROWS
    try:
        calibrate.check_options(rows, args.budget)
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    made_up = None
    if args.config is not None:
        model, made_up, name = loading.from_config(args.config)
    else:
        model, _, _, name = loading.load(args.model)
    options = {"rows": rows, "budget": args.budget, "grid": grid, "made_up": made_up}
    outcomes, path = _measure(model, name, args.name, settings, args.force, **options)
    explained = _explained(outcomes) if args.explain else None
    if args.json:
        answer = {"model": name, "table": path, "environment": machine.stamp()}
        answer |= {} if explained is None else {"pair_model": explained}
        print(json.dumps({**answer, "sites": [calibrate.as_dict(o) for o in outcomes]}, indent=1))
    else:
        print(calibrate.render(outcomes))
        if explained is not None:
            print("\n" + pair_model.render(explained))
    return 0


def _explained(outcomes: list[Any]) -> dict[str, dict[str, Any]]:
    """What the pair model expects of each site, from the figures that its search took."""
    from . import pair_model, split
    from .timing import boundary_seconds

    sites = [
        pair_model.Searched(f"{found.site.key()} ({found.rows} rows)", found.rows, found.choice)
        for found in outcomes
        if found.choice is not None
    ]
    return pair_model.explain(sites, boundary_seconds(), max_ratio=split.max_ratio())


def _measure(
    model: Any, name: str, command: str, settings: Settings, force: bool, **options: Any
) -> tuple[list[Any], str]:
    """Calibrate, refusing where it would not hold tomorrow: the outcomes, and the table's path."""
    from . import calibrate

    table = _table(settings)
    refused = [] if force else calibrate.why_not()
    if refused:
        raise UsageError(f"not now: {'; '.join(refused)} (--force measures all the same)")
    bar = _progress("calibrate")

    def tell(what: str, spent: float, budget: float) -> None:
        bar(budget if what == "done" else min(spent, 0.99 * budget), budget, what)

    try:
        outcomes = calibrate.calibrate(
            model, table=table, cpu_dtype=settings.cpu_dtype, progress=tell, **options
        )
    except calibrate.NothingToCalibrateError as error:
        raise UsageError(f"{name} has nothing to calibrate: {error}") from None
    except OSError as error:
        raise UsageError(f"--table {table.path} cannot be written: {error.strerror or error}") from None
    except KeyboardInterrupt:
        print(f"fusionml {command}: interrupted; {table.path} holds {len(table)} sites", file=sys.stderr)
        raise SystemExit(130) from None
    print(f"{name}: measured into {table.path}", file=sys.stderr)
    return outcomes, table.path


def _grid(given: list[float] | None) -> list[float] | None:
    """The candidates of `--grid`; without numbers, the paper's."""
    from . import ratios, split

    if given is None:
        return None
    for ratio in given:
        try:
            check_ratio(ratio, split.max_ratio(), "--grid")
        except ValueError as error:
            raise UsageError(str(error)) from None
    return list(given or ratios.PAPER_GRID)


def _show_or_clear(table: RatioTable, args: argparse.Namespace) -> int:
    from . import calibrate

    if args.clear:
        try:
            table.clear()
        except OSError as error:
            raise UsageError(f"--table {table.path} cannot be written: {error.strerror or error}") from None
        print(f"forgot {table.path}", file=sys.stderr)
    elif args.json:
        entries = {site.key(): asdict(entry) for site, entry in table.entries().items()}
        print(json.dumps({"table": table.path, "entries": entries, "ignored": table.ignored}, indent=1))
    else:
        print(calibrate.render_table(table))
    return 0


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub id: say it for the layers of this model")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON, for a bug report")
    parser.set_defaults(command=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from . import doctor, loading
    from .patching import patched

    _resolved({})
    model = None
    if args.model is not None:
        with patched(enabled=True):  # also where it is off: its layers are told all the same
            model = loading.load(args.model)[0]
    with patched():
        report = doctor.examine(model, args.model)
    print(json.dumps(report, indent=1) if args.json else doctor.render(report))
    return 0 if report["on"] else 1


def _list(numbers: Any) -> str:
    return " ".join(map(str, numbers))


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
