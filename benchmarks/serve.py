"""`mlx_lm.server` under several clients, stock and patched: `python -m benchmarks serve`.

What the paper leaves open. Every sample is one streamed chat completion over HTTP with a long prompt of its
own: the seconds until its first token. Each arm is a server of its own, started in turns: A B, B A.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import arms, checkpoints
from benchmarks.experiment import Cell, Experiment, Options
from benchmarks.leash import leashed
from fusionml import demo, machine
from fusionml.compare import prompt_ids
from fusionml.measure import order, paired_ratio
from fusionml.session import bucket_of

STOCK, PATCHED, AGAIN = "stock", "patched", f"stock {arms.AGAIN}"
HOST = "127.0.0.1"
SERVER = "mlx_lm.server"
READY = 300.0
"""Seconds that a server may take until it answers: a large model has to be read from disk."""
LONGEST = 600.0
"""Seconds that a client waits for the next piece of its answer."""
CLIENTS = (1, 4)
TOKENS, CPU_TOKENS, QUICK_TOKENS = 2048, 512, 128
ANSWER, QUICK_ANSWER = 32, 8
REQUESTS, QUICK_REQUESTS = 3, 2
ROUNDS, QUICK_ROUNDS = 2, 1
"""Starts of each arm's server."""
BUDGET, QUICK_BUDGET = 20.0, 6.0
CHUNK, BATCH = 2048, 8
"""Tokens of a prompt, and prompts, that a server computes at once."""
WARM_SEED = 10**6
LETTERS = range(ord("a"), ord("z") + 1)


# --- the plan


def arguments(parser: argparse.ArgumentParser) -> None:
    checkpoints.add_model(parser)
    whole = checkpoints.at_least
    parser.add_argument(
        "--clients",
        type=whole(1),
        nargs="+",
        help=f"clients at once (default: {' '.join(map(str, CLIENTS))})",
    )
    parser.add_argument("--requests", type=whole(1), help=f"of each client (default: {REQUESTS})")
    parser.add_argument(
        "--tokens",
        type=whole(checkpoints.SHORTEST),
        help=f"of each prompt, about (default: {TOKENS}, or fewer)",
    )


def cells(options: Options) -> dict[str, Cell]:
    """One for each number of clients."""
    extra, quick = options.extra, options.quick
    tokens, note = extra["tokens"], None
    if tokens is None:
        tokens = QUICK_TOKENS if quick else CPU_TOKENS if machine.backend() == "cpu" else TOKENS
        note = None if tokens == TOKENS else f"short prompts: {tokens} tokens instead of {TOKENS}"
    shared = {
        "model": checkpoints.name(extra["model"]),
        "bytes": checkpoints.needed_bytes(extra["model"]),
        "requests": extra["requests"] or (QUICK_REQUESTS if quick else REQUESTS),
        "prompt_tokens": tokens,
        "min_rows": checkpoints.min_rows(tokens),
        "answer_tokens": QUICK_ANSWER if quick else ANSWER,
        "budget": QUICK_BUDGET if quick else BUDGET,
        "note": note,
    }
    clients = extra["clients"] or (CLIENTS[-1:] if quick else CLIENTS)
    return {f"{n} client{'s' * (n > 1)}": {"clients": n, **shared} for n in clients}


def memory(parameters: Cell) -> int:
    return int(parameters["bytes"])


# --- a server


@dataclass(frozen=True)
class Server:
    """A server that answers, and the file that it writes its log into."""

    port: int
    log: Path


@contextmanager
def serving(command: Sequence[str], log: Path) -> Iterator[Server]:
    """A server of ours on a free port, from when it answers until the end of the block.

    Args:
        command: starts it, but for host and port.
        log: what it says on standard output and error.

    Raises:
        RuntimeError: it ended or did not answer in time; with the last line of its log.
    """
    with closing(socket.socket()) as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    with (
        log.open("wb") as file,
        leashed([*command, "--host", HOST, "--port", str(port)], stdout=file, stderr=file) as process,
    ):
        _wait_until_up(process, port, log)
        yield Server(port, log)


