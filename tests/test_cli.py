"""The commands: what they refuse and how, what `compare` prints and writes, exit statuses."""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import psutil
import pytest
from checkpoints import small_checkpoint

import fusionml
from fusionml import calibrate, cli, loading, machine, sites, split
from fusionml import compare as compare_module

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_checkpoint(tmp_path_factory.mktemp("home")))


@pytest.fixture
def main(capsys: pytest.CaptureFixture[str]) -> Main:
    """Run a command: its exit status, what it prints, and what it says on stderr."""

    def call(*argv: str) -> tuple[int, str, str]:
        try:
            status = cli.main(list(argv))
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def nothing_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "generate_once", lambda *args: pytest.fail("generated"))


def refused(answer: tuple[int, str, str], command: str, *words: str) -> None:
    """Exit status 2 and one line that holds all `words`; `nothing_left_patched` sees to the rest."""
    status, out, err = answer
    assert (status, out) == (2, "")
    assert err.startswith(command)
    assert err.count("\n") == 1, err
    assert all(word in err for word in words), err


# --- wrong use


@pytest.mark.parametrize("command", [["compare"], ["run", "json.tool"]])
@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--ratio", "1.5", ["ratio=1.5", "0 to"]),
        ("--ratio", "-0.1", ["ratio=-0.1", "0 to"]),
        ("--ratio", "nan", ["ratio=nan", "between 0 and"]),
        ("--ratio", "half", ["--ratio", "'half'", "float"]),
        ("--min-rows", "1", ["min_rows=1", "at least 2"]),
        ("--boundary", "eagre", ["boundary='eagre'", "eager, async, none"]),
        ("--cpu-dtype", "float64", ["cpu_dtype='float64'", "auto, native, float32"]),
        ("--gate", "on", ["gate='on'", "auto, periodic, lock, off"]),
        ("--bounday", "eager", ["--bounday"]),
        ("--bound", "eager", ["--bound"]),
    ],
)
@pytest.mark.usefixtures("nothing_generated")
def test_a_wrong_setting_is_one_line(
    main: Main, command: list[str], option: str, value: str, words: list[str]
) -> None:
    refused(main(command[0], f"{option}={value}", *command[1:]), "fusionml", *words)


@pytest.mark.parametrize("command", [["compare"], ["doctor"], ["run", "json.tool"]])
@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("FUSIONML_BOUNDARY", "eagre", "eager, async, none"),
        ("FUSIONML_RATIO", "1.5", "0 to"),
        ("FUSIONML_RATIO", "half", "a number"),
        ("FUSIONML_ENABLED", "maybe", "0 or 1"),
    ],
)
@pytest.mark.usefixtures("nothing_generated")
def test_a_wrong_variable_is_one_line(
    main: Main, monkeypatch: pytest.MonkeyPatch, command: list[str], name: str, value: str, allowed: str
) -> None:
    monkeypatch.setenv(name, value)
    refused(main(*command), f"fusionml {command[0]}: {name}=", value, allowed)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt-tokens", "0"], ["--prompt-tokens 0", "less than 2"]),
        (["--prompt-tokens", "100", "1"], ["--prompt-tokens 1", "less than 2"]),
        (["--prompt-tokens", "many"], ["--prompt-tokens", "'many'", "int"]),
        (["--runs", "0"], ["--runs 0", "less than 1"]),
        (["--max-tokens", "0"], ["--max-tokens 0", "less than 1"]),
        (
            ["--prompt-tokens", "390", "--max-tokens", "11"],
            ["--prompt-tokens 390", "--max-tokens 11", "of 400"],
        ),
        (["--max-tokens", "399"], ["--max-tokens 399", "of 400"]),
        (["--json", "{tmp}/none/result.json"], ["--json {tmp}/none/result.json", "no such folder"]),
        (["--json", "{tmp}"], ["--json {tmp}", "is a folder"]),
        (["--prompt-file", "{tmp}/none.txt"], ["--prompt-file {tmp}/none.txt", "No such file"]),
        (["--prompt-file", "{tmp}/blank.txt"], ["--prompt-file {tmp}/blank.txt", "is empty"]),
        (["--prompt-file", "{tmp}/bytes.bin"], ["--prompt-file {tmp}/bytes.bin", "utf-8"]),
    ],
)
@pytest.mark.usefixtures("nothing_generated")
def test_a_wrong_argument_of_compare_is_one_line(
    main: Main, checkpoint: str, tmp_path: Path, options: list[str], words: list[str]
) -> None:
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "bytes.bin").write_bytes(b"\xff\xfe\xfd")
    filled = [option.format(tmp=tmp_path) for option in options]
    answer = main("compare", "--model", checkpoint, *filled)
    refused(answer, "fusionml compare: ", *(word.format(tmp=tmp_path) for word in words))


