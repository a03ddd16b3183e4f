"""`run`: another program, patched, that behaves as if it had been started directly."""

import atexit
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from checkpoints import small_checkpoint
from mlx_lm.models.cache import make_prompt_cache
from models import tiny, tokens

import fusionml
from fusionml import cli, launch, patching
from fusionml.session import Session

REPOSITORY = str(Path(fusionml.__file__).parents[1])
ON = "fusionml: on; large linear layers of prompts are split\n"

# What a program can tell about how it was started.
REPORT = """
import json, sys
main = sys.modules["__main__"]
spec = None if __spec__ is None else __spec__.name
print(json.dumps([sys.argv, sys.path[0], __name__, __file__, __package__, spec, main.__dict__ is globals()]))
"""


def environment(**changes: str) -> dict[str, str]:
    path = os.pathsep.join([REPOSITORY, *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"} | changes


def direct(*argv: str, cwd: Path, **changes: str) -> "subprocess.CompletedProcess[str]":
    """`python ARGV`, the truth that `run` is held against."""
    command = [sys.executable, *argv]
    return subprocess.run(
        command, cwd=cwd, env=environment(**changes), capture_output=True, text=True, timeout=120
    )


def ours(*argv: str, cwd: Path, **changes: str) -> "subprocess.CompletedProcess[str]":
    return direct("-m", "fusionml", "run", *argv, cwd=cwd, **changes)


# --- in this process


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    return registered


@pytest.fixture
def start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at_exit: list[Callable[[], None]]
) -> Iterator[Callable[..., Any]]:
    """`fusionml run ARGV` in `tmp_path`; returns what it exits with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fusionml"])
    monkeypatch.setattr(sys, "path", ["/where/the/command/is", *sys.path])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    for name in ("package", "package.__main__", "tool", "broken_tool"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def call(*argv: str) -> Any:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["run", *argv])
        return stopped.value.code

    yield call
    fusionml.unpatch()


ARGUMENTS = ["--", "--ratio", "7", "run", "-h", "", "a b", "--version"]


@pytest.mark.parametrize("settings", [[], ["--ratio", "0.25", "--gate=off"]])
@pytest.mark.parametrize(
    ("target", "how"), [("./tool.py", []), ("folder/tool.py", []), ("tool", ["-m"]), ("package", ["-m"])]
)
def test_a_program_is_started_as_python_starts_it(
    start: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    settings: list[str],
    target: str,
    how: list[str],
) -> None:
    for file in ("tool.py", "folder/tool.py", "package/__init__.py", "package/__main__.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("" if "init" in file else REPORT)
    assert start(*settings, target, *ARGUMENTS) in (None, 0)
    out, err = capsys.readouterr()
    assert out == direct(*how, target, *ARGUMENTS, cwd=tmp_path).stdout
    assert json.loads(out)[0][1:] == ARGUMENTS
    assert err == ON
    assert patching.status()["settings"]["ratio"] == (0.25 if settings else None)


def test_a_console_script_is_started_as_its_own_command_is(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Point:
        def load(self) -> Callable[[], int]:
            return lambda: print(sys.argv) or 5

    asked = []

    def entry_points(**wanted: str) -> list[Point]:
        asked.append(wanted)
        return [Point()] if wanted["name"] == "tool" else []

    monkeypatch.setattr(launch.importlib.metadata, "entry_points", entry_points)
    assert start("tool", "--ratio", "7") == 5
    assert capsys.readouterr().out == "['tool', '--ratio', '7']\n"
    assert asked[0]["group"] == "console_scripts"


FOLDER = """
import os, helper
print(len(sys.path))
os.chdir("/")
import late
print(helper.X, late.X, os.path.basename(__file__), sys.modules["__main__"].__dict__ is globals())
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """`app`, a folder with a `__main__.py` and two modules beside it, and the same as `app.zip`."""
    for name, source in {"__main__": REPORT + FOLDER, "helper": "X = 1", "late": "X = 2"}.items():
        (tmp_path / "app").mkdir(exist_ok=True)
        (tmp_path / "app" / f"{name}.py").write_text(source)
    shutil.make_archive(str(tmp_path / "app"), "zip", tmp_path / "app")
    return tmp_path


@pytest.mark.parametrize("safe_path", ["", "1"])
@pytest.mark.parametrize("target", ["./app", "app/", "{tmp}/app", "app.zip", "./app.zip", "{tmp}/app.zip"])
def test_a_folder_or_an_archive_is_started_as_python_starts_it(
    program: Path, target: str, safe_path: str
) -> None:
    target = target.format(tmp=program)
    told, truth = (
        start(target, *ARGUMENTS, cwd=program, PYTHONSAFEPATH=safe_path) for start in (ours, direct)
    )
    assert (told.returncode, told.stdout) == (truth.returncode, truth.stdout) == (0, truth.stdout)
    assert told.stderr.startswith(ON)
    assert truth.stdout.endswith("1 2 __main__.py True\n")


def test_a_folder_or_an_archive_without_a_main_is_no_program(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (program / "app" / "__main__.py").unlink()
    (program / "app.zip").unlink()
    shutil.make_archive(str(program / "app"), "zip", program / "app")
    for target in (f"{program}/app", f"{program}/app.zip"):
        assert cli.main(["run", target]) == 2
        assert capsys.readouterr().err.startswith(f"fusionml run: {target!r} is no installed command")


@pytest.mark.parametrize(
    ("future", "annotation"), [("", "<class 'int'>"), ("from __future__ import annotations\n", "int")]
)
def test_a_script_is_compiled_with_its_own_future_flags_only(
    start: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    future: str,
    annotation: str,
) -> None:
    source = "def f(x: int): pass\nprint(f.__annotations__['x'])\nfrom functools import singledispatch\n"
    (tmp_path / "tool.py").write_text(future + source)
    assert start("tool.py") in (None, 0)
    assert capsys.readouterr().out == f"{annotation}\n"


@pytest.mark.parametrize("code", [0, 1, 3, None, "a message"])
def test_exit_codes_pass_through(start: Callable[..., Any], tmp_path: Path, code: Any) -> None:
    (tmp_path / "tool.py").write_text(f"import sys; sys.exit({code!r})")
    assert start("tool.py") == code
    assert start("tool") == code


def test_the_program_runs_patched_and_its_last_line_counts(
    start: Callable[..., Any],
    at_exit: list[Callable[[], None]],
    session: Session,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "tool.py").write_text("import fusionml; print(fusionml.status()['patched'])")
    assert start("tool.py") in (None, 0)
    assert capsys.readouterr().out == "True\n"
    session.shared = lambda: (1234, 0.876)  # type: ignore[method-assign]
    (last_line,) = at_exit
    last_line()
    said = "fusionml: 1234 prompt tokens, 88% of their linear arithmetic split\n"
    assert capsys.readouterr() == ("", said)


def test_turned_off_it_is_stock_and_says_so(
    start: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    at_exit: list[Callable[[], None]],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("FUSIONML_ENABLED", "0")
    (tmp_path / "tool.py").write_text("import mlx.nn as nn; print(nn.Linear.__call__.__module__)")
    assert start("tool.py") in (None, 0)
    out, err = capsys.readouterr()
    assert out == "mlx.nn.layers.linear\n"
    assert err == "fusionml: off (FUSIONML_ENABLED=0); everything is stock\n"
    assert at_exit == []


def test_a_closed_stderr_does_not_send_our_lines_to_stdout(
    start: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "tool.py").write_text("print('out')")
    monkeypatch.setattr(sys, "stderr", None)
    assert start("tool.py") in (None, 0)
    assert capsys.readouterr().out == "out\n"


@pytest.mark.parametrize("target", ["none.py", "./none", "no_such_module", "no.such.module", "fusionml.", ""])
def test_a_target_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["run", target]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"fusionml run: {target!r} is no installed command, module or script\n"


FAILING = """def f():
    raise KeyError('key')

try:
    f()
except KeyError as error:
    raise RuntimeError('told') from error
"""


@pytest.mark.parametrize("source", [FAILING, "def (\n"], ids=["exception", "syntax"])
@pytest.mark.parametrize(("target", "how"), [("./tool.py", []), ("tool", ["-m"])])
def test_a_traceback_begins_at_the_programs_own_frame(
    start: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    source: str,
    target: str,
    how: list[str],
) -> None:
    (tmp_path / "tool.py").write_text(source)
    with pytest.raises((RuntimeError, SyntaxError)) as caught:
        cli.main(["run", target])
    capsys.readouterr()
    sys.excepthook(caught.type, caught.value, caught.tb)
    truth = direct(*how, target, cwd=tmp_path).stderr
    # `python -m` shows frames of its own first: of runpy and, for a syntax error, of the import system.
    truth = re.sub(r'  File "(<frozen [\w.]+>|[^"]*runpy\.py)".*\n(    .*\n)?', "", truth)
    shown = capsys.readouterr().err
    assert shown.removeprefix("Traceback (most recent call last):\n") == truth.removeprefix(
        "Traceback (most recent call last):\n"
    )
    assert "launch.py" not in shown


def test_the_traceback_of_a_command_that_cannot_be_imported_begins_at_its_own_frame(
    start: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "broken_tool.py").write_text("1 / 0\n")
    sys.path.insert(0, str(tmp_path))
    point = EntryPoint("tool", "broken_tool:main", "console_scripts")
    monkeypatch.setattr(launch.importlib.metadata, "entry_points", lambda **wanted: [point])
    with pytest.raises(ZeroDivisionError) as caught:
        cli.main(["run", "tool"])
    capsys.readouterr()
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert re.search(r'last\):\n  File "[^"]*broken_tool.py", line 1', capsys.readouterr().err)


def test_an_exception_of_our_own_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    hook = launch._without_our_frames(sys.__excepthook__)
    try:
        raise ValueError("elsewhere")
    except ValueError as error:
        hook(ValueError, error, error.__traceback__)
    assert "in test_an_exception_of_our_own" in capsys.readouterr().err


# --- whole processes


@pytest.mark.parametrize(
    "source",
    [FAILING, "import os, signal\nprint('out', flush=True)\nos.kill(os.getpid(), signal.SIGINT)\n"],
    ids=["exception", "interrupt"],
)
def test_a_process_ends_as_the_program_alone_does(tmp_path: Path, source: str) -> None:
    (tmp_path / "tool.py").write_text(source)
    told, truth = ours("tool.py", cwd=tmp_path), direct("tool.py", cwd=tmp_path)
    assert (told.returncode, told.stdout) == (truth.returncode, truth.stdout)
    lines = told.stderr.splitlines(keepends=True)
    assert lines[0] == ON
    assert "".join(lines[1:-1]) == truth.stderr
    assert lines[-1] == "fusionml: 0 prompt tokens, 0% of their linear arithmetic split\n"


ENVIRONMENT = """
import os
os.environ["HF_HOME"] = "/another/disk"
os.environ["HF_HUB_OFFLINE"] = "0"
from huggingface_hub import constants
print(constants.HF_HOME, constants.HF_HUB_OFFLINE)
import mlx_lm
"""


def test_what_a_script_sets_in_its_environment_counts_for_mlx_lm(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(ENVIRONMENT)
    told = ours("tool.py", cwd=tmp_path)
    assert (told.returncode, told.stdout) == (0, "/another/disk False\n"), told.stderr


def test_a_module_beside_a_script_hides_an_installed_one_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("import tokenizers; print(tokenizers.X)")
    (tmp_path / "tokenizers.py").write_text("X = 'mine'")
    for cwd, target in ((tmp_path, "tool.py"), (tmp_path.parent, str(tmp_path / "tool.py"))):
        told = ours(target, cwd=cwd)
        assert (told.returncode, told.stdout) == (0, "mine\n"), told.stderr


@pytest.mark.parametrize("how", ["closed", "nobody reads it"])
@pytest.mark.parametrize("source", ["print('out')", "import sys; print('out'); sys.exit(3)"])
def test_without_anybody_at_stderr_a_program_runs_and_ends_as_alone(
    tmp_path: Path, how: str, source: str
) -> None:
    (tmp_path / "tool.py").write_text(source)
    read, write = os.pipe()
    os.close(read)
    ends = []
    for command in (["tool.py"], ["-m", "fusionml", "run", "tool.py"]):
        shell = 'exec "$@" 2>&-' if how == "closed" else 'exec "$@"'
        ends.append(
            subprocess.run(
                ["sh", "-c", shell, "sh", sys.executable, *command],
                cwd=tmp_path,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=write,
                timeout=120,
            )
        )
    os.close(write)
    truth, told = ends
    assert (told.returncode, told.stdout) == (truth.returncode, truth.stdout)
    assert told.stdout == b"out\n"


LAST_LINE = """
import gc, sys
import mlx.core as mx, mlx_lm
from mlx_lm.models.cache import make_prompt_cache

def answer(model, rows):
    cache = make_prompt_cache(model)
    model(mx.array([[1 + i % 250 for i in range(rows)]]), cache=cache)
    mx.eval([each.state for each in cache])

answer(mlx_lm.load(sys.argv[1])[0], 280)
gc.collect()
kept = mlx_lm.load(sys.argv[1])[0]
answer(kept, 300)
answer(kept, 300)
"""


def test_the_last_line_counts_models_that_are_gone_and_those_that_are_left(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(LAST_LINE)
    model = str(small_checkpoint(tmp_path))
    told = ours("--gate=off", "--ratio=0.25", "tool.py", model, cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert told.stderr.endswith("fusionml: 600 prompt tokens, 100% of their linear arithmetic split\n")


Answers = dict[str, tuple[int, str, str]]
BOTH = {"direct": ["-m", "mlx_lm", "generate"], "ours": ["-m", "fusionml", "run", "mlx_lm.generate"]}

# MLX-LM clears the cache after each chunk of a prompt: the same moment on every machine.
CTRL_C_AFTER_THE_FIRST_CHUNK = """
import os, signal
import mlx.core as mx

def clear_cache():
    os.kill(os.getpid(), signal.SIGINT)

mx.clear_cache = clear_cache
"""


def generate(tmp_path: Path, *options: str, prompt: str = "", site: str = "") -> Answers:
    """Status, stdout and stderr of both ways to start it, at the same time; `site` runs in both first."""
    model = str(small_checkpoint(tmp_path))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(site)
    started = {}
    for name, how in BOTH.items():
        env = environment(COLUMNS="9999")
        env["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "site"), env["PYTHONPATH"]])
        command = [sys.executable, *how, "--model", model, "--temp", "0", *options]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started[name] = subprocess.Popen(command, cwd=tmp_path, env=env, text=True, **pipes)  # type: ignore[call-overload]
    ends = {name: process.communicate(prompt, timeout=120) for name, process in started.items()}
    return {name: (started[name].returncode, *ends[name]) for name in started}


def apart_from_our_lines(err: str) -> str:
    lines = err.splitlines(keepends=True)
    assert lines[0] == ON
    assert re.fullmatch(r"fusionml: \d+ prompt tokens, \d+% of their linear arithmetic split\n", lines[-1])
    return "".join(lines[1:-1])


def test_mlx_lm_generate_answers_a_prompt_from_stdin_with_the_same_text(tmp_path: Path) -> None:
    answers = generate(tmp_path, "--prompt", "-", "--max-tokens", "12", prompt="A river, a stone. " * 18)
    (status, out, err), (truth, stock, stock_err) = answers["ours"], answers["direct"]
    assert (status, truth) == (0, 0)
    figures = r"(?<=, )[\d.]+(?= tokens-per-sec)|(?<=memory: )[\d.]+"
    assert "324 tokens" in out
    assert re.sub(figures, "N", out) == re.sub(figures, "N", stock)
    assert apart_from_our_lines(err) == stock_err


def test_the_last_line_counts_the_prompt_of_a_model_that_is_gone(patch: Callable[..., None]) -> None:
    patch(ratio=0.25)
    model = tiny("llama")
    patching.session().known.add(model, from_loader=True)
    cache = make_prompt_cache(model)
    model(tokens(300), cache)
    mx.eval([entry.state for entry in cache])
    before = patching.session().shared()
    del model
    gc.collect()
    assert patching.session().shared() == before == (300, 1.0)


def test_mlx_lm_generate_refuses_a_bad_flag_in_the_same_words(tmp_path: Path) -> None:
    answers = generate(tmp_path, "--max-tokenz", "3")
    (status, out, err), (truth, stock, stock_err) = answers["ours"], answers["direct"]
    assert (status, out) == (truth, stock) == (2, "")
    program = r"(?<=usage: )\S+|^\S+(?=: error)"
    normal = [re.sub(program, "PROGRAM", text, flags=re.M) for text in (apart_from_our_lines(err), stock_err)]
    assert normal[0] == normal[1]
    assert "--max-tokenz" in normal[0]


def test_mlx_lm_generate_ends_the_same_way_by_ctrl_c_in_the_middle_of_a_prompt(tmp_path: Path) -> None:
    options = ["--prompt", "-", "--prefill-step-size", "256"]
    prompt = "A river, a stone. " * 20
    answers = generate(tmp_path, *options, prompt=prompt, site=CTRL_C_AFTER_THE_FIRST_CHUNK)
    (status, out, err), (truth, stock, stock_err) = answers["ours"], answers["direct"]
    assert (status, out) == (truth, stock) == (-signal.SIGINT, "==========\n")
    own = r'  File "[^"]*mlx_lm/generate.py", line \d+, in main(.|\n)*KeyboardInterrupt\n'
    found, expected = re.search(own, err), re.search(own, stock_err)
    assert found is not None
    assert expected is not None
    assert apart_from_our_lines(err) == "Traceback (most recent call last):\n" + found[0]
    assert found[0] == expected[0]
    assert err.endswith("fusionml: 256 prompt tokens, 100% of their linear arithmetic split\n")
