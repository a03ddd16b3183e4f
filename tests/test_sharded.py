"""The local product of a sharded layer, taken out and handed back, on one rank and on two."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from graphs import foreign_stream
from mlx.nn.layers.distributed import shard_linear

from fusionml import products, sharded, split

K, N = 128, 64
KINDS = ("all-to-sharded", "sharded-to-all")


class Recorded:
    """A group of two as far as a layer can see, on its first rank."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


def layers(bias: bool, group: object | None = None) -> dict[tuple[str, bool], nn.Module]:
    """Each kind of sharded layer, plain and quantised."""
    plain = nn.Linear(K, N, bias)
    if bias:
        plain.bias = mx.random.normal((N,), key=mx.random.key(1))
    packed = plain.to_quantized(32, 4)
    return {
        (kind, quantised): shard_linear(packed if quantised else plain, kind, group=group)
        for kind in KINDS
        for quantised in (False, True)
    }


def product(layer: nn.Module, x: mx.array) -> products.Product:
    return products.of("quantized" if "scales" in layer else "linear", layer, x, None)


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_and_what_follows_it_are_the_layer(bias: bool) -> None:
    x = mx.random.normal((2, 20, K))
    for layer in layers(bias).values():
        assert type(layer) in sharded.LAYERS
        plain = layer(x)
        assert mx.array_equal(sharded.finish(layer, product(layer, x).stock()), plain)
        out = sharded.finish(layer, product(layer, x).split(16, "dense", "eager", "native"))
        assert (out.shape, out.dtype) == (plain.shape, plain.dtype)
        assert mx.allclose(out, plain, atol=1e-5)


def test_the_collective_is_called_as_the_layer_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    group, calls = Recorded(), []

    def all_sum(x: mx.array, **options: object) -> mx.array:
        calls.append((x.shape, options, mx.default_stream(mx.default_device())))
        return 2 * x

    made = layers(True, group)
    monkeypatch.setattr(mx.distributed, "all_sum", all_sum)
    for (kind, _), layer in made.items():
        x = mx.random.normal((40, K if kind == "all-to-sharded" else K // 2))
        calls.clear()
        plain, theirs = layer(x), list(calls)
        calls.clear()
        out = sharded.finish(layer, product(layer, x).split(16, "dense", "eager", "native"))
        assert calls == theirs
        assert len(calls) == (kind == "sharded-to-all")
        assert mx.allclose(out, plain, atol=1e-5)


def test_what_follows_the_product_is_not_on_our_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "cpu_stream", foreign_stream())
    for layer in layers(True).values():
        mx.eval(sharded.finish(layer, product(layer, mx.ones((4, K))).stock()))


def test_only_what_follows_a_collective_has_its_bias_later() -> None:
    for (kind, _), layer in layers(True).items():
        assert (sharded.product_bias(layer) is None) == (kind == "sharded-to-all")
    for layer in layers(False).values():
        assert sharded.product_bias(layer) is None


RANK = """
import mlx.core as mx, mlx.nn as nn
from mlx.nn.layers.distributed import shard_linear
from fusionml import quantized, sharded, split

group = mx.distributed.init(strict=True)
mx.random.seed(0)
x, half = mx.random.normal((50, 128)), 64
for packed in (False, True):
    plain = nn.Linear(128, 96)
    plain = plain.to_quantized(32, 4) if packed else plain
    for kind in ("all-to-sharded", "sharded-to-all"):
        layer = shard_linear(plain, kind, group=group)
        mine = x if kind == "all-to-sharded" else x[:, half * group.rank():half * (group.rank() + 1)]
        bias = sharded.product_bias(layer)
        # Each rank has a ratio of its own.
        m = 10 + 20 * group.rank()
        if packed:
            local = quantized.run_quantized(
                mine, quantized.Packed.of(layer), bias, m, "dense", "eager", "native")
        else:
            local = split.run_linear(mine, layer["weight"], bias, m, "eager", "native")
        out, want = sharded.finish(layer, local), plain(x)
        if kind == "all-to-sharded":
            out = mx.distributed.all_gather(out.T, group=group).T
        assert out.shape == want.shape and mx.allclose(out, want, atol=1e-5), (kind, packed)
print("rank", group.rank(), "of", group.size(), "agrees")
"""


def launched(script: Path) -> str:
    """What two ranks of a script on this machine print."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = str(Path(sys.executable).with_name("mlx.launch"))
    options = ["-n", "2", "--backend", "ring", "--starting-port", str(port)]
    paths = os.pathsep.join([str(Path(sharded.__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, launcher, *options, "--", sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": paths},
    )
    return done.stdout + done.stderr


def test_two_ranks_with_ratios_of_their_own(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    said = launched(script)
    assert all(f"rank {rank} of 2 agrees" in said for rank in (0, 1)), said
