"""`python -m benchmarks NAME`: repeats one figure or table of the paper on this machine.

NAME is an experiment, `all` for each one that can run here, or `report` for the page made of the results.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks import experiment, runner, scale, table
from benchmarks.checkpoints import at_least
from benchmarks.experiment import Cell, Experiment, Options

RESULTS = Path("results")
COOL_DOWN = 3.0
COMMON = ("quick", "scale", "samples", "force", "results", "cool_down")
FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run what `argv` names; 0, 1 where something failed, 2 for wrong use or a machine that cannot run it."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name, rest = _name(arguments)
    if name == "report":
        return int(importlib.import_module("benchmarks.report").main(rest))
    try:
        return _all(rest) if name == "all" else _one(name, rest)
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept", file=sys.stderr)
        return INTERRUPTED


def _name(arguments: list[str]) -> tuple[str, list[str]]:
    """The experiment, and what is left for it to read."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description=__doc__,
        epilog=f"experiments: {', '.join(experiment.NAMES)}. `NAME --help` tells what one measures.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", choices=[*experiment.NAMES, "all", "report"])
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="see `NAME --help`")
    found = parser.parse_args(arguments)
    return found.name, found.flags


def _one(name: str, rest: list[str]) -> int:
    try:
        chosen = experiment.load(name)
    except ImportError as error:
        return _say(f"{name}: cannot run here: {error}", WRONG_USE)
    args = parse(chosen, rest)
    if why := chosen.unavailable():
        return _say(f"{name}: cannot run here: {why}", WRONG_USE)
    return _run(chosen, args, [name, *rest])


def _all(rest: list[str]) -> int:
    """Each experiment with its own defaults; one that fails does not stop the others."""
    parser = argparse.ArgumentParser("python -m benchmarks all", description="Each that can run here.")
    add_common(parser)
    parser.parse_args(rest)
    codes = []
    for name in experiment.NAMES:
        print(f"--- {name}", flush=True)
        codes.append(_one(name, rest))
    return FAILED if FAILED in codes else 0


def _say(line: str, code: int) -> int:
    print(line, file=sys.stderr, flush=True)
    return code


# --- one experiment


def add_common(parser: argparse.ArgumentParser) -> None:
    """The flags that every experiment has."""
    add = parser.add_argument
    add("--quick", action="store_true", help="a tenth of the samples, small sizes: under a minute")
    add(
        "--scale",
        type=at_least(0),
        default=0,
        help="divide the paper's sizes by this; 0 (default) measures the machine and chooses",
    )
    add("--samples", type=at_least(1), default=None, help="samples of each arm (default: the paper's)")
    add("--force", action="store_true", help="run on battery, in low-power mode or short of memory; says so")
    add("--results", type=Path, default=RESULTS, help="folder for the JSON (default: results)")
    add("--cool-down", type=float, default=None, help="seconds to rest for each cell (default: 3, quick: 0)")


def parse(chosen: Experiment, rest: Sequence[str]) -> argparse.Namespace:
    """The flags of one experiment: the common ones and its own."""
    parser = argparse.ArgumentParser(
        f"python -m benchmarks {chosen.name}", description=f"{chosen.title} ({chosen.paper})"
    )
    add_common(parser)
    chosen.arguments(parser)
    return parser.parse_args(rest)


def options(chosen: Experiment, args: argparse.Namespace) -> tuple[Options, list[str]]:
    """The options that the flags come to, and what is to be said about them."""
    factor, notes = args.scale, []
    if factor == 0:
        rate = scale.gflops()
        factor = scale.choose(rate, chosen.flop, args.quick)
        if factor > 1:
            notes.append(
                f"the paper's sizes divided by {factor}: its slower unit computes {rate:.1f} GFLOP/s"
            )
    elif factor > 1:
        notes.append(f"the paper's sizes divided by {factor}, as asked for")
    samples, warm_ups = experiment.counts(chosen, args.quick, args.samples, scaled=factor > 1)
    if not args.quick and args.samples is None and samples < chosen.samples[0]:
        notes.append(f"{samples} samples of each arm instead of {chosen.samples[0]}: the machine is small")
    extra = {name: value for name, value in vars(args).items() if name not in COMMON}
    count = experiment.processes(chosen, args.quick, samples)
    return Options(args.quick, factor, args.force, samples, warm_ups, count, extra=extra), notes


def _run(chosen: Experiment, args: argparse.Namespace, command: list[str]) -> int:
    made, notes = options(chosen, args)
    rest = args.cool_down if args.cool_down is not None else (0.0 if args.quick else COOL_DOWN)
    job = runner.Run(chosen, made, command, args.results, tuple(notes), rest)
    with tqdm(desc=chosen.name, disable=None, leave=False) as bar:

        def progress(what: str, done: int, planned: int) -> None:
            bar.total, bar.n = planned, done
            bar.set_postfix_str(what)

        try:
            file, document = runner.run(job, progress)
        except runner.RefusedError as refused:
            return _say(
                f"{chosen.name}: refused: {refused} (--force runs it and marks the result)", WRONG_USE
            )
    print(table.render(document))
    print(file, flush=True)
    return 0 if all(_whole(cell, made.processes) for cell in document["cells"]) else FAILED


def _whole(cell: Cell, processes: int) -> bool:
    """Whether none of the cell's processes failed."""
    return cell["status"] == "done" and len(cell.get("processes", [cell])) == processes


if __name__ == "__main__":
    sys.exit(main())
