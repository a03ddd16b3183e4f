"""Models sharded over two ranks of `mlx.launch`, against one process of stock MLX-LM."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from stock import Answer as Truth
from stock import answer, assert_same, checkpoint, rows

import fusionml

PROMPT = [int(n * 37 % 250) for n in range(60)]

RANK = """
import json, os, sys
import mlx.core as mx, numpy as np
import fusionml
from mlx_lm.generate import generate_step
from mlx_lm.utils import sharded_load

group = mx.distributed.init(strict=True)
# Each rank has a share of its own.
fusionml.patch(min_rows=16, ratio=0.25 + 0.25 * group.rank())
model, _ = sharded_load(sys.argv[1], None, group)
repeats = int(sys.argv[2])
print(json.dumps({"pid": os.getpid(), "rank": group.rank()}), flush=True)
for _ in range(repeats):
    steps = list(generate_step(mx.array(json.loads(sys.argv[3])), model, max_tokens=5))
state = fusionml.status()
answer = {
    "rank": group.rank(),
    "tokens": [int(token) for token, _ in steps],
    "logprobs": [np.array(p.astype(mx.float32)).tolist() for _, p in steps],
    "sites": {key: [site["arm"], site["ratio"]] for key, site in state["sites"].items()},
    "calls": state["calls"],
    "kinds": sorted({type(m).__name__ for _, m in model.named_modules() if "Sharded" in type(m).__name__}),
}
# Into a file: the launcher mixes the lines of its ranks where they are long.
with open(os.path.join(os.path.dirname(sys.argv[0]), f"answer{group.rank()}.json"), "w") as file:
    json.dump(answer, file)
"""


def launch(
    folder: Path, scratch: Path, repeats: int = 1, prompt: list[int] = PROMPT
) -> subprocess.Popen[str]:
    """`mlx.launch` of two ranks on this machine, patched."""
    script = scratch / "rank.py"
    script.write_text(RANK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = str(Path(sys.executable).with_name("mlx.launch"))
    options = ["-n", "2", "--backend", "ring", "--starting-port", str(port)]
    arguments = [str(script), str(folder), str(repeats), json.dumps(prompt)]
    paths = os.pathsep.join([str(Path(fusionml.__file__).parents[1]), *sys.path])
    return subprocess.Popen(
        [sys.executable, launcher, *options, "--", sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )


def lines(said: str) -> list[dict[str, Any]]:
    return [json.loads(line[line.index("{") :]) for line in said.splitlines() if '"rank"' in line]


@pytest.mark.parametrize("packed", [True, False], ids=["4-bit", "bfloat16"])
def test_two_ranks_answer_as_one_process_does(packed: bool, tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512}
    folder = checkpoint(tmp_path, **wide)
    made = tmp_path / "made"
    options: dict[str, Any] = {"quantize": True, "q_group_size": 32} if packed else {"dtype": "bfloat16"}
    mlx_lm.convert(str(folder), str(made), **options)
    truth = answer(mlx_lm.load(str(made))[0], PROMPT)
    process = launch(made, tmp_path, repeats=1, prompt=PROMPT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    told = [json.loads((tmp_path / f"answer{rank}.json").read_text()) for rank in (0, 1)]
    assert sorted(line["rank"] for line in told) == [0, 1], out + err
    kinds = {
        f"{'Quantized' if packed else ''}{name}" for name in ("AllToShardedLinear", "ShardedToAllLinear")
    }
    for line in told:
        ours = Truth(line["tokens"], rows(map(mx_array, line["logprobs"])), [])
        assert_same(ours, Truth(truth.tokens, truth.logprobs, []), 2e-4 if packed else 6e-2)
        assert set(line["kinds"]) == kinds
        share = 0.25 + 0.25 * line["rank"]
        assert line["sites"]
        assert all(site == ["split", share] for site in line["sites"].values()), line["sites"]
        assert line["calls"]["split"] >= 14, "all seven layers of two live blocks"
    assert told[0]["tokens"] == told[1]["tokens"]


def mx_array(values: list[float]) -> Any:
    import mlx.core as mx

    return mx.array(values)


def test_a_rank_that_dies_ends_the_other_with_an_error(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, hidden_size=256, intermediate_size=512, max_position_embeddings=5000)
    process = launch(folder, tmp_path, repeats=10**6, prompt=PROMPT * 10)
    assert process.stdout is not None
    try:
        pids: dict[int, int] = {}
        while len(pids) < 2:
            line = process.stdout.readline()
            assert line, process.communicate()
            pids |= {each["rank"]: each["pid"] for each in lines(line)}
        time.sleep(1.0)
        os.kill(pids[1], signal.SIGKILL)
        out, err = process.communicate(timeout=30)
        codes = dict(re.findall(r"rank (\d) exited with code (-?\d+)", (out + err).lower()))
        assert codes["1"] == str(-signal.SIGKILL)
        assert codes["0"] != "0", "it did not end as if all were well"
        assert not alive(pids[0])
    finally:
        process.kill()
        for pid in pids.values():
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
