"""The state of one process: settings, known models, plans and counts."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from . import machine, pressure, products, split, timing
from .known import MIN_WIDTH, KnownModels, Layer
from .plans import DENSE, SPLIT, STOCK, Pair, counts, decide
from .ratios import Site, bucket
from .saving import Saver
from .search import Found, Way
from .settings import Settings, home
from .sites import Arms, Learning, SiteControl
from .table import Entry, RatioTable
from .tracing import observe

log = logging.getLogger("fusionml")

SWAPPING = 2**20
"""Bytes swapped in each second from which memory counts as short."""
PATIENCE = 10.0
"""Seconds of memory pressure after which every site stands down."""
IDLE_ON_CUDA = "on CUDA the CPU cannot help, unless measured: everything is stock until the next patch()"
BUSY = 0.15
"""Share of the CPU that other programs may use while something is learned for good."""


def bucket_of(rows: int) -> int:
    """The bucket of a call with `rows` rows.

    MLX-LM holds the last token of a prompt back, so a prompt of 512 tokens arrives as 511 rows: it belongs to
    the bucket of 512.
    """
    return bucket(rows + 1)


class Geometry(Protocol):
    """What a layer, or a shape that many layers share, tells of itself; see `known.Layer`."""

    kind: str
    packed: str
    inputs: int
    outputs: int
    bias: bool
    experts: int
    top: int


def site_of(layer: Geometry, dtype: mx.Dtype, tokens: int) -> Site:
    """The site of a call with so many tokens, computed in `dtype`."""
    name = split.dtype_name(dtype)
    kind = f"{layer.kind}{layer.experts}top{layer.top}" if layer.experts else layer.kind
    packed = f"{layer.packed}-{name}" if layer.packed else name
    return Site(kind, packed, layer.inputs, layer.outputs, layer.bias, bucket_of(tokens))


def open_table(path: str | None) -> RatioTable:
    """The ratio table at `path`, by default the one below `home()`, for this machine in its present state."""
    place = home() / "ratios.json" if path is None else path
    fingerprint = machine.math_fingerprint()
    return RatioTable.load(place, machine.identity(), fingerprint=fingerprint, ours=path is None)


def entry_of(found: Found, rows: int) -> Entry:
    """What the table keeps of a search over calls of `rows` rows."""
    choice, dense, stock = found.choice, found.dense_seconds, found.choice.stock_seconds
    return Entry(
        ratio=choice.ratio,
        gain=choice.gain,
        when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        spread=choice.spread,
        power={True: "battery", False: "mains", None: None}[pressure.read().on_battery],
        samples=choice.samples,
        cpu_dtype=found.way.cpu_dtype,
        per_row=None if stock is None else stock / rows,
        form=found.way.form,
        dense=found.arm == DENSE,
        dense_per_row=None if dense is None else dense / rows,
    )


def priors(entry: Entry) -> dict[str, float]:
    """Seconds a row of each arm that an entry knows."""
    if entry.per_row is None:
        return {}
    known = {STOCK: entry.per_row, DENSE: entry.dense_per_row, entry.arm: entry.per_row / (1 + entry.gain)}
    return {arm: seconds for arm, seconds in known.items() if seconds is not None}


class Session:
    """What the replaced functions share. All public methods may be called from any thread."""

    def __init__(self) -> None:
        self.settings = Settings(enabled=False)
        self.smallest = sys.maxsize
        self.idle: str | None = None
        self.known = KnownModels()
        self.budget = split.StreamBudget()
        self.saver = Saver()
        self.calls: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self._controls: dict[tuple[Any, ...], SiteControl] = {}
        self._decided_with: Settings | None = None
        self._boundaries: dict[str, float] = {}
        self._short_since: float | None = None
        self._last_thread: int | None = None
        self._tables: dict[tuple[str, str | None], RatioTable] = {}
        self._reported: set[str] = set()
        self._tokens = self._work = self._split_work = 0
        self._routes = threading.local()
        self._lock = threading.RLock()

    def configure(self, settings: Settings) -> None:
        """Use `settings` from the next call on.

        What was decided and learned under other settings is forgotten; being off for a while forgets nothing.
        """
        with self._lock:
            if settings.enabled and settings != self._decided_with:
                self._controls.clear()
                self._decided_with = settings
                self.known.forget_standing()
            self.settings = settings
            self.idle = self._why_idle(settings) if settings.enabled else None
            off = not settings.enabled or self.idle is not None
            self.smallest = sys.maxsize if off else settings.min_rows * MIN_WIDTH

    def _why_idle(self, settings: Settings) -> str | None:
        """Why no call can ever split, so that none need even ask; None where one may.

        A fast GPU computes a whole prompt in milliseconds, of which asking would be a per cent or two.
        """
        if machine.backend() != "cuda" or settings.ratio is not None:
            return None
        entries = self.table("cuda").entries().values()
        return None if any(entry.arm != STOCK for entry in entries) else IDLE_ON_CUDA

    @contextlib.contextmanager
    def routing(self, shape: tuple[int, ...]) -> Iterator[None]:
        """While experts are called whose indices are `[..., tokens, top]`: what `routed()` says."""
        before = self.routed()
        tokens = math.prod(shape[:-1])
        self._routes.top = shape[-1] if tokens >= self.settings.min_rows else None
        try:
            yield
        finally:
            self._routes.top = before

    def routed(self) -> int | None:
        """Experts of each token in a call of this thread with tokens enough to split; None outside one."""
        return getattr(self._routes, "top", None)

    def switched_off(self, layer: Layer) -> str | None:
        """Why a setting keeps a layer stock."""
        if layer.packed and not self.settings.quantized:
            return "quantised, and quantized=False"
        if layer.experts and not self.settings.moe:
            return "of experts, and moe=False"
        return None

    def observe(self, model: nn.Module) -> None:
        """Find out how many experts each token of a known model goes to, before any prompt has shown it."""
        layers = [layer for layer in self.known.layers() if layer.kind == products.EXPERTS]
        modules = [module for layer in layers if (module := layer.ref()) is not None]
        seen = observe(model, modules) if modules else {}
        for layer in layers:
            layer.top = seen.get(id(layer.ref()), (1, layer.top))[1]

    def control(self, layer: Layer, dtype: mx.Dtype, tokens: int) -> SiteControl:
        """Who decides for the site that a call of so many tokens belongs to; one log line when it is new."""
        backend = machine.backend()
        shape = (layer.kind, layer.packed, layer.inputs, layer.outputs, layer.bias, layer.experts, layer.top)
        key = (shape, dtype, bucket_of(tokens), backend)
        control = self._controls.get(key)
        if control is None:
            with self._lock:
                control = self._controls.get(key)
                if control is None:
                    site = site_of(layer, dtype, tokens)
                    control = self._controls[key] = self._new_control(site, layer, dtype, backend)
            now = control.state()
            log.info("%s: %s, CPU share %.2f: %s", control.name, now["arm"], now["ratio"], now["why"])
        return control

    def _new_control(self, site: Site, layer: Layer, dtype: mx.Dtype, backend: str) -> SiteControl:
        cpu_dtype = split.resolve_cpu_dtype(self.settings.cpu_dtype, dtype)
        forms = products.forms(layer.kind, bool(layer.packed), backend)
        entry = self.table(backend).lookup(site) if self.settings.ratio is None else None
        if entry is not None and not counts(self.settings, entry, cpu_dtype, forms):
            entry = None
        pair = Pair(backend, machine.cores())
        plan = decide(self.settings, pair, entry, cpu_dtype=cpu_dtype, form=forms[0])
        policy, dense = self.settings.gate, products.has_dense(layer.kind)
        if policy != "off" and plan.arm == SPLIT and entry is None and self.settings.ratio is None:
            ways = [Way(form, cpu_dtype) for form in forms]
            learn = functools.partial(self._learning, layer.kind, ways)
            keep = self._keep(site, backend)
            return SiteControl(site.key(), plan, policy, dense=dense, learn=learn, learned=keep)
        per_row = None if entry is None else priors(entry)
        return SiteControl(site.key(), plan, policy, dense=dense, per_row=per_row)

    def _learning(self, kind: str, ways: list[Way], rows: int) -> Learning:
        dense, waits = products.has_dense(kind), functools.partial(products.boundaries, kind)
        return Learning(rows, split.max_ratio(), Arms(ways, dense, self.boundary_seconds(), waits))

    def _keep(self, site: Site, backend: str) -> Callable[[Found, int], None]:
        """Puts what a site learned into the table."""
        usage = machine.OtherLoad()

        def keep(found: Found, rows: int) -> None:
            if usage.share() > BUSY:
                return  # what another program caused is not this machine's own
            table = self.table(backend)
            table.put(site, entry_of(found, rows))
            self.saver.soon(table)

        return keep

    def boundary_seconds(self) -> float:
        """What a boundary costs here, measured once for each backend."""
        backend = machine.backend()
        with self._lock:
            if backend not in self._boundaries:
                self._boundaries[backend] = timing.boundary_seconds()
            return self._boundaries[backend]

    def conditions(self, working_set: int) -> tuple[bool | None, bool]:
        """Whether `working_set` more bytes fit in memory and probing is welcome; and whether memory is short.

        On battery, in low-power mode or hot, the plan follows drift but nothing is probed on schedule.
        """
        now = pressure.read()
        short = now.short or (now.swap_in_rate or 0) > SWAPPING
        if self._short_for(short) > PATIENCE:
            # Not under our lock: a site that decides holds its own and may be waiting for ours.
            for control in self._all_controls():
                control.stand_down(f"memory pressure for more than {PATIENCE:.0f} s")
        strained = now.low_power or now.on_battery or now.thermal not in (None, "nominal")
        return (False if strained else pressure.fits(now, working_set)), short

    def _short_for(self, short: bool) -> float:
        """Seconds since memory became short, if it is."""
        with self._lock:
            if not short:
                self._short_since = None
                return 0.0
            now = time.monotonic()
            self._short_since = now if self._short_since is None else self._short_since
            return now - self._short_since

    def crowded(self) -> bool:
        """Whether another thread made a large call since this one's last: times would not be its own."""
        me = threading.get_ident()
        with self._lock:
            before, self._last_thread = self._last_thread, me
        return before not in (None, me)

    @staticmethod
    def decided(control: SiteControl) -> None:
        """Log what a site decided since the last time."""
        for line in control.drain():
            log.info("%s: %s", control.name, line)

    def table(self, backend: str) -> RatioTable:
        """The ratio table of this machine as it is now, read once; one line says how to make one."""
        with self._lock:
            key = (backend, self.settings.table)
            if key not in self._tables:
                table = open_table(self.settings.table)
                self._tables[key] = table
                if not len(table):
                    log.info(
                        "no measured ratios for this machine in %s: `python -m fusionml.calibrate --model M` "
                        "measures them",
                        table.path,
                    )
            return self._tables[key]

    def table_state(self) -> dict[str, Any] | None:
        """Where the table is, how many measured sites it holds and what of it is ignored; None if unread."""
        with self._lock:
            table = self._tables.get((machine.backend(), self.settings.table))
        if table is None:
            return None
        return {"path": table.path, "entries": len(table), "ignored": table.ignored}

    def forget_plans(self) -> None:
        """Decide every site again, with the table as it is on disk now."""
        with self._lock:
            self._controls.clear()
            self._tables.clear()
            self.known.forget_standing()

    def count(self, arm: str, layer: Layer, rows: int, reason: str | None = None) -> None:
        """One prefill-sized call went to `arm`."""
        with self._lock:
            self.calls[arm] += 1
            if reason is not None:
                self.reasons[reason] += 1
            self._add_rows(layer, rows, arm == SPLIT)

    def _add_rows(self, layer: Layer, rows: int, was_split: bool) -> None:
        layer.rows += rows
        layer.split_rows += rows * was_split
        self._tokens = max(self._tokens, layer.rows)
        if layer.live:
            self._work += rows * layer.arithmetic
            self._split_work += rows * layer.arithmetic * was_split

    def collect(self) -> None:
        """Add up what layers that stand down counted for themselves, without a lock in their way."""
        with self._lock:
            for stood in self.known.take_stood():
                self.calls[STOCK] += stood.calls
                self.reasons[stood.reason] += stood.calls
                self._add_rows(stood.layer, stood.rows, False)

    def report_once(self, message: str) -> None:
        """A warning, the first time only."""
        with self._lock:
            if message in self._reported:
                return
            self._reported.add(message)
        log.warning(message)

    def sites(self) -> dict[str, dict[str, Any]]:
        """Each site's state, by the site's key."""
        with self._lock:
            controls = dict(self._controls)
        return {control.name: {**control.state(), "backend": key[-1]} for key, control in controls.items()}

    def learning(self) -> bool:
        """Whether any site is still finding out what is best for it."""
        return any(control.learning for control in self._all_controls())

    def probe_seconds(self) -> float:
        """What finding out has cost so far, in seconds over doing without."""
        return sum(control.probe_seconds for control in self._all_controls())

    def _all_controls(self) -> list[SiteControl]:
        # A copy: no control is ever called under our lock, because controls call us under theirs.
        with self._lock:
            return list(self._controls.values())

    def coverage(self) -> dict[str, Any]:
        """`skipped`: layers of known models that never split, by reason. `eligible`: the share of the linear
        arithmetic of their prefill that may split; None without a model.
        """
        layers = self.known.layers()
        reasons = [layer.reason or self.switched_off(layer) for layer in layers]
        skipped = Counter(reason for reason in reasons if reason is not None)
        live = [
            (layer.arithmetic, reason) for layer, reason in zip(layers, reasons, strict=True) if layer.live
        ]
        total = sum(arithmetic for arithmetic, _ in live)
        may = sum(arithmetic for arithmetic, reason in live if reason is None)
        return {"skipped": dict(skipped), "eligible": may / total if total else None}

    def shared(self) -> tuple[int, float]:
        """Prompt tokens of prefill-sized calls, and the share of their linear arithmetic that was split.

        Also of models that are gone.
        """
        self.collect()
        with self._lock:
            return self._tokens, self._split_work / self._work if self._work else 0.0
