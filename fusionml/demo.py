"""A small Llama-geometry checkpoint with a tokenizer, for `compare` without a model at hand.

Random weights from a fixed seed: what it writes means nothing, but its prompt phase is the real thing.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

VERSION = 1
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": 258,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def demo_checkpoint(home: Path) -> Path:
    """The folder of the checkpoint below `home`, made if it is not there.

    `mlx_lm.load` takes it like any other. It appears at once or not at all, so two processes may make it
    together and an interrupted one leaves nothing half written.
    """
    folder = home / f"demo-{VERSION}"
    if (folder / "config.json").exists():
        return folder
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        _write_weights(made)
        _write_tokenizer(made)
        (made / "config.json").write_text(json.dumps(CONFIG, indent=2))
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():
                shutil.rmtree(folder, ignore_errors=True)
                made.rename(folder)
    return folder


def _write_weights(folder: Path) -> None:
    from mlx_lm.models import llama

    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    key = mx.random.key(20260724)
    weights = {}
    for name, array in sorted(tree_flatten(model.parameters())):
        if array.ndim < 2:
            weights[name] = mx.ones(array.shape, mx.bfloat16)
            continue
        key, use = mx.random.split(key)
        scale = 1.0 if "embed" in name else array.shape[-1] ** -0.5
        weights[name] = (mx.random.normal(array.shape, key=use) * scale).astype(mx.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def _write_tokenizer(folder: Path) -> None:
    """One token a byte, and two for the beginning and the end."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
