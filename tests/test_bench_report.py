"""The report: whatever lies in a folder of results becomes a page, and nothing in it can break the page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import reports
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import report, report_paper, schema
from benchmarks.report_boundaries import BOUNDARIES
from benchmarks.report_read import read

ROOT = Path(__file__).parent.parent
PAPER = report_paper.load()
VOID = {"meta", "br", "hr", "img", "link", "input"}
HOSTILE = "<script>alert(1)</script> | `x` </td>\n# \"quoted\" & 'single' \u202e\ud800\x00 [a](javascript:b)"


class Page(HTMLParser):
    """The page's text, and proof that every element that is opened is closed in its order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.rows: list[int] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        assert not any(name.startswith("on") or name == "src" for name, _ in attrs)
        assert all(value.startswith("#") for name, value in attrs if name == "href")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += " " + data


def made(folder: Path, sound: bool = True) -> tuple[Page, str]:
    """Both pages of a folder, checked for what no page may have; `sound` results make no odd words either."""
    html, markdown = report.pages(read(folder), PAPER)
    html.encode("utf-8")
    markdown.encode("utf-8")
    page = Page(html)
    assert "script" not in page.tags
    assert not re.search(r"(src|href)=[\"']?(http|//)|url\(|@import", html)
    assert not sound or not re.search(
        r"\b(nan|inf|None)\b", re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)
    )
    _whole_tables(markdown)
    return page, markdown


def _whole_tables(markdown: str) -> None:
    """Every row of a table has as many cells as its head."""
    width = 0
    for line in markdown.split("\n"):
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not cells or not width or cells == width, line
        width = cells


# --- what there is, is shown


def test_the_made_up_results_are_results() -> None:
    """What the tests below are made of has the form that every run writes."""
    for experiment, cells in reports.each().items():
        assert schema.problems(reports.run(experiment, cells)) == []
    assert schema.problems(reports.run("block", [reports.failed("one", "it crashed")], reports.APPLE)) == []


@pytest.mark.parametrize("experiment", reports.each())
def test_each_experiment_alone(experiment: str, tmp_path: Path) -> None:
    cells = reports.each()[experiment]
    reports.write(tmp_path, reports.run(experiment, cells))
    page, markdown = made(tmp_path)
    for cell in cells:
        for ratio in cell["ratios"].values():
            shown = f"{ratio['value']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]"
            assert shown in page.text
        assert cell["name"] in page.text
        assert cell["name"] in markdown
    assert "Made-up Chip, 2 cores, MLX CPU" in page.text
    assert f"{len(cells)} of {len(cells)} cells" in page.text


def test_all_of_them_together_and_the_same_every_time(tmp_path: Path) -> None:
    for experiment, cells in reports.each().items():
        reports.write(tmp_path, reports.run(experiment, cells))
    page, _ = made(tmp_path)
    assert page.tags.count("svg") >= len(reports.each())
    assert report.pages(read(tmp_path), PAPER) == report.pages(read(tmp_path), PAPER)
    assert "1.84x" in page.text  # the pair model's prediction
    assert "1.91" in page.text  # the overlap


def test_an_empty_folder_is_a_page_of_what_is_to_be_measured(tmp_path: Path) -> None:
    page, markdown = made(tmp_path)
    assert page.text.count("not yet measured") > 50
    assert "Not yet measured on any machine." in markdown
    assert "No run yet." in page.text


def test_every_figure_of_the_paper_names_a_section_and_is_on_the_page(tmp_path: Path) -> None:
    page, markdown = made(tmp_path)
    assert len(PAPER.figures) > 50
    for figure in PAPER.figures:
        assert re.match(r"(Section \d|Figure \d)", figure.section), figure.id
        assert figure.says
        assert set(figure.machines) <= {machine.name for machine in PAPER.machines}
        row = f"| {figure.what} |"
        shown = [line for line in markdown.split("\n") if line.startswith(row.replace("*", "\\*"))]
        assert any(f"| {figure.shown} | {figure.section} |" in line for line in shown), figure.id
        assert figure.what in page.text


