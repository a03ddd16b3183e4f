"""What every test starts from: an empty environment, no files of ours, MLX's own functions in place."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest
from mlx_lm.models import switch_layers

import fusionml
from fusionml import patching, sharded
from fusionml.session import Session

CALLED = (
    nn.Linear,
    nn.QuantizedLinear,
    *sharded.LAYERS,
    switch_layers.SwitchGLU,
    switch_layers.SwitchMLP,
    switch_layers.SwitchLinear,
    switch_layers.QuantizedSwitchLinear,
)
REPLACED = (
    *((cls, "__call__") for cls in CALLED),
    (mlx_lm.utils, "load_model"),
    (mx, "set_wired_limit"),
)
STOCK = {(owner, name): getattr(owner, name) for owner, name in REPLACED}


@pytest.fixture(autouse=True)
def nothing_left_patched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A fresh session and environment for each test, which fails if it leaves anything patched."""
    for name in [name for name in os.environ if name.startswith("FUSIONML_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FUSIONML_HOME", str(tmp_path / "fusionml"))
    # A site is stock until its gate has learned; most tests are about what happens then.
    monkeypatch.setenv("FUSIONML_GATE", "off")
    monkeypatch.setattr(patching, "_session", Session())
    yield
    left = [name for (owner, name), stock in STOCK.items() if getattr(owner, name) is not stock]
    enabled = fusionml.status()["patched"]
    if left or enabled:
        _restore()
        pytest.fail(f"left patched: {left or 'the session'}")


def _restore() -> None:
    """Stock by force, so that one test's fault stays its own."""
    patching._base = None
    patching._contexts.clear()
    for replacement in patching._replacements:
        replacement.ours = replacement.original = None
    for (owner, name), stock in STOCK.items():
        setattr(owner, name, stock)


@pytest.fixture
def stock_functions() -> dict[tuple[Any, str], Any]:
    """MLX's and MLX-LM's own functions, as they were before anything was patched."""
    return dict(STOCK)


@pytest.fixture
def session() -> Session:
    """The session of this test."""
    return patching._session


@pytest.fixture
def patch() -> Iterator[Any]:
    """`fusionml.patch`, undone at the end of the test."""
    yield fusionml.patch
    fusionml.unpatch()