def test_the_longest_prompt_that_fits_is_run(
    main: Main, monkeypatch: pytest.MonkeyPatch, checkpoint: str
) -> None:
    seen = []

    def generate(model: Any, arm: str, ids: list[int], tokens: int) -> compare_module.Run:
        seen.append(len(ids))
        return compare_module.Run(arm, len(ids), 1.0, 1.0, 1, [1] * tokens, [1.0] * tokens)

    monkeypatch.setattr(compare_module, "generate_once", generate)
    status, *_ = main("compare", "--model", checkpoint, "--prompt-tokens", "390", "--max-tokens", "10")
    assert (status, max(seen)) == (0, 390)


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 77}, 77),
        ({"text_config": {"max_position_embeddings": 78}}, 78),
        ({"n_positions": 79}, 79),
        ({}, None),
    ],
)
def test_the_context_is_found_in_every_models_words(config: dict[str, Any], context: int | None) -> None:
    assert loading.context(config) == context


@pytest.mark.parametrize("path", ["/no/such/model", "./none", "~/no such model"])
@pytest.mark.usefixtures("nothing_generated")
def test_a_model_that_does_not_exist_is_one_line(main: Main, path: str) -> None:
    refused(main("compare", "--model", path), "fusionml compare: ", f"--model {path}", "no such folder")


@pytest.mark.usefixtures("nothing_generated")
def test_a_folder_that_holds_no_model_is_one_line(main: Main, tmp_path: Path) -> None:
    refused(main("compare", "--model", str(tmp_path)), "fusionml compare: ", f"--model {tmp_path}", "loaded")


@pytest.mark.usefixtures("nothing_generated")
def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_read(
    main: Main, monkeypatch: pytest.MonkeyPatch, checkpoint: str
) -> None:
    def evaluated(*arrays: Any) -> None:
        pytest.fail("read the weights")

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    monkeypatch.setattr(mx, "eval", evaluated)
    answer = main("compare", "--model", checkpoint)
    refused(answer, "fusionml compare: ", f"--model {checkpoint}", "needs", "GiB are free")


@pytest.mark.usefixtures("nothing_generated")
def test_a_home_that_cannot_be_written_is_one_line(
    main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSIONML_HOME", str(tmp_path / "file" / "home"))
    refused(main("compare"), "fusionml compare: ", f"FUSIONML_HOME {tmp_path}/file/home", "--model")


@pytest.mark.parametrize("argv", [[], ["comprae"], ["run"], ["run", "--ratio", "0.3"]])
def test_half_a_command_is_one_line(main: Main, argv: list[str]) -> None:
    refused(main(*argv), "fusionml")


def test_a_target_that_is_not_there_leaves_nothing_patched(main: Main) -> None:
    refused(main("run", "mlx_lm.genrate", "--model", "m"), "fusionml run: ", "'mlx_lm.genrate'", "module")


def test_the_exit_status_is_the_processs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fusionml", "compare", "--runs", "0"]
    root = str(Path(fusionml.__file__).parents[1])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": root}, cwd=tmp_path, capture_output=True)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"fusionml compare: --runs 0 is less than 1\n"


# --- a table that is none


TOOL = """
import mlx.core as mx, mlx.nn as nn, fusionml
from fusionml import machine, patching, sites
sites.LEARNING_SHARE = 1e9
machine.OtherLoad.share = lambda self: 0.0
model = nn.Sequential(nn.Linear(128, 128))
model.eval()
fusionml.patch(model)
for _ in range(100):
    mx.eval(model(mx.ones((300, 128))))
assert "learned" in str(fusionml.status()["sites"])
assert patching.session().saver.wait(60)
raise SystemExit(0)
"""
COMMANDS = {
    "show": (0, ["calibrate", "--show"]),
    "show as JSON": (0, ["calibrate", "--show", "--json"]),
    "doctor": (0, ["doctor"]),
    "clear": (2, ["calibrate", "--clear"]),
    "calibrate": (2, ["calibrate", "--force", "--rows", "64", "--budget", "1"]),
    "compare": (2, ["compare", "--calibrate", "--prompt-tokens", "64"]),
    "run": (0, ["run", "--gate", "auto", "tool.py"]),
}
SOMEBODYS = {
    "a model's config": b'{"model_type": "llama"}',
    "binary": bytes(range(256)),
    "empty": b"",
    "another schema": b'{"schema": 2, "sections": []}',
}


@pytest.mark.parametrize("raw", SOMEBODYS.values(), ids=list(SOMEBODYS))
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.usefixtures("nothing_generated")
def test_a_table_that_holds_something_else_stays_as_it_is(
    main: Main,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    checkpoint: str,
    tmp_path: Path,
    name: str,
    raw: bytes,
) -> None:
    monkeypatch.setattr(calibrate, "why_not", lambda: [])
    monkeypatch.setattr(sites, "LEARNING_SHARE", sites.LEARNING_SHARE)  # the tool changes both
    monkeypatch.setattr(machine.OtherLoad, "share", machine.OtherLoad.share)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(atexit, "register", lambda function: None)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.chdir(tmp_path)
    Path("tool.py").write_text(TOOL)
    folder = tmp_path / "somebodys"
    folder.mkdir()
    (folder / "config.json").write_bytes(raw)
    expected, (command, *options) = COMMANDS[name]
    model = ["--model", checkpoint] if command != "run" and "--show" not in options else []
    monkeypatch.setenv("FUSIONML_TABLE", str(folder / "config.json"))
    status, out, err = main(command, *model, *options)
    fusionml.unpatch()
    assert status == expected, err
    if expected:
        assert out == ""
        assert err.count("\n") == 1, err
        assert "cannot be written" in err
        assert "holds no ratio table" in err
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len([line for line in said if "ignored, and left as it is" in line]) == 1, said
    assert len(said) == (2 if command == "run" else 1), "run also could not keep what it learned"
    assert all(str(folder / "config.json") in line for line in said)
    left = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}
    assert left == {"config.json": raw}


