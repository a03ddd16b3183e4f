"""Training one decoder block: all three products of every linear layer split, against stock (Section 6).

A step is forward, backward and the optimiser's update, each arm with a model of its own. Arms are compared at
one precision; one more cell compares a half-precision split with single-precision stock, as the paper's
retired claim did, and shows beside it what half precision gains without any split.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten

from benchmarks import arms, pair_model
from benchmarks.experiment import Cell, Experiment, Options
from benchmarks.geometries import GEOMETRIES, bytes_needed, stack
from benchmarks.processes import groups
from benchmarks.shares import add_ratio, share
from benchmarks.split_gradients import split_training
from fusionml.measure import paired_ratio, relative_error
from fusionml.pair_model import sentence

GEOMETRY, ROWS, LEAST_ROWS = "Llama-3-8B", 2048, 128
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""Largest error of a gradient relative to its largest value; bfloat16 has 8 bits, and sums over all rows."""
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
LEARNING_RATE = 1e-4
COPIES = 15
"""Of the block's weights: three arms, each with gradients, the optimiser's two moments and their update."""


# --- cells


def cells(options: Options) -> dict[str, Cell]:
    geometry = GEOMETRIES[GEOMETRY].scaled(options.scale)
    sizes = {
        "scale": options.scale,
        "hidden": geometry.hidden,
        "intermediate": geometry.intermediate,
        "rows": max(LEAST_ROWS, ROWS // options.scale),
        "ratio": options.extra.get("ratio"),
    }
    matched = {dtype: {**sizes, "dtype": dtype, "against": dtype} for dtype in DTYPES}
    return {**matched, "mixed precision": {**sizes, "dtype": "bfloat16", "against": "float32"}}


def memory(cell: Cell) -> int:
    geometry = GEOMETRIES[GEOMETRY].scaled(cell["scale"])
    return COPIES * 4 * geometry.weights + 3 * bytes_needed(geometry, 0, cell["rows"], 4, fused=False)


# --- one trainee


@dataclass
class Trainee:
    """A block, its optimiser and one batch."""

    block: nn.Module
    optimiser: optim.Optimizer
    x: mx.array
    target: mx.array

    def gradients(self) -> tuple[mx.array, Any]:
        """The loss and the gradient of every parameter."""
        return nn.value_and_grad(self.block, self._loss)(self.x, self.target)

    def _loss(self, x: mx.array, target: mx.array) -> mx.array:
        return mx.mean((self.block(x) - target).astype(mx.float32) ** 2)

    def step(self) -> list[Any]:
        """One step; what it has to compute."""
        loss, gradients = self.gradients()
        self.optimiser.update(self.block, gradients)
        return [loss, self.block.parameters(), self.optimiser.state]

    def loss(self) -> float:
        return _number(self._loss(self.x, self.target))


def trainee(cell: Cell, dtype: str, ratio: float | None) -> Trainee:
    """The same block, batch and target each time, in `dtype`; split where there is a ratio."""
    geometry = GEOMETRIES[GEOMETRY].scaled(cell["scale"])
    block = stack(geometry, 1, DTYPES[dtype])
    block.train()
    if ratio is not None:
        split_training(block, ratio)
    x, target = mx.random.normal((2, 1, cell["rows"], geometry.hidden), key=mx.random.key(0))
    made = Trainee(block, optim.AdamW(LEARNING_RATE), x.astype(DTYPES[dtype]), target.astype(DTYPES[dtype]))
    mx.eval(made.block.parameters(), made.x, made.target)
    return made


# --- one cell


def measure(parameters: Cell, options: Options) -> Cell:
    """One cell.

    Raises:
        ArithmeticError: a loss or a gradient that is not finite, or that differs from stock's.
    """
    dtype, against = parameters["dtype"], parameters["against"]
    ratio = share(parameters, DTYPES[dtype])
    trainees = {"stock": trainee(parameters, against, None), "split": trainee(parameters, dtype, ratio)}
    if dtype != against:
        trainees[f"stock {dtype}"] = trainee(parameters, dtype, None)
    twin = trainees.get(f"stock {dtype}", trainees["stock"])
    error = verify(trainees["split"], twin, TOLERANCE[dtype])
    steps: dict[str, arms.Arm | Callable[[], Any]] = {name: made.step for name, made in trainees.items()}
    result = arms.measure(steps, options, tolerance=None)
    result["errors"] = {"split": error}
    losses = {
        name: finite(f"{name}: the loss after training", made.loss()) for name, made in trainees.items()
    }
    result["figures"] = {"ratio": ratio, "losses": losses, **_expected(twin)}
    return result


def verify(ours: Trainee, stock: Trainee, tolerance: float) -> float:
    """The largest error of a gradient, relative to its largest value.

    Raises:
        ArithmeticError: something is not finite, or the error is beyond the tolerance.
    """
    (our_loss, our_gradients), (loss, gradients) = ours.gradients(), stock.gradients()
    finite("stock: the loss", _number(loss))
    finite("split: the loss", _number(our_loss))
    found = dict(tree_flatten(our_gradients))
    errors = {
        name: relative_error(*(np.array(a.astype(mx.float32)) for a in (found[name], gradient)))
        for name, gradient in tree_flatten(gradients)
    }
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= tolerance:
        raise ArithmeticError(f"the gradient of {worst} differs from stock's by {errors[worst]:.2g}")
    return errors[worst]


def finite(what: str, value: float) -> float:
    """The value; an ArithmeticError if it is none."""
    if not math.isfinite(value):
        raise ArithmeticError(f"{what} is {value}")
    return value


def _number(array: mx.array) -> float:
    return float(np.array(array.astype(mx.float32)))


def conclude(parameters: Cell, result: Cell) -> Cell:
    """What a win over another precision really is: how much of it half precision has without a split."""
    twin = f"stock {parameters['dtype']}"
    if twin not in result["arms"]:
        return {}
    stock, samples = (result["arms"][name]["samples"] for name in (twin, "split"))
    if not (stock and samples):
        return {}
    matched = paired_ratio(stock, samples, groups=groups(result))
    return {
        "apparent speedup": result["ratios"]["split"]["value"],
        "of it precision alone": result["ratios"][twin]["value"],
        "precision-matched": asdict(matched),
        "precision-matched speedup": matched.value,
    }


def _expected(made: Trainee) -> Cell:
    told = pair_model.beside(made.x, made.block.blocks[0].mlp.gate_proj.weight)
    return {"pair": told, "pair model": sentence(told)}


EXPERIMENT = Experiment(
    name="training",
    title="One decoder block in training, every product split",
    paper="Section 6, Training",
    cells=cells,
    measure=measure,
    memory=memory,
    arguments=add_ratio,
    conclude=conclude,
)
