"""`mlx_lm.server` with the patch on, in a process of its own, against the same server without it."""

import json
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from stock import MIN_ROWS, SETTINGS, checkpoint, text

SERVE = """
import json, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
import fusionml
settings = json.loads(sys.argv.pop(1))
if settings is not None:
    fusionml.patch(**settings)
from mlx_lm.server import main
main()
print(json.dumps(fusionml.status()), flush=True)
os._exit(0)  # with or without us, MLX now and then aborts when a process ends that had worker threads
"""
PATIENCE = 60
CHUNK = 64


@dataclass
class Server:
    """A running server and the folder of its output."""

    process: subprocess.Popen[bytes]
    port: int
    home: Path

    def ask(self, prompt: str, **options: Any) -> dict[str, Any]:
        """The answer to one completion request."""
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": True} | options
        return self.post("/v1/completions", body)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(self.url(path), json.dumps(body).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return json.load(response)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def leave(self, prompt: str) -> None:
        """Be a client that goes away when the first part of its prompt has been read."""
        body = json.dumps({"prompt": prompt, "max_tokens": 50, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with closing(socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)) as connection:
            connection.sendall(head.encode() + body)
            seen = b""
            while b"keepalive" not in seen:
                seen += connection.recv(4096) or pytest.fail(f"no progress was reported: {seen!r}")
            assert b"data:" not in seen
            # Reset, not closed politely, so that the server's next write fails.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def stop(self) -> dict[str, Any]:
        """Ctrl-C, and what FusionML says of itself afterwards."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(PATIENCE) == 0, self.log()
        return json.loads((self.home / "out").read_text().splitlines()[-1])

    def log(self) -> str:
        return (self.home / "err").read_text()


@contextmanager
def serving(home: Path, settings: dict[str, Any] | None, *arguments: str) -> Iterator[Server]:
    """`mlx_lm.server` with these arguments; `settings` are the patch's, None is stock."""
    home.mkdir()
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVE, json.dumps(settings), "--port", str(port), *arguments]
    with (home / "out").open("wb") as out, (home / "err").open("wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, cwd=home)
    server = Server(process, port, home)
    try:
        yield server
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(PATIENCE)


def wait_until_up(server: Server) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            with urllib.request.urlopen(server.url("/health"), timeout=PATIENCE):
                return
        except OSError:
            assert server.process.poll() is None, server.log()
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.05)


@contextmanager
def two_servers(home: Path, *arguments: str) -> Iterator[tuple[Server, Server]]:
    """The same server, stock and patched."""
    arguments = (*arguments, "--prefill-step-size", str(CHUNK), "--log-level", "WARNING")
    with (
        serving(home / "stock", None, *arguments) as stock,
        serving(home / "ours", SETTINGS, *arguments) as ours,
    ):
        wait_until_up(stock)
        wait_until_up(ours)
        yield stock, ours


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small float32 Llama on disk."""
    return checkpoint(tmp_path_factory.mktemp("llama"))


PROMPTS = [text(n, seed=n) for n in (200, 90, 150, 30, 400, 70)]


def at_once(server: Server, prompts: list[str]) -> list[dict[str, Any]]:
    """The answers to clients that all ask at the same time."""
    with ThreadPoolExecutor(len(prompts)) as clients:
        return list(clients.map(server.ask, prompts, timeout=PATIENCE))


def assert_same_answers(ours: list[dict[str, Any]], stock: list[dict[str, Any]]) -> None:
    """Same text, tokens and counts; log-probabilities equal but for rounding."""
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"]
        [my_choice], [their_choice] = mine["choices"], theirs["choices"]
        assert my_choice["text"] == their_choice["text"]
        assert my_choice["finish_reason"] == their_choice["finish_reason"]
        for a, b in zip(my_choice["logprobs"]["content"], their_choice["logprobs"]["content"], strict=True):
            assert a["id"] == b["id"]
            assert a["logprob"] == pytest.approx(b["logprob"], abs=2e-4)


def test_clients_at_once_and_one_that_goes_away(folder: Path, tmp_path: Path) -> None:
    """Batches of prompts, a conversation that finds its cache, and a client lost during its prompt."""
    conversation = [text(150, seed=1), text(150, seed=1) + text(100, seed=2)]
    with two_servers(tmp_path, "--model", str(folder)) as (stock, ours):
        truth = at_once(stock, PROMPTS)
        turns = [stock.ask(turn) for turn in conversation]
        assert_same_answers(at_once(ours, PROMPTS), truth)
        ours.leave(text(40 * CHUNK, seed=7))
        assert_same_answers([ours.ask(turn) for turn in conversation], turns)
        assert_same_answers(at_once(ours, PROMPTS[::-1]), truth[::-1])
        status = ours.stop()
        assert stock.stop()["calls"] == {}
    assert status["calls"]["split"] > 0
    assert status["settings"]["min_rows"] == MIN_ROWS
    assert "Stream" not in ours.log()
    assert "thread died" not in ours.log()
    assert len({answer["choices"][0]["text"] for answer in truth}) > 1


def test_one_request_at_a_time_with_a_draft_model(folder: Path, tmp_path: Path) -> None:
    """With a draft model the server answers one client after the other, each by speculative decoding."""
    draft = checkpoint(tmp_path, num_hidden_layers=2)
    with two_servers(tmp_path, "--model", str(folder), "--draft-model", str(draft)) as (stock, ours):
        truth = at_once(stock, PROMPTS[:3])
        assert_same_answers(at_once(ours, PROMPTS[:3]), truth)
        status = ours.stop()
    assert status["calls"]["split"] > 0
