"""What was asked and answered lies beside the result, word for word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import toys

from benchmarks import runner, schema
from benchmarks.experiment import Options


def test_they_lie_beside_the_result_and_not_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = [{"prompt": "where is /home/somebody/notes.txt?", "answer": "über\nall"}, {"prompt": "2"}]
    answers = iter([{"figures": {}, "transcripts": lines[:1]}, {"figures": {}, "transcripts": lines[1:]}])
    monkeypatch.setattr(runner, "refusals", lambda needed: [])
    given = Options(extra={"kinds": ["fine", "crash", "error"]})
    job = runner.Run(toys.EXPERIMENT, given, ["overhead"], tmp_path)

    def answer(*args: Any) -> dict[str, Any]:
        result = next(answers, None)
        return {"result": result, "error": "no more" if result is None else None}

    monkeypatch.setattr(runner, "_in_a_process", answer)
    file, document = runner.run(job)
    assert schema.problems(document) == []
    beside = file.with_name(f"{file.stem}-transcripts.jsonl")
    assert [json.loads(line) for line in beside.read_text(encoding="utf-8").splitlines()] == lines
    assert "über" in beside.read_text(encoding="utf-8")
    assert "über" not in file.read_text()


def test_there_is_no_such_file_where_nothing_was_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runner, "_in_a_process", lambda *args: {"result": {"figures": {}}, "error": None})
    monkeypatch.setattr(runner, "refusals", lambda needed: [])
    job = runner.Run(toys.EXPERIMENT, Options(extra={"kinds": ["fine"]}), ["overhead"], tmp_path)
    file, _ = runner.run(job)
    assert list(file.parent.iterdir()) == [file]
