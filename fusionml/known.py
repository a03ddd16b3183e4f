"""The models we know and what each of their layers is: which may split, and why not the others.

Nothing is stored on a layer (a `Module` is a dict, and its contents are parameters, pickles and files), and
nothing here keeps a model alive.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from . import liveness, products, sharded
from .split import FLOAT_TYPES

log = logging.getLogger("fusionml")

MIN_WIDTH = 128
"""Layers narrower than this on either side (routers, gates) have too little arithmetic to share."""

MOST_SHAPES = 64
"""Shapes of input remembered for each layer; prompts end in chunks of any length."""

EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)

SWITCH_LAYERS = "mlx_lm.models.switch_layers"
SWITCHES = ("SwitchLinear", "QuantizedSwitchLinear")
"""MLX-LM's layers of experts, by name: MLX-LM may not be imported yet."""
BLOCKS = ("SwitchGLU", "SwitchMLP")
"""Its blocks that sort the rows of a prompt and call layers of experts with them."""

UNKNOWN = "not of a known model"
NARROW = f"narrower than {MIN_WIDTH}"
NOT_UNDERSTOOD = "of a model whose structure is not understood"


@dataclass
class Standing:
    """Why calls of one shape are stock, what that rests on, and how often it happened."""

    reason: str
    dtype: mx.Dtype
    on_gpu: bool
    calls: int = field(default=0, compare=False)


@dataclass
class Layer:
    """What is known of one layer; `reason` is None where it may split.

    Attributes:
        kind: `linear`, `quantized` or `experts`; of a layer that never splits, its class.
        packed: bits and group size of a quantised weight, as in `u4g64`; empty for a dense one.
        experts: how many weights there are, 0 for a layer that has one.
        top: experts that each token goes to; 1 until a call has shown it.
        sharded: whether it is one rank's part of a layer.
        model: the known model that it was found in.
    """

    ref: weakref.ref[nn.Module]
    kind: str = ""
    inputs: int = 0
    outputs: int = 0
    bias: bool = False
    reason: str | None = UNKNOWN
    packed: str = ""
    experts: int = 0
    top: int = 1
    sharded: bool = False
    model: weakref.ref[nn.Module] | None = None
    live: bool = True
    touched: bool = False
    rows: int = 0
    split_rows: int = 0
    standing: dict[tuple[int, ...], Standing] = field(default_factory=dict)
    """Calls that are stock until something changes, by the shape of their input."""

    @property
    def arithmetic(self) -> int:
        """Multiply-adds for one token; it goes through every weight of a layer that routes none."""
        times = self.top if self.kind == products.EXPERTS else max(1, self.experts)
        return self.inputs * self.outputs * times

    def in_training(self, module: nn.Module) -> bool:
        """Whether the layer, `module`, trains with its model.

        Layers that quantising or sharding put into a loaded model still say that they do; the model does not.
        """
        model = None if self.model is None else self.model()
        return module.training and (model is None or model.training)

    @property
    def weights(self) -> int:
        """Entries of its weight, of all experts."""
        return self.inputs * self.outputs * max(1, self.experts)


class Stood(NamedTuple):
    """Calls of one layer that stood down: why, how many, and their rows in all."""

    layer: Layer
    reason: str
    calls: int
    rows: int


