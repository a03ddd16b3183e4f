"""Checkpoints on disk that load and answer in a moment."""

from pathlib import Path
from typing import Any
from unittest import mock

from fusionml import demo

SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 128, "max_position_embeddings": 400}


def small_checkpoint(home: Path, **changes: Any) -> Path:
    """The demo's checkpoint in a smaller geometry, with a context of 400 tokens."""
    with mock.patch.dict(demo.CONFIG, SMALL | changes):
        return demo.demo_checkpoint(home)
