"""Acting on a module when it is imported: once, whole, whoever looked at it before; and MLX-LM's loader."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from checkpoints import small_checkpoint

import fusionml
from fusionml.imports import when_imported

Write = Callable[[str], str]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes the module `waited.inner`, which can be imported then; returns its name."""
    package = tmp_path / "waited"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)

    def write(source: str) -> str:
        (package / "inner.py").write_text(source)
        importlib.invalidate_caches()
        return "waited.inner"

    yield write
    left = [finder for finder in sys.meta_path if finder not in finders]
    sys.meta_path[:] = finders
    for name in ("waited", "waited.inner"):
        sys.modules.pop(name, None)
    assert left == [], "a finder stayed behind"


def test_a_module_that_is_there_already_is_acted_on_now(written: Write) -> None:
    module, seen = importlib.import_module(written("VALUE = 1")), []
    when_imported("waited.inner", seen.append)
    assert seen == [module]


def test_a_module_is_acted_on_once_when_it_is_imported_and_whole(written: Write) -> None:
    name, seen = written("VALUE = 1"), []
    when_imported(name, lambda module: seen.append(module.VALUE))
    assert (seen, name in sys.modules) == ([], False)
    importlib.import_module("waited")
    assert seen == []
    module = importlib.import_module(name)
    assert seen == [1]
    importlib.import_module(name)
    importlib.reload(module)
    assert seen == [1]


def test_the_module_knows_as_much_of_itself_as_ever(written: Write, tmp_path: Path) -> None:
    name = written("VALUE = 1")
    when_imported(name, lambda module: None)
    module = importlib.import_module(name)
    assert module.__spec__ is not None
    assert module.__spec__.origin == module.__file__ == str(tmp_path / "waited" / "inner.py")
    assert module.__package__ == "waited"
    loader = module.__spec__.loader
    assert loader.get_source(name) == "VALUE = 1"  # type: ignore[union-attr]
    assert loader.get_filename(name) == module.__file__  # type: ignore[union-attr]


def test_whoever_only_looks_whether_it_is_there_does_not_use_the_moment_up(written: Write) -> None:
    name, seen = written("VALUE = 1"), []
    when_imported(name, lambda module: seen.append(module.VALUE))
    assert importlib.util.find_spec(name) is not None
    assert seen == []
    importlib.import_module(name)
    assert seen == [1]


def test_an_import_that_failed_may_succeed_later(written: Write) -> None:
    name, seen = written("raise KeyError('not yet')"), []
    when_imported(name, lambda module: seen.append(module.VALUE))
    with pytest.raises(KeyError, match="not yet"):
        importlib.import_module(name)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("waited.other")
    assert seen == []
    written("VALUE = 'later'")
    importlib.import_module(name)
    assert seen == ["later"]


def test_a_module_that_another_thread_is_importing_is_waited_for(written: Write) -> None:
    name = written("import waited\nwaited.entered.set()\nassert waited.go.wait(20)\nVALUE = 1")
    package = importlib.import_module("waited")
    package.entered, package.go = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    seen: list[int | str] = []

    def act(module: ModuleType) -> None:
        seen.append(getattr(module, "VALUE", "half a module"))

    importing = threading.Thread(target=importlib.import_module, args=(name,))
    importing.start()
    assert package.entered.wait(20)
    waiting = threading.Thread(target=when_imported, args=(name, act))
    waiting.start()
    waiting.join(0.05)
    package.go.set()
    for thread in (importing, waiting):
        thread.join(20)
    assert seen == [1]


# --- MLX-LM, in processes that have not imported it


def told(source: str, *arguments: str, **environment: str) -> list[object]:
    """What a fresh process that runs `source` prints, as JSON."""
    env = os.environ | {"PYTHONPATH": str(Path(fusionml.__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", source, *arguments]
    done = subprocess.run(
        command, env=env | environment, capture_output=True, text=True, timeout=120, check=True
    )
    return list(json.loads(done.stdout))


AFTERWARDS = """
import json, sys
import fusionml
fusionml.patch(ratio=0.3, min_rows=32, gate="off")
with fusionml.patched():
    early = sorted({"mlx_lm", "transformers", "tokenizers", "huggingface_hub"} & set(sys.modules))
{how}
model, tokenizer = load(sys.argv[1])
import mlx.core as mx
model(mx.array([[i % 250 for i in range(64)]]))
print(json.dumps([early, fusionml.status()["calls"].get("split", 0), fusionml.unpatch()]))
import mlx_lm.utils
assert not hasattr(mlx_lm.utils.load_model, "__wrapped__"), "stock is back"
"""


@pytest.mark.parametrize(
    "how",
    [
        "from mlx_lm import load",
        "import mlx_lm.utils\nload = mlx_lm.utils.load",
        "from mlx_lm.utils import load",
    ],
)
def test_patching_imports_nothing_of_mlx_lm_and_what_it_loads_later_splits(tmp_path: Path, how: str) -> None:
    early, splits, removed = told(AFTERWARDS.replace("{how}", how), str(small_checkpoint(tmp_path)))
    assert early == []
    assert splits == 7, "the layers of the first of two blocks"
    assert removed is True


def test_mlx_lm_that_is_imported_while_nothing_is_patched_is_stock_until_it_is() -> None:
    source = """
import json, fusionml
with fusionml.patched():
    pass
from mlx_lm import utils
before = hasattr(utils.load_model, "__wrapped__")
with fusionml.patched():
    inside = hasattr(utils.load_model, "__wrapped__")
print(json.dumps([before, inside, hasattr(utils.load_model, "__wrapped__")]))
"""
    assert told(source) == [False, True, False]
