"""The checkpoint that `compare` makes for itself."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load

from fusionml import demo

FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.demo_checkpoint(tmp_path_factory.mktemp("home"))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_mlx_lm_loads_it_and_its_text_survives_the_tokenizer(made: Path) -> None:
    model, tokenizer = load(str(made))
    assert {dtype for _, array in tree_flatten(model.parameters()) for dtype in [array.dtype]} == {
        mx.bfloat16
    }
    text = "Straße, 'naïve' 東京\n\t42 <s>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.replace("<s>", "").encode()) + 1, "a token a byte, and one for <s>"
    assert tokenizer.eos_token_ids == {257}
    logits = model(mx.array([ids]))
    assert logits.shape == (1, len(ids), demo.CONFIG["vocab_size"])
    assert mx.all(mx.isfinite(logits))


def test_its_layers_are_wide_enough_to_split_and_its_weights_are_of_unit_gain(made: Path) -> None:
    weights = mx.load(str(made / "model.safetensors"))
    linear = {name: array for name, array in weights.items() if array.ndim == 2 and "embed" not in name}
    assert min(min(array.shape) for array in linear.values()) >= 128
    for name, array in linear.items():
        gain = mx.std(array.astype(mx.float32)).item() * array.shape[-1] ** 0.5
        assert gain == pytest.approx(1, abs=0.05), name
    assert len({array[0].astype(mx.float32).sum().item() for array in linear.values()}) == len(linear)


def test_two_processes_at_once_make_one_checkpoint_of_the_same_bytes(made: Path, tmp_path: Path) -> None:
    code = "from pathlib import Path; from fusionml import demo; print(demo.demo_checkpoint(Path({!r})))"
    command = [sys.executable, "-c", code.format(str(tmp_path))]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate(timeout=120)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(folders) == 1
    assert contents(Path(folders.pop())) == contents(made)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_second_of_two_makers_keeps_what_the_first_one_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stock = demo._write_tokenizer

    def overtaken(folder: Path) -> None:
        monkeypatch.setattr(demo, "_write_tokenizer", stock)
        first = demo.demo_checkpoint(tmp_path)
        (first / "first").touch()
        stock(folder)

    monkeypatch.setattr(demo, "_write_tokenizer", overtaken)
    folder = demo.demo_checkpoint(tmp_path)
    assert set(contents(folder)) == FILES | {"first"}
    assert list(tmp_path.iterdir()) == [folder]


def test_it_is_made_once(monkeypatch: pytest.MonkeyPatch, made: Path) -> None:
    monkeypatch.setattr(demo, "_write_weights", lambda folder: pytest.fail("made again"))
    assert demo.demo_checkpoint(made.parent) == made


def test_an_interrupted_maker_leaves_nothing_that_looks_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: Path
) -> None:
    def interrupted(folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(demo, "_write_tokenizer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            demo.demo_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert contents(demo.demo_checkpoint(tmp_path)) == contents(made)


def test_a_folder_without_its_last_file_is_made_again(tmp_path: Path, made: Path) -> None:
    half = tmp_path / made.name
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert contents(demo.demo_checkpoint(tmp_path)) == contents(made)


def test_the_configuration_is_the_one_on_disk(made: Path) -> None:
    assert json.loads((made / "config.json").read_text()) == demo.CONFIG
    assert made.name == f"demo-{demo.VERSION}"
