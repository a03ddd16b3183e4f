"""The ratio table: what it answers, and what it survives."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fusionml.table as table_module
from fusionml.ratios import Site
from fusionml.session import open_table
from fusionml.settings import home
from fusionml.table import Entry, RatioTable

MACHINE = {"chip": "M1", "cores": 8, "mlx": "0.32.4", "environment": {"OMP_NUM_THREADS": "4"}}
RATES = {"float32": 900.0, "bfloat16": 300.0}
SITE = Site("linear", "bfloat16", 4096, 14336, False, 2048)
ENTRY = Entry(0.3, 0.25, "2026-08-01T12:00:00+00:00", 0.02, "mains", 41, "native")


def saved(path: Path, *pairs: tuple[Site, Entry], machine: dict[str, Any] = MACHINE, **options: Any) -> bytes:
    table = RatioTable.load(path, machine, **options)
    for site, entry in pairs or ((SITE, ENTRY),):
        table.put(site, entry)
    table.save()
    return path.read_bytes()


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- sites ---

WORDS = st.text(st.characters(exclude_characters="/", exclude_categories=["Z", "C"]), min_size=1, max_size=64)
SITES = st.builds(
    Site, WORDS, WORDS, st.integers(1, 10**6), st.integers(1, 10**6), st.booleans(), st.integers(0, 10**5)
)


@given(SITES)
def test_a_key_reads_back_as_its_site(site: Site) -> None:
    assert Site.parse(site.key()) == site


def test_a_key_is_readable() -> None:
    assert SITE.key() == "linear/bfloat16/4096x14336/nobias/rows=2048"
    assert (
        replace(SITE, kind="quantized", dtype="u4g64", bias=True).key()
        == "quantized/u4g64/4096x14336/bias/rows=2048"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        *({"kind": "a/b"}, {"kind": ""}, {"dtype": "two words"}, {"dtype": 4}, {"inputs": 0}),
        *({"outputs": 2.0}, {"bias": 1}, {"rows": -1}, {"rows": True}, {"inputs": 10**400}),
    ],
    ids=str,
)
def test_an_impossible_site_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(SITE, **wrong)


@pytest.mark.parametrize(
    "key",
    ["", "linear", SITE.key() + "x", SITE.key().replace("nobias", "maybe"), SITE.key().replace("40", "-40")],
)
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="no site"):
        Site.parse(key)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"ratio": 0.95}, {"ratio": -0.1}, {"ratio": float("nan")}, {"ratio": True}, {"gain": float("inf")}),
        *({"when": "today"}, {"spread": -1}, {"samples": 1.5}, {"samples": -1}, {"power": 3}),
        {"cpu_dtype": None},
    ],
    ids=str,
)
def test_an_impossible_entry_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(ENTRY, **wrong)


# --- lookup ---


def test_the_nearest_bucket_at_or_below_answers(tmp_path: Path) -> None:
    table = RatioTable(tmp_path / "t.json", MACHINE)
    for rows in (8192, 512, 2048):
        table.put(replace(SITE, rows=rows), replace(ENTRY, samples=rows))
    answers = [table.lookup(replace(SITE, rows=rows)) for rows in (511, 512, 2047, 2048, 10**6)]
    assert [answer and answer.samples for answer in answers] == [None, 512, 512, 2048, 8192]


@pytest.mark.parametrize(
    "other",
    [{"kind": "switch"}, {"dtype": "float16"}, {"inputs": 4095}, {"outputs": 1}, {"bias": True}],
    ids=str,
)
def test_another_layer_has_no_answer(tmp_path: Path, other: dict[str, Any]) -> None:
    table = RatioTable(tmp_path / "t.json", MACHINE)
    table.put(SITE, ENTRY)
    assert table.lookup(SITE) == ENTRY
    assert table.lookup(replace(SITE, **other)) is None


# --- the file ---


def test_everything_that_was_put_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "t.json"
    second = replace(ENTRY, ratio=0, gain=0, spread=None, power=None, samples=2)
    raw = saved(path, (SITE, ENTRY), (replace(SITE, rows=512), second))
    table = RatioTable.load(path, MACHINE)
    assert table.entries() == {SITE: ENTRY, replace(SITE, rows=512): second}
    assert len(table) == 2
    assert table.ignored is None
    lines = raw.decode().splitlines()
    assert len(lines) > 20
    assert any(SITE.key() in line for line in lines)


def test_models_are_merged_and_the_newer_measurement_wins(tmp_path: Path) -> None:
    path, other = tmp_path / "t.json", replace(SITE, inputs=2048)
    saved(path)
    saved(path, (other, ENTRY))
    saved(path, (SITE, replace(ENTRY, ratio=0.4)))
    table = RatioTable.load(path, MACHINE)
    assert table.entries() == {other: ENTRY, SITE: replace(ENTRY, ratio=0.4)}


def test_a_stale_copy_does_not_undo_what_another_saved(tmp_path: Path) -> None:
    path, other = tmp_path / "t.json", replace(SITE, inputs=2048)
    saved(path)
    stale = RatioTable.load(path, MACHINE)
    saved(path, (SITE, replace(ENTRY, ratio=0.4)))
    stale.put(other, ENTRY)
    stale.save()
    assert RatioTable.load(path, MACHINE).entries()[SITE].ratio == 0.4
    assert stale.entries()[SITE].ratio == 0.4
    # Nor does it put back what it saved itself, once another measured that again.
    saved(path, (other, replace(ENTRY, ratio=0.1)))
    stale.save()
    assert RatioTable.load(path, MACHINE).entries()[other].ratio == 0.1


def test_another_machine_or_version_is_ignored_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.json"
    saved(path, (SITE, ENTRY), (replace(SITE, rows=512), ENTRY))
    table = RatioTable.load(path, {**MACHINE, "mlx": "0.33.0"})
    assert len(table) == 0
    assert table.ignored == "2 entries ignored, made with mlx '0.32.4', not '0.33.0'"
    assert len(warnings_in(caplog)) == 1
    assert table.ignored in warnings_in(caplog)[0]
    # And nothing of either is lost when the new version saves its own.
    table.put(SITE, replace(ENTRY, ratio=0.1))
    table.save()
    assert len(RatioTable.load(path, MACHINE)) == 2
    assert RatioTable.load(path, {**MACHINE, "mlx": "0.33.0"}).entries() == {SITE: replace(ENTRY, ratio=0.1)}


def test_the_line_is_one_line_whatever_the_file_calls_its_machine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path / "t.json", machine={"new\nline \ud800": "\x1b[31m\n"})
    assert RatioTable.load(tmp_path / "t.json", MACHINE).ignored
    (line,) = warnings_in(caplog)
    assert line.encode().isascii()
    assert line.isprintable()


def test_the_machine_is_compared_as_json_holds_it(tmp_path: Path) -> None:
    saved(tmp_path / "t.json", machine={"cores": (4, 4)})
    assert len(RatioTable.load(tmp_path / "t.json", {"cores": [4, 4]})) == 1
    for machine in ({"x": object()}, {"x": float("nan")}, {"x": [[[[[[[[1]]]]]]]]}):
        with pytest.raises(ValueError, match="machine"):
            RatioTable(tmp_path / "t.json", machine)


def test_the_rates_of_the_math_library_may_vary_but_not_change(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    saved(path, fingerprint=RATES)
    for factor, known in ((0.4, 1), (2.5, 1), (0.3, 0), (13, 0)):
        rates = {**RATES, "float32": factor * RATES["float32"]}
        table = RatioTable.load(path, MACHINE, fingerprint=rates)
        assert len(table) == known
        assert ("math rates" in (table.ignored or "")) is not known
    assert len(RatioTable.load(path, MACHINE)) == 1
    assert len(RatioTable.load(path, MACHINE, fingerprint={"float32": 900.0})) == 0
    with pytest.raises(ValueError, match="float32 is nan"):
        RatioTable.load(path, MACHINE, fingerprint={"float32": float("nan")})


def test_the_states_measured_longest_ago_are_forgotten_first(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for day in range(1, 36):
        entry = replace(ENTRY, when=f"2026-{1 + day // 28:02}-{1 + day % 28:02}")
        saved(path, (SITE, entry), machine={"mlx": f"0.{day}"})
    kept = [day for day in range(1, 36) if len(RatioTable.load(path, {"mlx": f"0.{day}"}))]
    assert kept == list(range(4, 36))
    # What was just saved stays, however old the clock says it is.
    saved(path, (SITE, replace(ENTRY, when="1970-01-01")), machine={"mlx": "0.99"})
    assert len(RatioTable.load(path, {"mlx": "0.99"})) == 1


def test_clear_forgets_memory_and_file(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    saved(path)
    table = RatioTable.load(path, MACHINE)
    table.clear()
    assert table.lookup(SITE) is None
    assert not path.exists()
    table.save()
    assert len(RatioTable.load(path, MACHINE)) == 0
    RatioTable(tmp_path / "missing" / "t.json", MACHINE).clear()
    assert not (tmp_path / "missing").exists()


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "t.json").symlink_to(tmp_path / "real" / "t.json")
    saved(tmp_path / "t.json")
    assert (tmp_path / "t.json").is_symlink()
    assert len(RatioTable.load(tmp_path / "real" / "t.json", MACHINE)) == 1


def test_lookups_run_beside_a_writer(tmp_path: Path) -> None:
    table = RatioTable(tmp_path / "t.json", MACHINE)
    table.put(SITE, ENTRY)
    done, wrong = threading.Event(), []

    def look() -> None:
        while not done.is_set():
            if table.lookup(SITE) != ENTRY or SITE not in table.entries():
                wrong.append(1)

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    for rows in range(4096, 4296):
        table.put(replace(SITE, rows=rows), ENTRY)
    table.save()
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong


# --- files that are no table ---


def test_no_file_is_an_empty_table_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(RatioTable.load(tmp_path / "none" / "t.json", MACHINE)) == 0
    assert warnings_in(caplog) == []


def check_survival(path: Path, raw: bytes, caplog: pytest.LogCaptureFixture) -> bool:
    """Loads `raw` and saves over it; True if it was set aside, then unchanged and with one warning."""
    bad = path.with_name(path.name + ".bad")
    for old in (path, bad):
        old.unlink(missing_ok=True)
    path.write_bytes(raw)
    caplog.clear()
    table = RatioTable.load(path, MACHINE)
    assert len(warnings_in(caplog)) <= 1
    aside = bad.exists()
    if aside:
        assert bad.read_bytes() == raw
        assert not path.exists()
        assert len(table) == 0
        assert "set aside" in warnings_in(caplog)[0]
        assert "\n" not in warnings_in(caplog)[0]
    table.put(SITE, ENTRY)
    table.save()
    assert RatioTable.load(path, MACHINE).lookup(SITE) == ENTRY
    return aside


HOSTILE = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b"\x00" * 100,
    b"\xff\xfe",
    b'{"schema": 2, "sections": []}',
    b'{"schema": true, "sections": []}',
    b'{"schema": 1, "sections": {}}',
    b'{"schema": 1, "sections": [1]}',
    b'{"schema": 1, "sections": [{"machine": {}, "fingerprint": {}, "entries": []}]}',
    b'{"schema": 1, "sections": [{"machine": {}, "fingerprint": {"x": 1e999}, "entries": {}}]}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"9" * 100_000,
    b'{"schema": ' + b"1" * 5000 + b"}",
]


@pytest.mark.parametrize("raw", HOSTILE, ids=lambda raw: repr(raw[:60]))
def test_a_hostile_file_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture, raw: bytes) -> None:
    assert check_survival(tmp_path / "t.json", raw, caplog)


@pytest.mark.parametrize("name", [*asdict(ENTRY)])
@pytest.mark.parametrize(
    "value", ["NaN", "1e999", "1" + "0" * 400, "-1", '"\\ud800\\n"', "[[]]", "true", "{}"]
)
def test_an_entry_of_the_wrong_type_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: str
) -> None:
    content = json.loads(saved(tmp_path / "good.json"))
    content["sections"][0]["entries"][SITE.key()][name] = "HERE"
    raw = json.dumps(content).replace('"HERE"', value).encode()
    aside = check_survival(tmp_path / "t.json", raw, caplog)
    words = {(word, '"\\ud800\\n"') for word in ("power", "cpu_dtype", "form")}
    assert aside is not ((name, value) in words | {("gain", "-1"), ("dense", "true")})


def test_an_entry_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    content = json.loads(saved(tmp_path / "t.json"))
    entry = content["sections"][0]["entries"][SITE.key()]
    for name in ("form", "dense", "dense_per_row"):
        del entry[name]
    (tmp_path / "t.json").write_text(json.dumps(content))
    assert RatioTable.load(tmp_path / "t.json", MACHINE).lookup(SITE) == ENTRY


def test_a_machine_that_cannot_be_written_again_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = saved(tmp_path / "good.json")
    for value in (b"[" * 400 + b"]" * 400, b"1e999", b"[1, -1e999]"):
        assert check_survival(tmp_path / "t.json", raw.replace(b'"M1"', value), caplog)
    assert not check_survival(tmp_path / "t.json", raw.replace(b'"M1"', b"1" * 400), caplog)


def test_every_truncation_is_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = saved(tmp_path / "good.json")
    path = tmp_path / "t.json"
    for length in range(len(raw) - 1):  # the last byte is a line's end
        path.write_bytes(raw[:length])
        assert len(RatioTable.load(path, MACHINE)) == 0
        assert not path.exists()
    assert len(warnings_in(caplog)) == len(raw) - 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(data=st.data())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_change_to_a_good_file_is_survived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: st.DataObject
) -> None:
    content = json.loads(saved(tmp_path / "good.json", fingerprint=RATES))
    at: Any = content
    while isinstance(at, dict | list) and at:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else list(range(len(at)))))
        if not at[key] or not isinstance(at[key], dict | list) or data.draw(st.booleans()):
            at[key] = data.draw(JSON)
            break
        at = at[key]
    check_survival(tmp_path / "t.json", json.dumps(content).encode(), caplog)


@given(raw=st.binary(max_size=200))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture, raw: bytes) -> None:
    assert check_survival(tmp_path / "t.json", raw, caplog)


def test_too_large_a_file_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = saved(tmp_path / "good.json")
    monkeypatch.setattr(table_module, "LARGEST_FILE", len(raw))
    assert not check_survival(tmp_path / "t.json", raw, caplog)
    assert check_survival(tmp_path / "t.json", raw + b" ", caplog)


@pytest.mark.parametrize("kind", ["folder", "fifo", "below a file"])
def test_a_path_that_can_hold_no_file_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    path = tmp_path / "t.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_text("a file")
        path = path / "t.json"
    table = RatioTable.load(path, MACHINE)
    assert len(table) == 0
    assert len(warnings_in(caplog)) == 1
    assert "cannot be read" in warnings_in(caplog)[0]
    if kind != "fifo":
        table.put(SITE, ENTRY)
        with pytest.raises(OSError, match=r"t\.json"):
            table.save()
        assert table.lookup(SITE) == ENTRY


# --- directories and disks that refuse ---


def refuse_creation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a read-only directory does (to a user who is not root)."""
    real = {name: getattr(os, name) for name in ("open", "replace", "unlink")}

    def refuse(path: Any, *_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def reading(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        return refuse(path) if flags & os.O_CREAT else real["open"](path, flags, *rest, **options)  # type: ignore

    monkeypatch.setattr(os, "open", reading)
    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(os, "unlink", refuse)


def test_a_read_only_directory_can_be_read_and_says_so_when_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    raw = saved(good)
    bad.write_text("{")
    with monkeypatch.context() as patched:
        refuse_creation(patched)
        table = RatioTable.load(good, MACHINE)
        assert table.lookup(SITE) == ENTRY
        assert warnings_in(caplog) == []
        for write in (table.save, table.clear):
            with pytest.raises(PermissionError, match=r"good\.json"):
                write()
        assert len(RatioTable.load(bad, MACHINE)) == 0
        assert len(warnings_in(caplog)) == 1
        assert "nor set aside" in warnings_in(caplog)[0]
    assert good.read_bytes() == raw
    assert bad.read_text() == "{"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_a_later_save_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path, other = tmp_path / "t.json", replace(SITE, inputs=2048)
    raw = saved(path)
    table = RatioTable.load(path, MACHINE)
    table.put(other, ENTRY)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            table.save()
    assert path.read_bytes() == raw
    assert sorted(each.name for each in tmp_path.iterdir()) == ["t.json", "t.json.lock"]
    table.save()
    assert set(RatioTable.load(path, MACHINE).entries()) == {SITE, other}


# --- other processes, and death ---

# The package itself would start MLX, which does not survive a fork: only its two modules are loaded.
HEAD = f"""
import json, os, random, resource, signal, sys, time, types
package = types.ModuleType("fusionml")
package.__path__ = [{os.path.dirname(table_module.__file__)!r}]
sys.modules["fusionml"] = package
from fusionml.ratios import Site
from fusionml.table import Entry, RatioTable

path = sys.argv[1]
entry = Entry(0.3, 0.25, "2026-08-01T12:00:00+00:00", 0.02, "mains", 41, "native")

def site(number):
    return Site("linear", "bfloat16", 1 + number, 64, False, 2048)

def load():
    return RatioTable.load(path, {{"chip": "M1"}})

def numbers():
    return {{each.inputs - 1 for each in load().entries()}}

def child(run):
    pid = os.fork()
    if not pid:
        try:
            run()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return pid
"""


def run_apart(path: Path, body: str) -> Any:
    """What `body` prints as JSON, run in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + body, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_fifty_kills_lose_nothing_that_was_saved(tmp_path: Path) -> None:
    body = """
random.seed(4)
number, saved_after_kill, lost = 0, 0, []
for kill in range(50):
    told, tell = os.pipe()
    def write():
        table = load()
        for n in range(number, number + 100_000):
            table.put(site(n), entry)
            table.save()
            os.write(tell, b".")
    pid = child(write)
    acknowledged = len(os.read(told, 1))
    time.sleep(random.uniform(0, 0.012))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(tell)
    while more := os.read(told, 65536):
        acknowledged += len(more)
    os.close(told)
    number += acknowledged
    found = numbers()
    lost += sorted(set(range(number)) - found)
    # The kill may have come between the save and its acknowledgement.
    assert found <= set(range(number + 1)), found
    saved_after_kill += number in found
    number = len(found)
print(json.dumps({"lost": lost, "saved": number, "between": saved_after_kill}))
"""
    result = run_apart(tmp_path / "t.json", body)
    assert result["lost"] == []
    assert result["saved"] >= 50
    assert not (tmp_path / "t.json.bad").exists()


def test_a_kill_at_any_line_of_a_save_leaves_the_old_table_or_the_new(tmp_path: Path) -> None:
    body = """
table = load()
table.put(site(0), entry)
table.save()
old = open(path, "rb").read()

def dying(line):
    left = [line]
    def trace(frame, event, _):
        if not frame.f_code.co_filename.endswith("table.py"):
            return None
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    def run():
        table = load()
        table.put(site(1), entry)
        sys.settrace(trace)
        table.save()
    return run

outcomes, line, status = [], 0, signal.SIGKILL
while status == signal.SIGKILL:
    with open(path, "wb") as file:
        file.write(old)
    _, status = os.waitpid(child(dying(line)), 0)
    outcomes.append(sorted(numbers()))
    line += 1
print(json.dumps({"status": status, "outcomes": outcomes}))
"""
    result = run_apart(tmp_path / "t.json", body)
    outcomes = result["outcomes"]
    assert result["status"] == 0
    assert len(outcomes) > 50
    assert outcomes.count([0]) + outcomes.count([0, 1]) == len(outcomes)
    # It is one step: first all old, then all new.
    assert outcomes == sorted(outcomes)
    assert outcomes.count([0]) > 20
    assert outcomes[-1] == [0, 1]


def test_two_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    body = """
def writer(first):
    def run():
        table = load()
        for n in range(first, 80, 2):
            table.put(site(n), entry)
            table.save()
    return run
children = [child(writer(first)) for first in range(2)]
statuses = [os.waitpid(pid, 0)[1] for pid in children]
print(json.dumps({"statuses": statuses, "found": sorted(numbers())}))
"""
    assert run_apart(tmp_path / "t.json", body) == {"statuses": [0, 0], "found": list(range(80))}


def test_a_write_cut_short_by_the_system_leaves_the_old_file(tmp_path: Path) -> None:
    body = """
table = load()
table.put(site(0), entry)
table.save()
old = open(path, "rb").read()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) + 10, resource.RLIM_INFINITY))
table.put(site(1), entry)
try:
    table.save()
    error = None
