"""The server under clients: each arm is what it is called, every failure is counted, no server is left."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from checkpoints import small_checkpoint
from experiments import options, run, transcripts

from benchmarks import checkpoints, serve
from benchmarks.serve import Answer, Start

Fixture = pytest.MonkeyPatch
Handler = Callable[[BaseHTTPRequestHandler], None]
CLIENTS, REQUESTS = 2, 1


def servers() -> list[psutil.Process]:
    """Servers below this process that run still."""
    return [child for child in psutil.Process().children(recursive=True) if "--port" in child.cmdline()]


# --- one cell, with real servers


def test_stock_and_patched_servers_under_clients(
    monkeypatch: Fixture, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    checkpoint = small_checkpoint(tmp_path_factory.mktemp("home"), num_hidden_layers=3)
    calibrated: list[list[int]] = []
    monkeypatch.setattr(checkpoints, "calibrate", lambda model, rows, *rest: calibrated.append(rows) or {})
    monkeypatch.setattr(serve.demo, "demo_checkpoint", lambda home: checkpoint)
    monkeypatch.setenv("FUSIONML_RATIO", "0.5")  # of those who listen to it
    flags = ["--clients", str(CLIENTS), "--requests", str(REQUESTS), "--tokens", "64"]
    file, cells = run(monkeypatch, tmp_path, serve.EXPERIMENT, options(serve.EXPERIMENT, *flags))
    assert servers() == []
    cell = cells["2 clients"]
    told = cell["figures"]["clients"]
    assert list(told) == list(cell["arms"]) == ["stock", "patched", "stock again"]
    assert [told[arm]["split_share"] for arm in ("stock", "stock again")] == [[None], [None]]
    assert told["patched"]["split_share"][0] > 0.5
    for arm, row in told.items():
        assert (row["requests"], row["errors"]) == (CLIENTS * REQUESTS, {})
        assert 0 < row["ttft_p50"] <= row["ttft_p95"]
        assert row["prompt_tokens"] > 64
        assert row["tokens_per_second"][0] > 0
        assert len(cell["arms"][arm]["samples"]) == CLIENTS * REQUESTS
    assert cell["figures"]["same answers"] == {"patched": "2 of 2", "stock again": "2 of 2"}
    assert set(cell["figures"]["throughput"]) == {"patched", "stock again"}
    assert calibrated == [serve.calibration_rows(64, CLIENTS)]
    lines = transcripts(file)
    assert len(lines) == 3 * CLIENTS * REQUESTS
    assert len({line["prompt"] for line in lines}) == CLIENTS * REQUESTS
    assert all(line["text"] and line["tokens"] == serve.QUICK_ANSWER for line in lines)
    assert sorted(line["ttft"] for line in lines if line["arm"] == "patched") == sorted(
        cell["arms"]["patched"]["samples"]
    )


def test_how_each_arm_is_started() -> None:
    found = serve.commands("model", Path("table.json"), 64)
    assert list(found) == ["stock", "patched", "stock again"]
    assert found["stock"] == found["stock again"]
    assert "fusionml" not in found["stock"]
    assert found["stock"][1:3] == ["-m", "mlx_lm.server"]
    words = " ".join(found["patched"][1:])
    assert words.startswith("-m fusionml run --table table.json --min-rows 64 mlx_lm.server --model model")


# --- no server is left


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('reading'); print('no such model'); raise SystemExit(3)"]
    with (
        pytest.raises(RuntimeError, match="the server ended with 3: no such model"),
        serve.serving(command, tmp_path / "log"),
    ):
        pass


def test_one_that_never_answers_is_given_up_and_ended(monkeypatch: Fixture, tmp_path: Path) -> None:
    monkeypatch.setattr(serve, "READY", 0.5)
    command = [sys.executable, "-c", "import time; print('reading', flush=True); time.sleep(60)"]
    with pytest.raises(RuntimeError, match="did not answer within"), serve.serving(command, tmp_path / "log"):
        pass
    assert servers() == []


def test_one_is_ended_when_a_client_is_interrupted(monkeypatch: Fixture, tmp_path: Path) -> None:
    monkeypatch.setattr(serve, "_wait_until_up", lambda *args: None)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    seen: list[psutil.Process] = []

    def interrupted() -> None:
        with serve.serving(command, tmp_path / "log"):
            seen.extend(servers())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert seen
    assert servers() == []


# --- one request


@contextmanager
def answering(handle: Handler) -> Iterator[int]:
    """A server that answers every request in this way; its port."""

    class One(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            handle(self)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), One)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def streaming(*events: str) -> Handler:
    def handle(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        request.wfile.write("".join(f"{event}\n\n" for event in events).encode())

    return handle


def piece(**delta: str) -> str:
    return "data: " + json.dumps({"choices": [{"delta": delta}]})


USAGE = "data: " + json.dumps({"choices": [], "usage": {"prompt_tokens": 70, "completion_tokens": 3}})
DONE = "data: [DONE]"


def test_the_first_token_is_the_first_text_that_is_streamed(monkeypatch: Fixture) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr(serve.time, "perf_counter", lambda: float(next(ticks)))
    events = [": keepalive 0/70", ": keepalive 64/70", piece(), piece(role="assistant", content="")]
    events += [piece(content="to"), piece(content="be"), piece(content=""), USAGE, DONE]
    with answering(streaming(*events)) as port:
        found = serve.ask(port, "a prompt", 3, {})
    # Started at tick 0; two empty pieces at 1 and 2, the text at 3.
    assert found == Answer(3.0, 7.0, "tobe", 70, 3)


def test_what_a_reasoning_model_thinks_is_its_first_token() -> None:
    with answering(streaming(piece(reasoning="hm"), piece(content="yes"), USAGE, DONE)) as port:
        assert serve.ask(port, "a prompt", 3, {}).text == "hmyes"


def test_a_request_is_a_streamed_chat_completion() -> None:
    bodies: list[dict[str, Any]] = []

    def keep(request: Any) -> None:
        assert request.path == "/v1/chat/completions"
        bodies.append(request.body)
        streaming(piece(content="x"), USAGE, DONE)(request)

    with answering(keep) as port:
        serve.ask(port, "a prompt", 3, {"logit_bias": {"5": 100}})
    (body,) = bodies
    assert body["messages"] == [{"role": "user", "content": "a prompt"}]
    assert (body["stream"], body["max_tokens"], body["temperature"]) == (True, 3, 0)
    assert body["logit_bias"] == {"5": 100}


def refusing(request: BaseHTTPRequestHandler) -> None:
    request.send_response(503)
    request.end_headers()


@pytest.mark.parametrize(
    ("handle", "error"),
    [
        (refusing, "HTTP 503"),
        (streaming(piece(content="to")), "the stream broke off"),
        (streaming(piece(content=""), DONE), "no token"),
        (streaming("data: {"), "JSONDecodeError"),
        (streaming("data: {}"), "KeyError"),
        (lambda request: request.connection.close(), "RemoteDisconnected"),
    ],
)
def test_a_failure_is_an_answer_without_a_time(handle: Handler, error: str) -> None:
    with answering(handle) as port:
        found = serve.ask(port, "a prompt", 3, {})
    assert found == Answer(error=error)


def test_nobody_there_is_a_failure_too() -> None:
    with answering(refusing) as port:
        pass
    assert serve.ask(port, "a prompt", 3, {}) == Answer(error="ConnectionRefusedError")


# --- the load


def test_clients_ask_at_once_and_each_its_prompts_in_order(monkeypatch: Fixture) -> None:
    together = threading.Barrier(3, timeout=20)
    asked: dict[int, list[str]] = {}

    def ask(port: int, prompt: str, tokens: int, more: dict[str, Any]) -> Answer:
        if prompt != "warm":
            together.wait()  # hangs unless three ask at once
            asked.setdefault(threading.get_ident(), []).append(prompt)
        return Answer(1.0, 2.0, prompt, 10, 2)

    monkeypatch.setattr(serve, "ask", ask)
    load = serve.Load([["a1", "a2"], ["b1", "b2"], ["c1", "c2"]], ["warm"], 2, {})
    answers, seconds = load.put_on(serve.Server(1, Path("log")))
    assert [answer.text for answer in answers] == ["a1", "a2", "b1", "b2", "c1", "c2"]
    assert sorted(asked.values()) == [["a1", "a2"], ["b1", "b2"], ["c1", "c2"]]
    assert seconds > 0


# --- what is told


def start(*times: float | None, seconds: float = 10.0, text: str = "x", **more: Any) -> Start:
    answers = [
        Answer(error="HTTP 500") if time is None else Answer(time, 2 * time, text, 100, 8) for time in times
    ]
    return Start(answers, seconds, **{"share": None, "ignored": [], **more})


def test_a_prompt_that_one_arm_failed_counts_for_none_and_the_error_for_that_one() -> None:
    starts = {
        "stock": [start(2.0, 4.0), start(6.0, 8.0)],
        "patched": [start(1.0, None), start(3.0, 4.0, seconds=5.0)],
        "stock again": [start(2.0, 4.0), start(6.0, 8.0)],
    }
    cell = serve.summary(starts)
    assert {arm: found["samples"] for arm, found in cell["arms"].items()} == {
        "stock": [2.0, 6.0, 8.0],
        "patched": [1.0, 3.0, 4.0],
        "stock again": [2.0, 6.0, 8.0],
    }
    assert cell["ratios"]["patched"]["value"] == 2.0
    assert cell["aa"]["value"] == 1.0
    parameters = {"model": "demo", "note": None}
    told = serve.figures(starts, parameters, {})
    assert told["clients"]["stock"]["errors"] == {}
    assert told["clients"]["patched"]["errors"] == {"HTTP 500": 1}
    assert told["clients"]["patched"]["tokens_per_second"] == [0.8, 3.2]
    assert told["clients"]["stock"]["ttft_p50"] == 5.0
    assert told["clients"]["stock"]["ttft_p95"] == pytest.approx(7.7)
    assert told["same answers"]["patched"] == "3 of 3"
    assert "1 errors" in told["patched"]


def test_an_arm_that_answers_nothing_leaves_no_ratio_but_its_errors() -> None:
    starts = {"stock": [start(2.0)], "patched": [start(None)], "stock again": [start(2.0)]}
    cell = serve.summary(starts)
    assert cell["ratios"] == {}
    assert "no prompt was answered by every arm" in cell["arms"]["patched"]["warnings"]
    told = serve.figures(starts, {"model": "demo", "note": None}, {})
    assert told["throughput"]["patched"] is None
    assert told["patched"] == "no answer; errors: {'HTTP 500': 1}"


def test_other_answers_are_counted() -> None:
    starts = {
        "stock": [start(2.0, 3.0)],
        "patched": [start(2.0, 3.0, text="y")],
        "stock again": [start(1.0, 1.0)],
    }
    told = serve.figures(starts, {"model": "demo", "note": None}, {})
    assert told["same answers"] == {"patched": "0 of 2", "stock again": "2 of 2"}


def test_a_table_that_the_server_did_not_use_is_told() -> None:
    ignored = ["3 entries ignored, made with another MLX"]
    starts = {"stock": [start(2.0)], "patched": [start(2.0, ignored=ignored)], "stock again": [start(2.0)]}
    cell = serve.summary(starts)
    assert "its table: 3 entries ignored, made with another MLX" in cell["arms"]["patched"]["warnings"]


def test_the_share_is_what_the_server_said_last(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("INFO\nfusionml: on; large linear layers of prompts are split\n")
    assert serve.split_share(log) is None
    log.write_text("fusionml: 700 prompt tokens, 83% of their linear arithmetic split\n")
    assert serve.split_share(log) == 0.83


# --- the plan


@pytest.mark.parametrize(
    ("length", "clients", "rows"),
    [(512, 1, [511]), (512, 4, [511, 2044]), (64, 20, [63, 504]), (5000, 1, [2048]), (5000, 2, [2048, 4096])],
)
def test_rows_of_one_prompt_and_of_those_that_are_batched(length: int, clients: int, rows: list[int]) -> None:
    assert serve.calibration_rows(length, clients) == rows


def test_one_cell_for_each_number_of_clients() -> None:
    full = serve.cells(options(serve.EXPERIMENT, quick=False))
    assert [cell["clients"] for cell in full.values()] == [1, 4]
    quick = serve.cells(options(serve.EXPERIMENT))
    assert [cell["clients"] for cell in quick.values()] == [4]
    assert "short prompts" in quick["4 clients"]["note"]
    given = serve.cells(options(serve.EXPERIMENT, "--clients", "3", "--tokens", "2048"))
    assert given["3 clients"]["note"] is None


@pytest.mark.parametrize("flags", [["--clients", "0"], ["--requests", "none"], ["--tokens", "31"]])
def test_wrong_use_names_the_flag_and_the_value(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        options(serve.EXPERIMENT, *flags)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert flags[0] in said
    assert f"'{flags[1]}' is not a whole number" in said