def test_the_papers_figures_are_as_its_text_writes_them() -> None:
    for figure in PAPER.figures:
        numbers = re.findall(r"\d+\.?\d*", figure.shown)
        if figure.unit in ("x", "ms", "us/row", "tok/s") and "printed on the bars" not in figure.what:
            assert numbers, figure.id
            assert all(number in figure.says for number in numbers), figure.id


def test_the_papers_value_stands_beside_the_measured_one(tmp_path: Path) -> None:
    reports.write(
        tmp_path, reports.run("mechanism", reports.mechanism()), reports.run("block", reports.block())
    )
    _, markdown = made(tmp_path)
    assert "| float32 | eager | 15.4 ms | 1.33x [1.33, 1.33] | 1.34x | 1.2e-03 | no |" in markdown
    assert "| float32 | lazy | 31.3 ms | 0.65x [0.65, 0.65] | 0.66x |" in markdown
    llama = next(line for line in markdown.split("\n") if line.startswith("| llama-3-8b, 512 rows | fixed"))
    gpt2 = next(line for line in markdown.split("\n") if line.startswith("| gpt2-xl, 512 rows | fixed"))
    qwen = next(line for line in markdown.split("\n") if line.startswith("| qwen2.5-7b, 512 rows | fixed"))
    assert "1.15x to 1.38x" in llama
    assert "1.02x to 1.18x" in gpt2
    assert "1.15x" not in qwen + gpt2


def test_an_apple_machine_is_not_yet_measured_until_it_is(tmp_path: Path) -> None:
    _, before = made(tmp_path)
    row = "| Apple M4, 24 GB | any | not yet measured |"
    assert before.count(row) == 3
    reports.write(tmp_path, reports.run("block", reports.block(), reports.APPLE))
    _, after = made(tmp_path)
    assert after.count(row) == 2
    assert "| Apple M4, 24 GB, MLX Metal | llama-3-8b" in after
    assert "| Apple M1, 8 GB | any | not yet measured |" in after


def test_other_math_libraries_are_other_machines(tmp_path: Path) -> None:
    other = reports.STAMP | {"environment": {"LD_PRELOAD": "/usr/lib/libopenblas.so.0"}}
    reports.write(
        tmp_path, reports.run("block", reports.block()), reports.run("block", reports.block(), other)
    )
    page, _ = made(tmp_path)
    assert "MLX CPU, LD_PRELOAD=libopenblas.so.0" in page.text
    assert "/usr/lib" not in page.text


def test_scaled_sizes_stand_at_the_papers_lengths(tmp_path: Path) -> None:
    """Rows that were divided stand at the rows that they are for, beside the paper's."""
    cells = [
        reports.cell(
            f"{rows} rows, {blocks} blocks",
            {
                "geometry": "Llama-3-8B",
                "rows": rows // 8,
                "paper_rows": rows,
                "blocks": blocks,
                "hidden": 512,
            },
            {"stock": 1.0, "split": 0.8},
        )
        for blocks in (1, 8)
        for rows in (2048, 4096)
    ]
    reports.write(tmp_path, reports.run("depth", cells))
    _, markdown = made(tmp_path)
    assert "| machine | arm | the paper's rows 2048 | the paper's rows 4096 | paper, Apple |" in markdown
    assert (
        "| Llama-3-8B, split (blocks 8) | 1.25x [1.25, 1.25] | 1.25x [1.25, 1.25] | 1.12x; 1.24x |"
        in markdown
    )
    assert "| 4096 rows, 1 blocks | split | 808 ms | 1.25x [1.25, 1.25] | 1.25x |" in markdown


def test_an_arm_that_does_another_work_has_no_speedup(tmp_path: Path) -> None:
    found = reports.cell("product", {}, {"stock": 1.0, "split": 0.5, "CPU part alone": 0.1, "lazy": 2.0})
    found["errors"]["CPU part alone"] = None
    reports.write(tmp_path, reports.run("cholesky", [found]))
    page, markdown = made(tmp_path)
    assert "| product | CPU part alone | 101 ms | 10.00x [10.00, 10.00] (other work) |" in markdown
    assert "MLX CPU: product split 2.00x, product lazy 0.50x |" in markdown
    assert "CPU part alone 10.00x" not in page.text


