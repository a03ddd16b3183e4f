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
from .settings import Settings

log = logging.getLogger("fusionml")


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
        self._reported: set[str] = set()
        self._lock = threading.RLock()

    def configure(self, settings: Settings) -> None:
        """Use `settings` from the next call on; plans made under other settings are forgotten."""
        with self._lock:
            if settings != self.settings:
                self._plans.clear()
            self.settings = settings
            self.smallest = settings.min_rows * MIN_WIDTH if settings.enabled else sys.maxsize

    def plan(self, layer: Layer, dtype: mx.Dtype, rows: int, cpu_dtype: str) -> Plan:
        """The plan of the site that a call of `rows` rows belongs to; one log line when it is new."""
        name = str(dtype).rsplit(".", 1)[-1]
        site = Site(layer.kind, name, layer.inputs, layer.outputs, layer.bias, bucket(rows))
        backend = machine.backend()
        plan = self._plans.get((site, backend))
        if plan is None:
            pair = Pair(backend, machine.cores())
            widened = dtype in split.HALF_TYPES and cpu_dtype == "float32"
            with self._lock:
                plan = self._plans.setdefault(
                    (site, backend), decide(site, self.settings, pair, widened=widened)
                )
            log.info("%s: %s, CPU share %.2f: %s", site.key(), plan.arm, plan.ratio, plan.why)
        return plan

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
