"""Running a command of ours inside a test, and what a refusal looks like."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fusionml import cli


@dataclass(frozen=True)
class Answer:
    """The exit status of a command, what it printed and what it said on stderr."""

    status: int
    out: str
    err: str


def command(capsys: pytest.CaptureFixture[str], *argv: str) -> Answer:
    """Run `fusionml ARGV...` in this process."""
    try:
        status = cli.main(list(argv))
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    return Answer(status, *capsys.readouterr())


def assert_refused(answer: Answer, *words: str) -> None:
    """Exit status 2, nothing on stdout and one line on stderr, which holds all `words`."""
    assert (answer.status, answer.out) == (2, ""), answer
    assert answer.err.startswith("fusionml"), answer.err
    assert answer.err.count("\n") == 1, answer.err
    assert all(word in answer.err for word in words), answer.err