def test_a_figure_of_a_cell_stands_beside_the_papers(tmp_path: Path) -> None:
    cells = [reports.cell("5 minutes", {}, {"stock": 1.0, "split": 0.6}, {"burst speedup": 1.66})]
    reports.write(tmp_path, reports.run("sustained", cells))
    _, before = made(tmp_path)
    assert "| 5 minutes | burst speedup | 1.66x | 1.79x |" in before
    assert "5 minutes: burst speedup 1.66x | On a machine without a fan" in before
    row = "| Raw matmuls on the passively cooled machine, burst | M1 | 1.79x | Section 6 |"
    assert f"{row} not yet measured |" in before
    reports.write(tmp_path, reports.run("sustained", cells, reports.APPLE | {"chip": "Apple M1"}))
    assert f"{row} 1.66x |" in made(tmp_path)[1]


def test_every_boundary_has_the_papers_figure_the_measured_one_and_a_sentence(tmp_path: Path) -> None:
    every = reports.each()
    reports.write(tmp_path, *(reports.run(b.experiment, every[b.experiment]) for b in BOUNDARIES))
    _, markdown = made(tmp_path)
    for boundary in BOUNDARIES:
        (row,) = (line for line in markdown.split("\n") if line.endswith(f"| {boundary.means} |"))
        title, paper, measured = row.strip("| ").split(" | ")[:3]
        assert title == boundary.title
        assert paper
        assert measured.startswith("Made-up Chip, 2 cores, MLX CPU: ")
    assert re.search(r"\| Decoding \| cannot help \| .*0.50x to 0.71x \(7 of 7 cells\)", markdown)


def test_decoding_ends_where_its_rows_end(tmp_path: Path) -> None:
    cells = [
        reports.cell(f"{rows} rows", {"rows": rows}, {"stock": 1.0, "split": split})
        for rows, split in ((1, 2.0), (64, 1.0), (256, 0.5))
    ]
    reports.write(tmp_path, reports.run("decode", cells))
    assert "1 rows split 0.50x, 64 rows split 1.00x |" in made(tmp_path)[1]


def test_predictions_stand_beside_what_was_measured(tmp_path: Path) -> None:
    cells = [
        reports.cell("512 rows", {}, {"stock": 1.0, "split": 0.8, "blocked": 0.1}, {"pair": reports.PAIR})
    ]
    reports.write(tmp_path, reports.run("cholesky", cells))
    _, markdown = made(tmp_path)
    assert (
        "| cholesky 512 rows | 1.84x | 1.25x [1.25, 1.25] (split) | 50 % | 20 | 20 | 1.1 | 90 |" in markdown
    )


def test_a_trace_is_drawn_by_policy_and_its_decisions_are_told(tmp_path: Path) -> None:
    trace = [
        {"policy": policy, "arm": arm, "seconds": 0.01, "decisions": ["call 7: dropped split"] * (call == 7)}
        for call in range(30)
        for policy, arm in (("auto", "split"), ("lock", "eager"), ("stock again", "eager"))
    ]
    reports.write(
        tmp_path, reports.run("gate", [reports.cell("one", {}, {"stock": 1.0, "auto": 0.9}, trace=trace)])
    )
    page, markdown = made(tmp_path)
    assert "one: auto" in page.text
    assert "one: lock" in page.text
    assert "one: stock again" not in page.text
    assert "- auto: call 7: dropped split" in markdown
    assert "| auto | split | 30 | 10 ms | 10 ms | 10 ms |" in markdown