except OSError as failed:
    error = failed.errno
kept = open(path, "rb").read() == old
left = sorted(os.listdir(os.path.dirname(path)))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
table.save()
print(json.dumps({"error": error, "kept": kept, "left": left, "found": sorted(numbers())}))
"""
    assert run_apart(tmp_path / "t.json", body) == {
        "error": errno.EFBIG,
        "kept": True,
        "left": ["t.json", "t.json.lock"],
        "found": [0, 1],
    }


# --- whose file it is ---

SOMEBODYS = {
    "a model's config": b'{"model_type": "llama", "hidden_size": 4096}',
    "binary": bytes(range(256)),
    "empty": b"",
    "another schema": b'{"schema": 2, "sections": []}',
}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


@pytest.mark.parametrize("raw", SOMEBODYS.values(), ids=list(SOMEBODYS))
def test_somebodys_file_stays_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture, raw: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    table = RatioTable.load(path, MACHINE, ours=False)
    assert len(table) == 0
    (line,) = warnings_in(caplog)
    assert str(path) in line
    assert "left as it is" in line
    table.put(SITE, ENTRY)
    for change in (table.save, table.clear):
        with pytest.raises(OSError, match="left as it is"):
            change()
        assert contents(tmp_path) == {"config.json": raw}
    assert table.lookup(SITE) == ENTRY, "in memory it is kept"


def test_a_table_of_ours_in_somebodys_place_is_used_and_cleared(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    saved(path, ours=False)
    table = RatioTable.load(path, MACHINE, ours=False)
    assert table.lookup(SITE) == ENTRY
    table.clear()
    assert contents(tmp_path) == {}


def test_at_our_own_place_every_bad_file_is_kept(tmp_path: Path) -> None:
    path, bad = tmp_path / "t.json", [b"first", b"second", b"", b"fourth"]
    for number, raw in enumerate(bad):
        path.write_bytes(raw)
        if number % 2:
            table = RatioTable(path, MACHINE)  # nobody looked before it was saved
            table.put(SITE, ENTRY)
            table.save()
            path.unlink()
        else:
            RatioTable.load(path, MACHINE)
    names = ["t.json.bad", "t.json.bad1", "t.json.bad2", "t.json.bad3"]
    assert contents(tmp_path) == dict(zip(names, bad, strict=True))


def test_setting_aside_takes_no_name_that_is_in_use(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.with_name("t.json.bad").symlink_to("nowhere")
    path.with_name("t.json.bad1").mkdir()
    path.write_bytes(b"bad")
    RatioTable.load(path, MACHINE)
    assert path.with_name("t.json.bad").is_symlink()
    assert path.with_name("t.json.bad2").read_bytes() == b"bad"


@pytest.mark.parametrize("given", [False, True], ids=["our own place", "named by the user"])
def test_only_the_place_that_nobody_named_is_our_own(tmp_path: Path, given: bool) -> None:
    path = home() / "ratios.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"bad")
    open_table(str(path) if given else None)
    assert contents(path.parent) == {"ratios.json" if given else "ratios.json.bad": b"bad"}
