"""The observer effect: what looking at another mode costs where three working sets do not fit (Section 5.5).

A memory hog leaves room for one mode's working set but not for two. Three questions, first with room for all
and then without: how much too slow a probe of an inactive mode reads, against the same mode in a fresh
process; how much longer the active mode's next call takes; what each policy of the gate loses, against the
mode that a fresh process finds fastest.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

from benchmarks import arms, confine, hog, modes
from benchmarks.experiment import Cell, Experiment, Options
from benchmarks.hog import Hog
from benchmarks.modes import EAGER, NAMES, Mode
from fusionml import pressure
from fusionml.gate import POLICIES, Gate

CONFINED_LEFT, CONFINED_HOG = 448 * 2**20, 768 * 2**20
"""Where only this process runs short: what the hog leaves and what it takes."""
SHARE = 0.57
"""Of what is left, a mode's working set: one fits, two do not."""
SLACK = 2**28
MOST_LEFT = 4
"""Times what must stay free: more is not short of memory, and the working sets would be huge."""
CALLS, QUICK_CALLS = 150, 60
ACTIVE, NEXT, ALONE = "active", "next after a probe", "the fastest mode alone"


# --- cells


def cells(options: Options) -> dict[str, Cell]:
    """With room for all, then without. `cap` is what the hog takes, `left` what it leaves."""
    sizes = _sizes(options.extra.get("cap"))
    calls = QUICK_CALLS if options.quick else CALLS
    return {name: {**sizes, "calls": calls, "pressed": name == "pressed"} for name in ("room", "pressed")}


def _sizes(cap_gb: float | None) -> Cell:
    memory = psutil.virtual_memory()
    confined = cap_gb is None and confine.available()
    if confined:
        cap, left = CONFINED_HOG, CONFINED_LEFT
    else:
        reserve = hog.reserve(memory.total)
        cap = memory.available - reserve - SLACK if cap_gb is None else int(cap_gb * 1e9)
        left = max(reserve, memory.available - cap)
    return {"cap": cap, "left": left, "working_set": int(SHARE * left), "confined": confined}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cap",
        type=_gigabytes,
        help="GB of the whole machine's memory that the hog takes (default: all but what must stay free; on"
        " Linux, where it may, this program alone is limited instead)",
    )


def _gigabytes(text: str) -> float:
    """A cap that fits, and that leaves so little that three working sets are short of it."""
    try:
        cap = int(float(text) * 1e9)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GB") from None
    memory = psutil.virtual_memory()
    refused = hog.why_not(cap, memory.available, memory.total)
    least = memory.available - MOST_LEFT * hog.reserve(memory.total)
    if refused is None and cap < least:
        refused = (
            f"a hog of {cap / 1e9:.2f} GB leaves {(memory.available - cap) / 1e9:.2f} GB, which is not "
            f"short: it takes at least {least / 1e9:.2f} GB"
        )
    if refused:
        raise argparse.ArgumentTypeError(refused)
    return cap / 1e9


def memory(parameters: Cell) -> int:
    """The hog, and what has to stay free beside it."""
    cap: int = parameters["cap"]
    return cap + (
        parameters["left"] if parameters["confined"] else hog.reserve(psutil.virtual_memory().total)
    )


# --- one cell


def measure(parameters: Cell, options: Options) -> Cell:
    """One cell.

    Raises:
        ValueError: the hog's cap does not fit; nothing was taken. `--force` does not change that.
        HogError: the machine ran so low that the hog gave its memory back.
    """
    size, samples = parameters["working_set"], options.samples
    with tempfile.TemporaryDirectory() as folder, short(parameters) as held:
        files = _files(Path(folder), size)
        fresh = {name: modes.fresh(name, size, files[name], samples) for name in NAMES}
        best = min(NAMES, key=lambda name: median(fresh[name]))
        made = {name: Mode(name, size, files[name]) for name in NAMES}
        seen = observe(made, best, samples)
        lost = policies(made, best, parameters["calls"], not parameters["pressed"])
        held.check()
    return _told(parameters, fresh, best, seen, lost)


class Nothing:
    """A hog that takes nothing."""

    held_bytes = 0

    def check(self) -> None:
        """It always holds what it should."""


@contextmanager
def short(parameters: Mapping[str, Any]) -> Iterator[Hog | Nothing]:
    """The machine, or this process alone, with as little memory as the cell wants."""
    with ExitStack() as stack:
        if parameters["confined"]:
            stack.enter_context(confine.confined(parameters["cap"] + parameters["left"]))
        holding: AbstractContextManager[Hog | Nothing] = nullcontext(Nothing())
        if parameters["pressed"]:
            holding = Hog(parameters["cap"])
        yield stack.enter_context(holding)