def test_the_timeline_has_a_bar_for_each_unit(tmp_path: Path) -> None:
    reports.write(tmp_path, reports.run("mechanism", reports.mechanism()))
    html, _ = report.pages(read(tmp_path), PAPER)
    (picture,) = re.findall(r'<svg[^>]*aria-label="Made-up Chip, 2 cores, MLX CPU: float32">.*?</svg>', html)[
        :1
    ]
    bars = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="12.0" class="bar"/>', picture)
    assert len(bars) == 7, "one for each arm, two for the one whose units were told apart"
    widths = sorted(float(width) for _, width in bars)
    assert widths[-1] / widths[0] == pytest.approx(31.31 / 12.6, rel=0.01)


# --- which of several runs


def test_the_newest_full_run_counts_and_a_quick_one_only_without_it(tmp_path: Path) -> None:
    def told(when: str, seconds: float, quick: bool) -> dict[str, Any]:
        cells = [reports.cell("one", {"rows": 8}, {"stock": 1.0, "split": seconds})]
        options = {"quick": quick, "scale": 1}
        return reports.run("cholesky", cells, when=when, options=options)

    def shown() -> str:
        return next(line for line in made(tmp_path)[1].split("\n") if line.startswith("| one | split |"))

    reports.write(tmp_path, told("2026-11-03T10:00:00+00:00", 0.25, True))
    assert "4.00x" in shown()
    reports.write(tmp_path, told("2026-11-01T10:00:00+00:00", 0.5, False))
    assert "2.00x" in shown()
    reports.write(tmp_path, told("2026-11-02T10:00:00+00:00", 0.2, False))
    assert "5.00x" in shown()


def test_a_cell_that_failed_later_does_not_hide_the_one_that_was_measured(tmp_path: Path) -> None:
    good = reports.run("cholesky", reports.simple("cholesky"), when="2026-11-01T10:00:00+00:00")
    bad = [reports.failed("cholesky", "it crashed", {"rows": 256})]
    reports.write(tmp_path, good, reports.run("cholesky", bad))
    page, markdown = made(tmp_path)
    assert "| cholesky | split |" in markdown
    assert "cholesky: it crashed" in page.text


# --- what speaks against the figures


def test_a_killed_run_says_what_is_missing(tmp_path: Path) -> None:
    cells = reports.depth()
    planned = [*(cell["name"] for cell in cells), "32 blocks, 512 rows", "32 blocks, 1024 rows"]
    ended = {"start": reports.STAMP, "end": None}
    (file,) = reports.write(tmp_path, reports.run("depth", cells, planned=planned, environment=ended))
    page, markdown = made(tmp_path)
    assert f"{file.name}: 32 blocks, 512 rows, 32 blocks, 1024 rows" in page.text
    assert "6 of 8 cells (ended early)" in markdown


def test_a_run_killed_between_the_processes_of_its_cells_says_so(tmp_path: Path) -> None:
    whole, cut, once = (reports.simple("cholesky")[0] | {"name": name} for name in ("whole", "cut", "once"))
    part = {"samples": 2, "figures": {}, "seconds": 1.0, "environment": whole["environment"]}
    whole["processes"], cut["processes"] = [part] * 3, [part] * 2
    given = reports.run("cholesky", [whole, cut, once])
    given["options"]["processes"] = 3
    assert schema.problems(given) == []
    (file,) = reports.write(tmp_path, given)
    page, markdown = made(tmp_path)
    assert f"- made-up-chip-2-cores-cpu/{file.name}: of 3 processes: cut (2), once (1)" in markdown
    assert "Cut short" in page.text
    assert "3 processes a cell" in markdown


def test_a_run_killed_before_its_first_cell(tmp_path: Path) -> None:
    ended = {"start": reports.STAMP, "end": None}
    reports.write(tmp_path, reports.run("block", [], planned=["a", "b"], environment=ended))
    page, _ = made(tmp_path)
    assert "0 of 2 cells (ended early)" in page.text
    assert "block-2026-11-30.json: a, b" in page.text