class KnownModels:
    """The models that were loaded while patched or handed over, and their layers by identity."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._models: list[tuple[weakref.ref[nn.Module], bool]] = []
        self._layers: dict[int, Layer] = {}
        self._stood: list[Stood] = []
        self.age = 0
        """How often all that stood was forgotten."""

    def add(self, model: nn.Module, *, from_loader: bool) -> None:
        """Know `model` from now on; its layers are looked at when they are first called.

        Not now, because loading goes on after this: sharding replaces layers, a pipeline drops blocks,
        adapters wrap them.
        """
        with self._lock:
            kept = [
                (ref, by) for ref, by in self._models if (other := ref()) is not None and other is not model
            ]
            self._models = [*kept, (weakref.ref(model), from_loader)]
            for key, layer in self._layers.copy().items():
                if layer.reason == UNKNOWN:
                    self._layers.pop(key, None)

    def models(self) -> list[nn.Module]:
        with self._lock:
            return [model for ref, _ in self._models if (model := ref()) is not None]

    def seen(self, layer: nn.Module) -> Layer | None:
        """What is known of `layer` without looking anywhere: None if it was never looked for."""
        found = self._layers.get(id(layer))
        return found if found is not None and found.ref() is layer else None

    def forget_standing(self) -> None:
        """Decide again for every layer: what stood until something changes may have changed."""
        with self._lock:
            self.age += 1
            for layer in self._layers.copy().values():
                self._stood += _stood(layer)
                layer.standing = {}

    def stand(self, layer: Layer, shape: tuple[int, ...], standing: Standing, age: int) -> None:
        """Remember that calls of `shape` are stock, unless that was decided before all was last forgotten."""
        with self._lock:
            if age != self.age or layer.standing.get(shape) == standing:
                return  # no longer true, or another thread was as quick and counts already
            self._stood += _stood(layer)
            if len(layer.standing) >= MOST_SHAPES:
                layer.standing = {}
            layer.standing[shape] = standing

    def take_stood(self) -> list[Stood]:
        """The calls that stood down since the last time, also of layers that are gone."""
        with self._lock:
            for layer in self._layers.copy().values():
                self._stood += _stood(layer)
            taken = self._stood.copy()
            del self._stood[: len(taken)]
            return taken

    def find(self, layer: nn.Module) -> Layer:
        """What is known of `layer`; a layer never seen before makes us look at the known models again."""
        found = self.seen(layer)
        if found is not None:
            return found
        with self._lock:
            self.scan()
            return self.seen(layer) or self._remember(layer, Layer(self._reference(layer)))

    def scan(self) -> None:
        """Look at every known model again and remember its layers."""
        with self._lock:
            for ref, from_loader in self._models:
                model = ref()
                if model is not None:
                    self._scan_model(model, from_loader)

    def layers(self) -> list[Layer]:
        """The layers of all known models that are alive, each once."""
        self.scan()
        with self._lock:
            return [layer for layer in self._layers.copy().values() if layer.reason != UNKNOWN]

    def _scan_model(self, model: nn.Module, from_loader: bool) -> None:
        understood = from_loader or liveness.runs_in_mlx_lm(model)
        dead = liveness.dead_layers(model) if understood else None
        reason = NOT_UNDERSTOOD if dead is None and from_loader else None
        if dead is None:
            dead = liveness.heads(model)
        new = [module for module in liveness.walk(model) if _is_matrix(module) and self._is_new(module)]
        for module in new:
            layer = _describe(module, self._reference(module))
            layer.model = weakref.ref(model)
            layer.live = id(module) not in dead
            layer.reason = reason or dead.get(id(module)) or layer.reason
            self._remember(module, layer)
        if new and reason is not None:
            log.warning("%s.%s stays stock: %s", type(model).__module__, type(model).__qualname__, reason)

    def _is_new(self, module: nn.Module) -> bool:
        seen = self._layers.get(id(module))
        return seen is None or seen.ref() is not module or seen.reason == UNKNOWN

    def _remember(self, module: nn.Module, layer: Layer) -> Layer:
        self._layers[id(module)] = layer
        return layer

    def _reference(self, module: nn.Module) -> weakref.ref[nn.Module]:
        key, layers, stood = id(module), self._layers, self._stood

        def forget(ref: weakref.ref[nn.Module]) -> None:
            # In any thread at any moment, so without the lock: who goes through the layers takes a copy.
            found = layers.get(key)
            if found is not None and found.ref is ref:
                layers.pop(key, None)
                stood.extend(_stood(found))

        return weakref.ref(module, forget)


def _stood(layer: Layer) -> list[Stood]:
    """What `layer` counted since the last time."""
    counted = []
    for shape, standing in layer.standing.copy().items():
        calls, standing.calls = standing.calls, 0
        if calls:
            counted.append(Stood(layer, standing.reason, calls, calls * math.prod(shape[:-1])))
    return counted


def _is_matrix(module: nn.Module) -> bool:
    """Whether a module of its own multiplies its input by a matrix of its own."""
    weight = module.get("weight")
    return isinstance(weight, mx.array) and weight.ndim >= 2 and not isinstance(module, EMBEDDINGS)


def _describe(module: nn.Module, ref: weakref.ref[nn.Module]) -> Layer:
    weight, name = module["weight"], type(module).__name__
    outputs, inputs = weight.shape[-2:]
    packed = ""
    bits = getattr(module, "bits", None)
    if "scales" in module and isinstance(bits, int) and bits > 0:  # anybody's module may come by here
        inputs, packed = inputs * 32 // bits, f"u{bits}g{getattr(module, 'group_size', 0)}"
    kind, width = _kind(module), weight.shape[0] if weight.ndim == 3 else 0
    shape = Layer(ref, kind or name, inputs, outputs, packed=packed, experts=width)
    if kind is None:
        shape.reason = f"{name}: not split"
        return shape
    bias = sharded.product_bias(module)
    shape.bias, shape.sharded = bias is not None, isinstance(module, sharded.LAYERS)
    shape.reason = _unsuitable(module, shape, bias)
    return shape


def _kind(module: nn.Module) -> str | None:
    """The kind of a layer that is computed as its class says; None for any other.

    Exactly these classes: a subclass may have arithmetic of its own.
    """
    cls = type(module)
    if cls.__call__ is nn.Linear.__call__:
        return products.LINEAR
    if cls is nn.QuantizedLinear:
        return products.QUANTIZED
    if cls in sharded.LAYERS:
        return products.QUANTIZED if "scales" in module else products.LINEAR
    if cls.__module__ == SWITCH_LAYERS and cls.__name__ in SWITCHES:
        return products.EXPERTS
    return None


def _unsuitable(module: nn.Module, layer: Layer, bias: mx.array | None) -> str | None:
    weight, experts = module["weight"], layer.kind == products.EXPERTS
    leading = weight.shape[:-1]
    if weight.ndim != 2 + experts or (bias is not None and bias.shape != leading):
        return "weight or bias of an unusual shape"
    if min(layer.inputs, layer.outputs) < MIN_WIDTH:
        return NARROW
    if not layer.packed:
        return None if weight.dtype in FLOAT_TYPES else f"weight of type {weight.dtype}"
    mode = getattr(module, "mode", "affine")
    if mode != "affine":
        return f"quantised as {mode}: not split"
    given = [module.get(name) for name in ("scales", "biases")]
    if not all(isinstance(array, mx.array) and array.dtype in FLOAT_TYPES for array in given):
        return "scales or biases of an unusual type"
    return None
