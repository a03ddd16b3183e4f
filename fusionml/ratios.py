"""STUB to be replaced"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Site:
    kind: str
    dtype: str
    inputs: int
    outputs: int
    bias: bool
    rows: int

    def key(self) -> str:
        return f"{self.kind}/{self.dtype}/{self.inputs}x{self.outputs}/{'bias' if self.bias else 'nobias'}/rows={self.rows}"


def bucket(rows: int) -> int:
    edge = 256
    while edge * 2 <= rows:
        edge *= 2
    return edge


def default_ratio(pair: str, *, widened: bool = False) -> float:
    if pair == "metal":
        return 0.15 if widened else 0.30
    return 0.50 if pair == "cpu" else 0.0