def test_failed_cells_untimed_arms_forced_runs_and_unstable_samples_are_named(tmp_path: Path) -> None:
    good = reports.simple("training")[0]
    good["arms"]["wrong"] = {"samples": [], "median": None, "warnings": ["not timed: it differs by 0.3"]}
    good["errors"]["wrong"] = 0.3
    good["arms"]["split"]["warnings"] = ["the standard deviation is 14% of the mean"]
    cells = [good, reports.failed("other", "its process was ended by SIGKILL")]
    forced = reports.run("training", cells, forced=["on battery (63 %)"], warnings=["the machine got hot"])
    reports.write(tmp_path, forced)
    page, markdown = made(tmp_path)
    assert "| other | failed | - | its process was ended by SIGKILL |" in markdown
    assert "| training | wrong | - | not timed | - | 3.0e-01 | not timed: it differs by 0.3 |" in markdown
    for said in ("other: its process was ended by SIGKILL", "on battery (63 %)", "the machine got hot"):
        assert said in page.text
    assert "- made-up-chip-2-cores-cpu/training-2026-11-30.json: on battery (63 %)" in markdown
    assert "split: the standard deviation is 14% of the mean" in page.text
    assert "1 of 2 cells (forced)" in page.text


def test_where_nothing_is_wrong_it_says_so(tmp_path: Path) -> None:
    reports.write(tmp_path, reports.run("cholesky", reports.simple("cholesky")))
    assert "Nothing: no cell is missing or failed" in made(tmp_path)[0].text


# --- whatever comes


def test_files_of_another_shape_are_listed_with_the_speedups_in_them(tmp_path: Path) -> None:
    ratio = {"value": 1.25, "low": 1.2, "high": 1.3, "smallest": 1.2, "largest": 1.3, "pairs": 9}
    (tmp_path / "old.json").write_text(json.dumps({"summary": [{"ttft_ratio": ratio}]}))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "later.json").write_text(json.dumps(reports.run("block", []) | {"version": 2}))
    (tmp_path / ".half-written.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    page, markdown = made(tmp_path)
    assert "| old.json | another shape | summary 1 ttft ratio 1.25x [1.20, 1.30] |" in markdown
    for name in ("broken.json", "binary.json", "deep.json"):
        assert re.search(rf"\| {name} \| unreadable: \w+ \|", markdown)
    assert "another version of the format than 1" in page.text
    assert "half-written" not in page.text


def test_what_is_no_number_is_not_known(tmp_path: Path) -> None:
    """Python reads NaN and infinities from a JSON, though no run writes them."""
    found = reports.cell("one", {"rows": 8}, {"stock": 1.0, "split": 0.5}, {"overlap": float("nan")})
    found["ratios"]["odd"] = {"value": float("nan"), "low": 1.0, "high": 2.0, "pairs": 3}
    found["ratios"]["wide"] = {"value": 1.5, "low": float("-inf"), "high": float("inf"), "pairs": 3}
    found["errors"] = {}
    reports.write(tmp_path, reports.run("mechanism", [found]))
    page, markdown = made(tmp_path)
    assert "2.00x" in page.text
    assert "| one | wide | - | 1.50x (no interval) |" in markdown
    assert "| one | odd |" not in markdown


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    def poison(value: Any) -> Any:
        if isinstance(value, dict):
            return {f"{key}": poison(item) for key, item in value.items()} | {HOSTILE: HOSTILE}
        if isinstance(value, list):
            return [poison(item) for item in value]
        return HOSTILE if isinstance(value, str) else value

    for experiment, cells in reports.each().items():
        found = poison(reports.run(experiment, cells, forced=["x"], warnings=["y"]))
        kept = {"experiment": experiment, "when": "2026-11-30", "version": 1}
        for cell in found["cells"]:
            cell["status"] = "done"
            cell["arms"] = {HOSTILE: reports.arm(1.0, warnings=[HOSTILE])}
            cell["ratios"] = {HOSTILE: {"value": 1.5, "low": 1.4, "high": 1.6, "pairs": 5}}
        reports.write(tmp_path, found | kept)
    page, markdown = made(tmp_path)
    assert "<script>alert(1)</script>" in page.text
    assert "<script" not in markdown
    assert "\u202e" not in page.text + markdown
    assert "\x00" not in page.text + markdown


KEYS = st.sampled_from(
    [
        *(
            "name",
            "parameters",
            "status",
            "arms",
            "ratios",
            "aa",
            "errors",
            "figures",
            "trace",
            "value",
            "low",
        ),
        *(
            "high",
            "pairs",
            "median",
            "samples",
            "warnings",
            "split",
            "stock",
            "rows",
            "overlap",
            "arm",
            "unit",
        ),
        *("start", "end", "seconds", "predicted_speedup", "environment", "chip", "backend", "load_average"),
    ]
)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(KEYS, inside, max_size=5),
    max_leaves=12,
)