def _files(folder: Path, size: int) -> dict[str, Path | None]:
    """A file for each mode where memory cannot be swapped."""
    if modes.swaps():
        return dict.fromkeys(NAMES)
    files: dict[str, Path | None] = {}
    for name in NAMES:
        file = folder / name
        modes.write_file(file, size)
        files[name] = file
    return files


def observe(made: Mapping[str, Mode], active: str, samples: int) -> dict[str, Any]:
    """What probes read and what they leave behind: active, probe, active, active, and so on.

    Returns:
        `probes`: seconds by inactive mode; `next`: the active mode's call after each probe, and `steady`: its
        call after that.
    """
    others = [name for name in made if name != active]
    probes: dict[str, list[float]] = {name: [] for name in others}
    after: list[float] = []
    steady: list[float] = []
    for name in made:  # the first touch of anything never counts
        made[name].run()
    for turn in range(samples * len(others)):
        made[active].run()
        probes[others[turn % len(others)]].append(made[others[turn % len(others)]].run())
        after.append(made[active].run())
        steady.append(made[active].run())
    return {"probes": probes, "next": after, "steady": steady}


def policies(made: Mapping[str, Mode], best: str, calls: int, fits: bool) -> dict[str, dict[str, Any]]:
    """Each policy's run, and `best` alone before and after them: a busy moment hits one run alone."""
    half = max(1, calls // 2)
    before = follow({best: made[best]}, "off", half, fits)
    found = {policy: follow(made, policy, calls, fits) for policy in POLICIES}
    after = follow({best: made[best]}, "off", half, fits)
    return {ALONE: {**after, "trace": before["trace"] + after["trace"]}, **found}


def follow(made: Mapping[str, Mode], policy: str, calls: int, fits: bool) -> dict[str, Any]:
    """A gate of that policy at work for so many calls; what each took."""
    baseline = EAGER if EAGER in made else next(iter(made))
    gate, trace = Gate(made, policy=policy, baseline=baseline), []
    for _ in range(calls):
        learning = gate.learning
        arm, timed = gate.choose(fits, pressure.read().short)
        seconds = made[arm].run()
        if timed:
            gate.record(arm, seconds, 1)
        trace.append({"arm": arm, "timed": timed, "learning": learning, "seconds": seconds})
    return {"arm": gate.arm, "probes": gate.probes, "switches": gate.switches, "trace": trace}


# --- telling


def _told(
    parameters: Cell,
    fresh: Mapping[str, list[float]],
    best: str,
    seen: Mapping[str, Any],
    lost: Mapping[str, Mapping[str, Any]],
) -> Cell:
    cell = arms.summarise({ACTIVE: seen["steady"], NEXT: seen["next"]}, baseline=ACTIVE)
    cell["figures"] = {**readings(fresh, best, seen), **losses(lost)}
    cell["figures"] |= {
        "working sets": "files" if not modes.swaps() else "memory",
        "short of memory": "this program" if parameters["confined"] else "the machine",
        "fresh": fresh,
        "probes": seen["probes"],
    }
    cell["trace"] = [
        {"policy": policy, "call": number, **call}
        for policy, found in lost.items()
        for number, call in enumerate(found["trace"])
    ]
    return cell


def readings(fresh: Mapping[str, list[float]], best: str, seen: Mapping[str, Any]) -> dict[str, Any]:
    """How many times too slow probes read, and how many times as long the active mode's next call takes."""
    too_slow = [median(times) / median(fresh[name]) for name, times in seen["probes"].items()]
    return {
        "fastest fresh": best,
        "a probe reads too slow by": max(too_slow),
        "the next active call takes": median(seen["next"]) / median(seen["steady"]),
    }


def losses(lost: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What a call took each policy beyond what it took the fastest mode alone, as a share of that.

    `after probation` leaves out the calls in which the gate was still learning; None where there are none.
    """
    figures: dict[str, Any] = {}
    each = fmean(call["seconds"] for call in lost[ALONE]["trace"])
    for policy in (name for name in lost if name != ALONE):
        trace = lost[policy]["trace"]
        settled = [call["seconds"] for call in trace if not call["learning"]]
        figures[f"{policy} loses"] = fmean(call["seconds"] for call in trace) / each - 1
        figures[f"{policy} loses after probation"] = fmean(settled) / each - 1 if settled else None
    told = {policy: {k: found[k] for k in ("arm", "probes", "switches")} for policy, found in lost.items()}
    return {**figures, "gates": told}


EXPERIMENT = Experiment(
    name="pressure",
    title="The observer effect: probing where three working sets do not fit",
    paper="Section 5.5",
    cells=cells,
    measure=measure,
    memory=memory,
    samples=(20, 2),
    arguments=arguments,
    processes=1,
)
