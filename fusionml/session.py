"""The state of one process: settings, known models, plans and counts."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from typing import Any

import mlx.core as mx

from . import machine, split
from .known import MIN_WIDTH, KnownModels, Layer
from .plans import Pair, Plan, decide
from .ratios import Site, bucket
from .settings import Settings, home
from .table import RatioTable

log = logging.getLogger("fusionml")


def site_of(layer: Layer, dtype: mx.Dtype, rows: int) -> Site:
    """The site of a call with `rows` rows.

    MLX-LM holds the last token of a prompt back, so a prompt of 512 tokens arrives as 511 rows: it belongs to
    the bucket of 512.
    """
    name = str(dtype).rsplit(".", 1)[-1]
    return Site(layer.kind, name, layer.inputs, layer.outputs, layer.bias, bucket(rows + 1))


def open_table(path: str | None) -> RatioTable:
    """The ratio table at `path`, by default the one below `home()`, for this machine in its present state."""
    place = home() / "ratios.json" if path is None else path
    return RatioTable.load(place, machine.identity(), fingerprint=machine.math_fingerprint())


class Session:
    """What the replaced functions share. All public methods may be called from any thread."""

    def __init__(self) -> None:
        self.settings = Settings(enabled=False)
        self.smallest = sys.maxsize
        self.known = KnownModels()
        self.budget = split.StreamBudget()
        self.calls: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self._plans: dict[tuple[Site, str], Plan] = {}
        self._tables: dict[tuple[str, str | None], RatioTable] = {}
        self._reported: set[str] = set()
        self._lock = threading.RLock()

    def configure(self, settings: Settings) -> None:
        """Use `settings` from the next call on; plans made under other settings are forgotten."""
        with self._lock:
            if settings != self.settings:
                self._plans.clear()
            self.settings = settings
            self.smallest = settings.min_rows * MIN_WIDTH if settings.enabled else sys.maxsize

    def plan(self, layer: Layer, dtype: mx.Dtype, rows: int) -> Plan:
        """The plan of the site that a call of `rows` rows belongs to; one log line when it is new."""
        backend = machine.backend()
        key = (site_of(layer, dtype, rows), backend)
        plan = self._plans.get(key)
        if plan is None:
            with self._lock:
                plan = self._plans.setdefault(key, self._decide(key[0], dtype, backend))
            log.info("%s: %s, CPU share %.2f: %s", key[0].key(), plan.arm, plan.ratio, plan.why)
        return plan

    def _decide(self, site: Site, dtype: mx.Dtype, backend: str) -> Plan:
        return decide(
            self.settings,
            Pair(backend, machine.cores()),
            self.table(backend).lookup(site) if self.settings.ratio is None else None,
            half=dtype in split.HALF_TYPES,
            cpu_dtype=split.resolve_cpu_dtype(self.settings.cpu_dtype, dtype),
        )

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
            self._plans.clear()
            self._tables.clear()

    def count(self, arm: str, layer: Layer, rows: int, reason: str | None = None) -> None:
        """One prefill-sized call went to `arm`."""
        with self._lock:
            self.calls[arm] += 1
            if reason is not None:
                self.reasons[reason] += 1
                layer.stock_rows += rows
            else:
                layer.split_rows += rows

    def report_once(self, message: str) -> None:
        """A warning, the first time only."""
        with self._lock:
            if message in self._reported:
                return
            self._reported.add(message)
        log.warning(message)

    def sites(self) -> dict[str, dict[str, Any]]:
        """Each site's plan, by the site's key."""
        with self._lock:
            plans = dict(self._plans)
        return {
            site.key(): {"arm": plan.arm, "ratio": plan.ratio, "why": plan.why, "backend": backend}
            for (site, backend), plan in plans.items()
        }

    def skipped(self) -> dict[str, int]:
        """Layers of known models that never split, by reason."""
        return dict(Counter(layer.reason for layer in self.known.layers() if layer.reason is not None))

    def eligible(self) -> float | None:
        """The share of the linear arithmetic of a known model's prefill that may split; None without one."""
        layers = [layer for layer in self.known.layers() if layer.live]
        total = sum(layer.arithmetic for layer in layers)
        may = sum(layer.arithmetic for layer in layers if layer.reason is None)
        return may / total if total else None

    def shared(self) -> tuple[int, float]:
        """Prompt tokens of prefill-sized calls, and the share of their linear arithmetic that was split."""
        layers = self.known.layers()
        tokens = max((layer.split_rows + layer.stock_rows for layer in layers), default=0)
        split_work = sum(layer.split_rows * layer.arithmetic for layer in layers)
        work = sum((layer.split_rows + layer.stock_rows) * layer.arithmetic for layer in layers if layer.live)
        return tokens, split_work / work if work else 0.0