SOUND = {name: json.dumps(reports.run(name, cells[:2])) for name, cells in reports.each().items()}


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(data=st.data())
def test_no_value_anywhere_stops_the_report(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One part of a sound run after another is replaced by anything that JSON, or Python's reader, allows."""
    folder = tmp_path_factory.mktemp("results")
    name = data.draw(st.sampled_from(sorted(SOUND)))
    found = json.loads(SOUND[name])
    for _ in range(data.draw(st.integers(1, 4))):
        place: Any = found
        while data.draw(st.booleans()) and isinstance(place, (dict, list)) and place:
            keys = sorted(place) if isinstance(place, dict) else range(len(place))
            inner = place[data.draw(st.sampled_from(keys))]
            if not isinstance(inner, (dict, list)) or not inner:
                break
            place = inner
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        place[data.draw(st.sampled_from(keys))] = data.draw(ANY)
    (folder / "run.json").write_text(json.dumps(found))
    made(folder, sound=False)


# --- the command


def test_the_command_writes_both_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports.write(tmp_path, reports.run("block", reports.block()))
    assert report.main(["--results", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "README.md").is_file()
    assert report.main(["--results", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text() == (tmp_path / "report.html").read_text()
    assert capsys.readouterr().out.split()[-1] == str(tmp_path / "page.html")


def test_a_folder_that_is_not_there_is_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        report.main(["--results", str(tmp_path / "nowhere")])
    assert stop.value.code == 2
    assert "nowhere is not a folder" in capsys.readouterr().err


def test_the_committed_page_is_what_the_committed_results_give() -> None:
    """If this fails, run `python -m benchmarks report` and commit `results/README.md`."""
    _, markdown = report.pages(read(ROOT / "results"), PAPER)
    assert (ROOT / "results" / "README.md").read_text(encoding="utf-8") == markdown


# --- a real browser


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser_nothing_is_cut_off(width: int, scheme: str, tmp_path: Path) -> None:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs the package playwright and a Chromium"
    )
    for experiment, cells in reports.each().items():
        reports.write(tmp_path, reports.run(experiment, cells))
    report.main(["--results", str(tmp_path)])
    with playwright.sync_playwright() as driver:
        browser = launch(driver)
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((tmp_path / "report.html").as_uri())
        sizes = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        outside = page.evaluate(OUTSIDE)
        browser.close()
    assert len(asked) == 1, "a page that needs nothing but itself"
    assert sizes[0] <= sizes[1]
    assert outside == []


OUTSIDE = """() => [...document.querySelectorAll('svg text')].filter(text => {
  const all = text.ownerSVGElement.getBoundingClientRect(), box = text.getBoundingClientRect();
  return box.left < all.left - 1 || box.right > all.right + 1 || box.bottom > all.bottom + 1;
}).map(text => text.textContent)"""
"""The words of pictures that do not lie within their picture."""


def launch(driver: Any) -> Any:
    """Playwright's own Chromium, or the system's."""
    errors = []
    for path in (None, "/usr/bin/chromium", "/usr/bin/google-chrome"):
        try:
            return driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except Exception as error:
            errors.append(str(error).splitlines()[0])
    pytest.skip(f"needs a Chromium: {errors[0]}")
