"""Calibrating in a process of its own, and how much memory a model takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoints import small_checkpoint

from benchmarks import checkpoints


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("home"), num_hidden_layers=3)


def test_it_fills_the_table_and_says_with_what(checkpoint: Path, tmp_path: Path) -> None:
    table = tmp_path / "ratios.json"
    found = checkpoints.calibrate(str(checkpoint), [63], 2.0, table)
    assert found["budget"] == 2.0
    (site,) = found["sites"]
    assert site.startswith("linear/bfloat16/128x128/")
    assert found["sites"][site] is None or site in table.read_text()


def test_what_it_could_not_is_its_own_last_line(tmp_path: Path) -> None:
    narrow = small_checkpoint(tmp_path, hidden_size=64, intermediate_size=64)
    with pytest.raises(RuntimeError, match="has nothing to calibrate"):
        checkpoints.calibrate(str(narrow), [63], 1.0, tmp_path / "ratios.json")


def test_memory_is_the_weights_and_a_little(checkpoint: Path) -> None:
    weights = os.path.getsize(checkpoint / "model.safetensors")
    assert weights < checkpoints.needed_bytes(str(checkpoint)) < 2 * weights
    assert checkpoints.needed_bytes("somebody/something") == 0
    assert checkpoints.needed_bytes(None) > 0


def test_a_model_is_called_by_its_last_name(checkpoint: Path) -> None:
    assert checkpoints.name(str(checkpoint)) == checkpoint.name
    assert checkpoints.name("somebody/something") == "something"
    assert checkpoints.name(None) == "demo"
