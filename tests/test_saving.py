"""The saver: tables are written beside the model's calls, whoever holds the lock, whatever the disk does."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import fusionml
import fusionml.table as table_module
from fusionml import machine, patching, sites
from fusionml.ratios import Site
from fusionml.saving import Saver
from fusionml.session import Session
from fusionml.table import Entry, RatioTable

MACHINE = {"chip": "M1"}
SITE = Site("linear", "float32", 4096, 14336, False, 2048)
ENTRY = Entry(0.3, 0.25, "2026-08-01T12:00:00+00:00", 0.02, "mains", 41, "native")
PATIENCE = 20.0
"""Seconds after which what should not wait is taken to wait for ever."""


def filled(path: Path, *rows: int) -> RatioTable:
    table = RatioTable.load(path, MACHINE)
    for count in rows or (SITE.rows,):
        table.put(replace(SITE, rows=count), ENTRY)
    return table


def on_disk(path: Path) -> list[int]:
    return sorted(site.rows for site in RatioTable.load(path, MACHINE).entries())


@contextlib.contextmanager
def held_by_another(path: Path) -> Iterator[None]:
    """The table's lock, as another process holds it: by a file of its own."""
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


waiting: list[threading.Thread] = []
"""Threads of failed tests: a process that ends while one of them computes hangs."""


