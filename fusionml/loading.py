"""Models for the commands: loaded, or refused in one line before their weights are read."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from .settings import home


class UsageError(Exception):
    """Wrong use, told in one line; exit status 2."""


def load(model: str | None) -> tuple[Any, Any, dict[str, Any], str]:
    """Model, tokenizer, config and name of a folder or hub id; None is the small model made on the spot.

    Raises:
        UsageError: it is not there, cannot be loaded, or does not fit in the memory that is free.
    """
    import mlx.core as mx
    import psutil
    from mlx.utils import tree_flatten
    from mlx_lm import load

    path = _demo() if model is None else model
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    folder = os.path.expanduser(path)  # unlike Path's own, no error where there is no home
    if looks_local and not Path(folder).is_dir():
        raise UsageError(f"--model {path}: there is no such folder")
    try:
        loaded, tokenizer, config = load(folder, lazy=True, return_config=True)
    except Exception as error:
        raise UsageError(f"--model {path} cannot be loaded: {first_line(error)}") from None
    needed = sum(array.nbytes for _, array in tree_flatten(loaded.parameters()))
    free = psutil.virtual_memory().available
    if needed > free:
        raise UsageError(f"--model {path} needs {needed / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free")
    mx.eval(loaded.parameters())
    return loaded, tokenizer, config, "demo" if model is None else Path(path).resolve().name


def from_config(path: str) -> tuple[Any, Any, str]:
    """A model without weights from a `config.json`, the type that its weights would have, and its name.

    Raises:
        UsageError: the file is not there or describes no model that MLX-LM knows.
    """
    import mlx.core as mx
    from mlx_lm.utils import load_model

    try:
        config = json.loads(Path(path).read_text())
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(path, Path(folder) / "config.json")
            model, _ = load_model(Path(folder), lazy=True, strict=False)
    except Exception as error:
        raise UsageError(f"--config {path} cannot be used: {first_line(error)}") from None
    try:
        _quantize(model, config.get("quantization") or config.get("quantization_config"))
    except Exception as error:
        raise UsageError(f"--config {path}: its quantisation: {first_line(error)}") from None
    name = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    return model, getattr(mx, str(name), mx.bfloat16), str(config.get("model_type"))


def _quantize(model: Any, quantization: dict[str, Any] | None) -> None:
    """Give a model the layers that a checkpoint quantised so has; lazily, so nothing is computed.

    As MLX-LM writes it: defaults for all layers, and by their path those that differ.
    """
    import mlx.nn as nn

    if quantization is None or "bits" not in quantization:
        return  # not of MLX's own kind: loaded as it is

    def chosen(path: str, module: Any) -> Any:
        own = quantization.get(path, True)
        fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % quantization["group_size"] == 0
        return own if fits else False

    mode = quantization.get("mode", "affine")
    nn.quantize(model, quantization["group_size"], quantization["bits"], mode=mode, class_predicate=chosen)


def context(config: dict[str, Any]) -> int | None:
    """The longest prompt and answer together, in tokens, where the config says so."""
    for part in (config, config.get("text_config") or {}):
        for key in ("max_position_embeddings", "n_positions"):
            if isinstance(part.get(key), int):
                return int(part[key])
    return None


def _demo() -> str:
    from .demo import demo_checkpoint

    try:
        return str(demo_checkpoint(home()))
    except OSError as error:
        where = f"FUSIONML_HOME {home()} cannot be written: {error.strerror}"
        raise UsageError(f"{where}; set it to another folder, or give --model") from None


def first_line(error: Exception) -> str:
    """What an error says in one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