@pytest.mark.parametrize("command", [["calibrate", "--show"], ["doctor"]])
def test_a_bad_table_in_our_own_place_is_set_aside(
    main: Main, caplog: pytest.LogCaptureFixture, tmp_path: Path, command: list[str]
) -> None:
    home = tmp_path / "fusionml"
    home.mkdir()
    for raw in (b"first", b"second"):
        (home / "ratios.json").write_bytes(raw)
        assert main(*command)[0] == 0
    assert (home / "ratios.json.bad").read_bytes() == b"first"
    assert (home / "ratios.json.bad1").read_bytes() == b"second"
    assert not (home / "ratios.json").exists()
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 2


def test_a_tilde_in_the_tables_path_is_the_home_folder(
    main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSIONML_TABLE", "~/t.json")
    for command in (["doctor", "--json"], ["calibrate", "--show", "--json"]):
        told = json.loads(main(*command)[1])["table"]
        assert (told if isinstance(told, str) else told["path"]) == str(tmp_path / "t.json")
    shown = json.loads(main("calibrate", "--show", "--json", "--table", "~/u.json")[1])
    assert shown["table"] == str(tmp_path / "u.json")


# --- no home folder


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user without a home folder, as in a container; returns the folder for temporary files."""

    def expanduser(self: Path) -> Path:
        if str(self).startswith("~"):
            raise RuntimeError("Could not determine home directory.")
        return self

    for name in ("HOME", "FUSIONML_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", expanduser)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"fusionml-{os.getuid()}"


@pytest.mark.parametrize("given", ["", "~/somewhere"])
def test_without_a_home_folder_the_commands_work(
    main: Main, monkeypatch: pytest.MonkeyPatch, homeless: Path, given: str
) -> None:
    monkeypatch.setenv("FUSIONML_HOME", given)
    monkeypatch.setattr(compare_module, "compare", lambda *args, **options: {"status": fusionml.status()})
    monkeypatch.setattr(compare_module, "render", lambda result, tokenizer: "a table")
    place = str(homeless / "ratios.json")
    assert json.loads(main("doctor", "--json")[1])["table"]["path"] == place
    assert f"{place}: 0 sites" in main("calibrate", "--show")[1]
    assert main("compare", "--prompt-tokens", "8")[:2] == (0, "a table\n")
    assert (homeless / "demo-1").is_dir()


@pytest.mark.usefixtures("homeless")
def test_without_a_home_folder_a_model_in_it_is_one_line(main: Main) -> None:
    for command in ("compare", "doctor", "calibrate"):
        refused(main(command, "--model", "~/m"), f"fusionml {command}: ", "--model ~/m", "no such folder")


@pytest.mark.usefixtures("homeless")
def test_without_a_home_folder_calls_split() -> None:
    model = nn.Sequential(nn.Linear(128, 128))
    model.eval()
    with fusionml.patched(min_rows=32):
        fusionml.patch(model)
        mx.eval(model(mx.ones((64, 128))))
        status = fusionml.status()
    fusionml.unpatch()
    assert (status["calls"], status["reasons"]) == ({"split": 1}, {})


# --- right use


def test_compare_prints_a_table_and_writes_every_sample_with_the_environment(
    main: Main, monkeypatch: pytest.MonkeyPatch, checkpoint: str, tmp_path: Path
) -> None:
    file, prompt = tmp_path / "result.json", tmp_path / "prompt.txt"
    prompt.write_text("Zebra crossing. ")
    monkeypatch.setattr(machine, "stamp", lambda: {"chip": "a chip"})
    generate, decoded = compare_module.generate_once, []

    def spy(model: Any, arm: str, ids: list[int], tokens: int) -> compare_module.Run:
        decoded.append(bytes(ids))
        return generate(model, arm, ids, tokens)

    monkeypatch.setattr(compare_module, "generate_once", spy)
    stock = nn.Linear.__call__
    given = [
        "--prompt-file",
        str(prompt),
        "--prompt-tokens",
        "280",
        "260",
        "--max-tokens",
        "3",
        "--ratio",
        "0.25",
    ]
    status, out, err = main("compare", "--model", checkpoint, *given, "--runs", "2", "--json", str(file))
    assert status == 0
    assert nn.Linear.__call__ is stock
    assert "stock against patched" in err
    result = json.loads(file.read_text())
    assert (result["model"], result["environment"]) == (Path(checkpoint).name, {"chip": "a chip"})
    assert result["arguments"]["ratio"] == 0.25
    arms = ["stock", "patched", "patched", "stock"]
    assert [(s["arm"], s["prompt_tokens"]) for s in result["samples"]] == [
        (arm, length) for length in (280, 260) for arm in arms
    ]
    assert all(len(s["tokens"]) == len(s["gaps"]) == 3 and s["ttft"] > 0 for s in result["samples"])
    assert out == compare_module.render(result, None) + "\n", "the file holds all that the table says"
    assert {site["ratio"] for site in result["status"]["sites"].values()} == {0.25}
    assert len(set(decoded)) == 7, "one to warm up, one of each length to learn from, one for each pair"


def test_without_a_model_compare_makes_one_and_keeps_it(
    main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []

    def compare(model: Any, tokenizer: Any, **options: Any) -> dict[str, Any]:
        seen.append(options)
        return {"samples": [], "summary": [], "status": fusionml.status()}

    monkeypatch.setattr(compare_module, "compare", compare)
    monkeypatch.setattr(compare_module, "render", lambda result, tokenizer: "a table")
    status, out, err = main("compare")
    assert (status, out) == (0, "a table\n")
    assert err.startswith("demo: ")
    assert seen[0]["lengths"] is None
    assert (seen[0]["context"], seen[0]["max_tokens"], seen[0]["pairs"]) == (8192, 64, 2)
    kept = {path.name for path in (tmp_path / "fusionml").iterdir()}
    assert "demo-1" in kept
    assert kept <= {"demo-1", "ratios.json", "ratios.json.lock"}


def test_compare_runs_both_arms_whatever_the_environment_turns_off(
    main: Main, monkeypatch: pytest.MonkeyPatch, checkpoint: str
) -> None:
    monkeypatch.setenv("FUSIONML_ENABLED", "0")
    splits, run_linear = [], split.run_linear
    monkeypatch.setattr(split, "run_linear", lambda *args: splits.append(args[3]) or run_linear(*args))
    status, *_ = main("compare", "--model", checkpoint, "--prompt-tokens", "260", "--max-tokens", "2")
    assert status == 0
    assert splits


def test_a_result_that_cannot_be_written_is_a_failure_told_in_one_line(
    main: Main, monkeypatch: pytest.MonkeyPatch, checkpoint: str, tmp_path: Path
) -> None:
    def full(path: Path, content: str) -> int:
        raise OSError(28, "No space left on device")

    run = compare_module.Run("stock", 30, 1.0, 1.0, 1, [1], [1.0])
    monkeypatch.setattr(compare_module, "generate_once", lambda *args: run)
    monkeypatch.setattr(Path, "write_text", full)
    file = str(tmp_path / "result.json")
    status, out, err = main("compare", "--model", checkpoint, "--prompt-tokens", "30", "--json", file)
    assert status == 1
    assert "TTFT" in out, "what was measured is shown all the same"
    assert err.endswith(f"fusionml compare: --json {file} cannot be written: No space left on device\n")


def test_a_failure_while_comparing_is_not_taken_for_wrong_use(
    main: Main, monkeypatch: pytest.MonkeyPatch, checkpoint: str
) -> None:
    def failing(*args: Any) -> None:
        raise RuntimeError("[metal] out of memory")

    monkeypatch.setattr(compare_module, "generate_once", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        main("compare", "--model", checkpoint, "--prompt-tokens", "30")


def test_version(main: Main) -> None:
    assert main("--version")[:2] == (0, fusionml.__version__ + "\n")