def within(session: Session, work: Any) -> None:
    """Do `work` on a thread of its own, so that a wait for ever is a failure and not a hang."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if thread.is_alive():
        patching._session = Session()  # what tidies up after the test must not wait as well
        waiting.append(thread)
        pytest.fail("it waits")
    assert failed == []


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- the saver alone


def test_a_table_is_written_on_a_thread_of_its_own_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, path, seen = Saver(), tmp_path / "t.json", []
    save = RatioTable.save
    monkeypatch.setattr(
        RatioTable, "save", lambda table: (seen.append(threading.current_thread()), save(table))
    )
    saver.soon(filled(path))
    assert saver.wait(PATIENCE)
    assert on_disk(path) == [2048]
    (thread,) = seen
    assert thread is not threading.current_thread()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    saver.soon(filled(path, 512))
    assert saver.wait(PATIENCE)
    assert on_disk(path) == [512, 2048], "another thread for the next table"


def test_without_anything_to_write_there_is_nothing_to_wait_for() -> None:
    assert Saver().wait(0) is True


def test_it_waits_for_the_lock_where_nobody_else_does(tmp_path: Path) -> None:
    saver, path = Saver(), tmp_path / "t.json"
    with held_by_another(path):
        saver.soon(filled(path))
        assert saver.wait(0.05) is False
        assert not path.exists()
    assert saver.wait(PATIENCE) is True
    assert on_disk(path) == [2048]


def test_reading_a_bad_file_does_not_wait_for_the_lock_and_the_next_save_sets_it_aside(
    tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    path, tables = tmp_path / "t.json", []
    path.write_bytes(b"no table")
    with held_by_another(path):
        within(session, lambda: tables.append(filled(path)))
    assert len(warnings_in(caplog)) == 1
    assert path.read_bytes() == b"no table"
    tables[0].save()
    assert on_disk(path) == [2048]
    assert path.with_name("t.json.bad").read_bytes() == b"no table"


def test_several_tables_are_all_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, saved, go = Saver(), [], threading.Event()
    save = RatioTable.save

    def slow(table: RatioTable) -> None:
        assert go.wait(PATIENCE)
        saved.append(Path(table.path).name)
        save(table)

    monkeypatch.setattr(RatioTable, "save", slow)
    tables = [filled(tmp_path / f"{name}.json") for name in "abc"]
    for table in [*tables, tables[2], tables[2]]:
        saver.soon(table)
    go.set()
    assert saver.wait(PATIENCE)
    assert saved == ["a.json", "b.json", "c.json"], "each once, however often it was asked for meanwhile"
    assert all(on_disk(tmp_path / f"{name}.json") == [2048] for name in "abc")


def test_what_cannot_be_written_is_one_warning_for_each_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("a file")
    saver = Saver()
    bad, worse = filled(tmp_path / "file" / "t.json"), filled(tmp_path / "file" / "u.json")
    caplog.clear()
    for table in (bad, bad, worse, filled(tmp_path / "good.json")):
        saver.soon(table)
        assert saver.wait(PATIENCE)
    assert len(warnings_in(caplog)) == 2
    for table, line in zip((bad, worse), warnings_in(caplog), strict=True):
        assert table.path in line
        assert "cannot be written" in line
    assert on_disk(tmp_path / "good.json") == [2048], "the others are written all the same"


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_that_nobody_foresaw_ends_neither_the_thread_nor_the_saver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver, save = Saver(), RatioTable.save

    def fails(table: RatioTable) -> None:
        raise RuntimeError("never seen before")

    monkeypatch.setattr(RatioTable, "save", fails)
    saver.soon(filled(tmp_path / "t.json"))
    assert saver.wait(PATIENCE)
    assert "never seen before" in warnings_in(caplog)[0]
    monkeypatch.setattr(RatioTable, "save", save)
    saver.soon(filled(tmp_path / "t.json"))
    assert saver.wait(PATIENCE)
    assert on_disk(tmp_path / "t.json") == [2048]


def test_what_is_put_while_a_table_is_written_is_kept_for_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, saver = tmp_path / "t.json", Saver()
    writing, go, write = threading.Event(), threading.Event(), table_module._write

    def slow(*args: Any) -> None:
        writing.set()
        assert go.wait(PATIENCE)
        write(*args)

    monkeypatch.setattr(table_module, "_write", slow)
    table = filled(path, 512)
    saver.soon(table)
    assert writing.wait(PATIENCE)
    newer = replace(ENTRY, ratio=0.4)
    putting = threading.Thread(target=lambda: [table.put(replace(SITE, rows=n), newer) for n in (512, 1024)])
    putting.start()
    putting.join(PATIENCE / 4)
    waited = putting.is_alive()
    go.set()
    putting.join(PATIENCE)
    assert not waited, "put() waited for the disk"
    assert saver.wait(PATIENCE)
    assert {site.rows: entry for site, entry in table.entries().items()} == {512: newer, 1024: newer}
    assert on_disk(path) == [512]
    saver.soon(table)
    assert saver.wait(PATIENCE)
    for kept in (table, RatioTable.load(path, MACHINE)):
        assert {site.rows: entry for site, entry in kept.entries().items()} == {512: newer, 1024: newer}


AT_EXIT = """
import sys, time
from fusionml.saving import Saver
from fusionml.table import Entry, RatioTable
from fusionml.ratios import Site
save = RatioTable.save
RatioTable.save = lambda table: (time.sleep(0.2), save(table))
Saver.wait.__defaults__ = (float(sys.argv[2]),)
table = RatioTable.load(sys.argv[1], {"chip": "M1"})
entry = Entry(0.3, 0.25, "2026-08-01T12:00:00+00:00", 0.02, "mains", 41, "native")
table.put(Site("linear", "float32", 4096, 14336, False, 2048), entry)
Saver().soon(table)
"""


def at_exit(path: Path, seconds: float) -> None:
    command = [sys.executable, "-c", AT_EXIT, str(path), str(seconds)]
    env = os.environ | {"PYTHONPATH": str(Path(fusionml.__file__).parents[1])}
    subprocess.run(command, env=env, timeout=60, check=True)


def test_the_end_of_the_process_waits_for_a_write_but_not_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with held_by_another(path):
        at_exit(path, 0.3)
        assert not path.exists()
    at_exit(path, 30)
    assert on_disk(path) == [2048]


# --- in a patched model


@pytest.fixture
def learning_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[nn.Module]:
    """Two sites that learn within a few calls, on a machine that nobody else uses."""
    monkeypatch.setattr(sites, "LEARNING_SHARE", 1e9)
    monkeypatch.setattr(machine.OtherLoad, "share", lambda self: 0.0)
    monkeypatch.setattr(machine, "identity", lambda: MACHINE)
    monkeypatch.setattr(machine, "math_fingerprint", dict)
    model = nn.Sequential(nn.Linear(128, 160), nn.Linear(160, 128))
    model.eval()
    mx.eval(model.parameters())  # made on this thread, used on others
    fusionml.patch(model, min_rows=32, gate="auto", table=str(tmp_path / "t.json"))
    yield model
    fusionml.unpatch()
    for thread in waiting:
        thread.join(PATIENCE)


def learn(session: Session, model: nn.Module) -> None:
    for _ in range(200):
        mx.eval(model(mx.ones((64, 128))))
        if not any(control._learn for control in session._all_controls()):
            return
    pytest.fail("still learning")


def test_another_process_that_holds_the_lock_delays_no_call(
    learning_model: nn.Module, session: Session, tmp_path: Path
) -> None:
    path = tmp_path / "t.json"
    with held_by_another(path):
        within(session, lambda: learn(session, learning_model))
        assert session.saver.wait(0.05) is False
        assert not path.exists()
    assert session.saver.wait(PATIENCE)
    learned = RatioTable.load(path, MACHINE).entries()
    assert {(site.inputs, site.outputs) for site in learned} == {(128, 160), (160, 128)}


def test_while_a_table_is_written_calls_and_status_go_on(
    learning_model: nn.Module, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go = threading.Event(), threading.Event()

    def slow(table: RatioTable) -> None:
        writing.set()
        assert go.wait(PATIENCE)

    monkeypatch.setattr(RatioTable, "save", slow)
    try:
        within(session, lambda: learn(session, learning_model))
        assert writing.wait(PATIENCE)
        before = sum(fusionml.status()["calls"].values())
        within(session, lambda: [mx.eval(learning_model(mx.ones((64, 128)))) for _ in range(3)])
        within(session, fusionml.status)
        assert sum(fusionml.status()["calls"].values()) == before + 6
        assert not session.saver.wait(0)
    finally:
        go.set()
    assert session.saver.wait(PATIENCE)


def test_a_table_that_cannot_be_written_costs_a_live_model_one_warning(
    learning_model: nn.Module, session: Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "t.json").mkdir()
    session.forget_plans()
    learn(session, learning_model)
    assert session.saver.wait(PATIENCE)
    written = [line for line in warnings_in(caplog) if "cannot be written" in line]
    assert len(written) == 1, warnings_in(caplog)
    assert fusionml.status()["reasons"].keys() <= {"still learning what is fastest", "timed as stock"} | {
        site["why"] for site in fusionml.status()["sites"].values()
    } | {"the gate found stock to be as fast"}