def _wait_until_up(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + READY
    while not _answers(port):
        if (code := process.poll()) is not None:
            raise RuntimeError(f"the server ended with {code}: {_last_line(log)}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server did not answer within {READY:.0f} s: {_last_line(log)}")
        time.sleep(0.1)


def _answers(port: int) -> bool:
    with closing(http.client.HTTPConnection(HOST, port, timeout=READY)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False


def _last_line(log: Path) -> str:
    return (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]


_SHARE = re.compile(r"^fusionml: \d+ prompt tokens, (\d+)% of their linear arithmetic split$", re.MULTILINE)


_IGNORED = re.compile(r"ratio table \S+: (\d+ entries ignored.*)")


def split_share(log: Path) -> float | None:
    """The share of the prompts' linear arithmetic that a patched server says it split; None for stock."""
    said = _SHARE.findall(log.read_text(errors="replace"))
    return int(said[-1]) / 100 if said else None


# --- a client


@dataclass(frozen=True)
class Answer:
    """One request: seconds until its first token and its last, what it counted, and what went wrong."""

    ttft: float | None = None
    seconds: float | None = None
    text: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    error: str | None = None


def ask(port: int, prompt: str, tokens: int, more: Mapping[str, Any]) -> Answer:
    """Stream the answer to one prompt; whatever goes wrong is in the answer."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    start = time.perf_counter()
    try:
        with closing(http.client.HTTPConnection(HOST, port, timeout=LONGEST)) as connection:
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != 200:
                return Answer(error=f"HTTP {response.status}")
            return _read(response, start)
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        return Answer(error=type(error).__name__)


def _read(response: Any, start: float) -> Answer:
    """The stream's events, to `[DONE]`: a stream that ends before has failed."""
    first, text = None, ""
    usage: dict[str, int] = {}
    for line in response:
        if not line.startswith(b"data: "):
            continue  # a keep-alive, or the blank line between two events
        data = line[len(b"data: ") :].strip()
        now = time.perf_counter() - start
        if data == b"[DONE]":
            if first is None:
                return Answer(error="no token")
            return Answer(first, now, text, usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))
        event = json.loads(data)
        usage = event.get("usage") or usage
        piece = "".join(_content(choice) for choice in event["choices"])
        first = now if first is None and piece else first
        text += piece
    return Answer(error="the stream broke off")


def _content(choice: Mapping[str, Any]) -> str:
    """The text of a streamed choice, a reasoning model's thoughts included."""
    delta = choice.get("delta") or {}
    return (delta.get("reasoning") or "") + (delta.get("content") or "")


# --- one cell


@dataclass(frozen=True)
class Load:
    """What the clients ask: each its own prompts, one after the other.

    `more` goes into every request.
    """

    clients: list[list[str]]
    warm_ups: list[str]
    tokens: int
    more: dict[str, Any]

    def put_on(self, server: Server) -> tuple[list[Answer], float]:
        """The answers in the order of the prompts, and the seconds until the last of them."""
        for prompt in self.warm_ups:
            ask(server.port, prompt, self.tokens, self.more)

        def client(prompts: list[str]) -> list[Answer]:
            return [ask(server.port, prompt, self.tokens, self.more) for prompt in prompts]

        start = time.perf_counter()
        with ThreadPoolExecutor(len(self.clients)) as pool:
            answers = [answer for given in pool.map(client, self.clients) for answer in given]
        return answers, time.perf_counter() - start


@dataclass(frozen=True)
class Start:
    """One server from its start to its end, under the load; `ignored` says why it did not use its table."""

    answers: list[Answer]
    seconds: float
    share: float | None
    ignored: list[str]


def measure(parameters: Cell, options: Options) -> Cell:
    """Servers in turns, each under the same load."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = options.extra["model"] or str(demo.demo_checkpoint(folder))
        table = folder / "ratios.json"
        calibration = _calibrate(model, parameters, table)
        made = load(model, parameters, demo=options.extra["model"] is None)
        every = commands(model, table, parameters["min_rows"])
        starts: dict[str, list[Start]] = {arm: [] for arm in every}
        for turn, arm in enumerate(order(list(every), QUICK_ROUNDS if options.quick else ROUNDS)):
            log = folder / f"{turn}.log"
            with serving(every[arm], log) as server:
                answers, seconds = made.put_on(server)
            starts[arm].append(Start(answers, seconds, split_share(log), _IGNORED.findall(log.read_text())))
    return {
        **summary(starts),
        "transcripts": transcripts(starts, made),
        "figures": figures(starts, parameters, calibration),
    }


def _calibrate(model: str, parameters: Cell, table: Path) -> Cell | str:
    """What was measured into the table that the patched server reads, or why nothing could be."""
    rows = calibration_rows(parameters["prompt_tokens"], parameters["clients"])
    try:
        return checkpoints.calibrate(model, rows, parameters["budget"], table)
    except RuntimeError as error:
        return str(error)


def calibration_rows(length: int, clients: int) -> list[int]:
    """Rows of the calls to expect: of one client's prompt or chunk of it, and of all that are batched."""
    each = min(length - 1, CHUNK)
    return list({bucket_of(n): n for n in (each, each * min(clients, BATCH))}.values())


def commands(model: str, table: Path, least: int) -> dict[str, list[str]]:
    """How each arm's server is started."""
    flags = ["--model", model, "--log-level", "WARNING"]
    stock = [sys.executable, "-m", SERVER, *flags]
    settings = ["--table", str(table), "--min-rows", str(least)]
    patched = [sys.executable, "-m", "fusionml", "run", *settings, SERVER, *flags]
    return {STOCK: stock, PATCHED: patched, AGAIN: stock}


def load(model: str, parameters: Cell, *, demo: bool) -> Load:
    """Prompts of about the wanted length, every one new from its first word on."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    count, length = parameters["requests"], parameters["prompt_tokens"]

    def prompt(seed: int) -> str:
        text: str = tokenizer.decode(prompt_ids(tokenizer, length, seed, None), skip_special_tokens=True)
        return text

    clients = [[prompt(1 + n * count + i) for i in range(count)] for n in range(parameters["clients"])]
    # The small model's tokens are bytes, of which few by themselves are a letter that a server would send.
    more = (
        {"logit_bias": {str(tokenizer.convert_tokens_to_ids(chr(c))): 100 for c in LETTERS}} if demo else {}
    )
    return Load(clients, [prompt(WARM_SEED)], parameters["answer_tokens"], more)


# --- what is told


def summary(starts: Mapping[str, Sequence[Start]]) -> Cell:
    """The seconds to each first token; a prompt that some arm failed to answer in a round counts for none."""
    samples: dict[str, list[float]] = {arm: [] for arm in starts}
    for round_ in zip(*starts.values(), strict=True):
        for answers in zip(*(start.answers for start in round_), strict=True):
            times = [answer.ttft for answer in answers]
            for arm, seconds in zip(starts, times, strict=True):
                if seconds is not None and None not in times:
                    samples[arm].append(seconds)
    cell = arms.summarise(samples, STOCK)
    for arm, times in samples.items():
        warnings = cell["arms"][arm]["warnings"]
        if not times:
            warnings.append("no prompt was answered by every arm")
        warnings += [f"its table: {why}" for start in starts[arm] for why in start.ignored]
    return cell


def figures(starts: Mapping[str, Sequence[Start]], parameters: Cell, calibration: Cell | str) -> Cell:
    """By arm: median and 95th percentile of the TTFT, tokens a second, errors, what was split."""
    found = {arm: _of_arm(done) for arm, done in starts.items()}
    told = {arm: _line(row) for arm, row in found.items()}
    stock = [start.answers for start in starts[STOCK]]
    return {
        "model": parameters["model"],
        **({} if parameters["note"] is None else {"note": parameters["note"]}),
        **told,
        "clients": found,
        "throughput": {arm: _throughput(starts, arm) for arm in starts if arm != STOCK},
        "same answers": {
            arm: _same(stock, [start.answers for start in done])
            for arm, done in starts.items()
            if arm != STOCK
        },
        "calibration": calibration,
    }


def _of_arm(done: Sequence[Start]) -> Cell:
    answers = [answer for start in done for answer in start.answers]
    times = [answer.ttft for answer in answers if answer.ttft is not None]
    return {
        "requests": len(answers),
        "errors": dict(Counter(answer.error for answer in answers if answer.error is not None)),
        "ttft_p50": float(np.percentile(times, 50)) if times else None,
        "ttft_p95": float(np.percentile(times, 95)) if times else None,
        "prompt_tokens": median(answer.prompt_tokens for answer in answers),
        "tokens_per_second": [_rate(start) for start in done],
        "split_share": [start.share for start in done],
    }


def _rate(start: Start) -> float:
    """Tokens of all answers together, a second."""
    return sum(answer.tokens for answer in start.answers) / start.seconds


def _line(row: Mapping[str, Any]) -> str:
    if row["ttft_p50"] is None:
        return f"no answer; errors: {row['errors']}"
    rate, errors = median(row["tokens_per_second"]), sum(row["errors"].values())
    return (
        f"TTFT p50 {row['ttft_p50']:.3g} s, p95 {row['ttft_p95']:.3g} s; {rate:.3g} tokens/s; {errors} errors"
    )


def _throughput(starts: Mapping[str, Sequence[Start]], arm: str) -> Cell | None:
    """How many times more tokens a second than stock, start by start."""
    if any(_rate(start) == 0 for name in (STOCK, arm) for start in starts[name]):
        return None
    both = ([1 / _rate(start) for start in starts[name]] for name in (STOCK, arm))
    return asdict(paired_ratio(*both))


def _same(stock: Sequence[Sequence[Answer]], other: Sequence[Sequence[Answer]]) -> str:
    """How many answers are stock's, word for word, of those that both gave."""
    pairs = [pair for both in zip(stock, other, strict=True) for pair in zip(*both, strict=True)]
    given = [(a.text, b.text) for a, b in pairs if a.error is None and b.error is None]
    return f"{sum(a == b for a, b in given)} of {len(given)}"


def transcripts(starts: Mapping[str, Sequence[Start]], made: Load) -> list[Cell]:
    """Every prompt and answer, a line each."""
    prompts = [prompt for client in made.clients for prompt in client]
    return [
        {"arm": arm, "round": number, "prompt": prompt, **asdict(answer)}
        for arm, done in starts.items()
        for number, start in enumerate(done, 1)
        for prompt, answer in zip(prompts, start.answers, strict=True)
    ]


EXPERIMENT = Experiment(
    name="serve",
    title="mlx_lm.server under several clients",
    paper="not in the paper",
    cells=cells,
    measure=measure,
    memory=memory,
    samples=(8, 1),
    flop=1.0,  # lengths, not widths, are what shrinks here
    arguments=arguments,
    processes=1,
)
