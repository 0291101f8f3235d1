"""The HTML report: one file, every figure, nothing from elsewhere."""

import json
import re
from html.parser import HTMLParser

import pytest
from replay_help import random_chains, trace_of
from typer.testing import CliRunner

import quire
from quire.cli.app import app
from quire.core.policies import policy_names
from quire_sim.report.figures import colour_of

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

FIGURES = ("curves", "misses", "over-time", "distances", "reuse-times")
HOSTILE = "<script>alert(1)</script> & \"quotes' {{ 7*7 }}.jsonl"
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """A page read strictly: every element is closed where it must be."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.tags, self.code = [], [], [], []
        self.labels = set()
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        self.labels.add(values.get("aria-labelledby"))
        if tag == "code":
            self.code.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if "code" in self.open:
            self.code[-1] += data


def trace_file(folder, name="trace.jsonl"):
    path = folder / name
    rows = [
        {
            "timestamp": 900 * request.row,
            "input_length": request.prompt_tokens,
            "output_length": 8,
            "hash_ids": request.blocks.tolist(),
        }
        for request in trace_of(random_chains(5, num_requests=90), tail=0, block_size=16)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def report(folder, *words, name="trace.jsonl"):
    path, out = trace_file(folder, name), folder / "report.html"
    words = ["replay", str(path), "--block-size", "16", "--jobs", "1", "--report", str(out), *words]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return out.read_text("utf-8")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    words = ["--capacity", "10,30%", "--policies", "lru,fifo,optimum", "--model", "llama-3.1-8b"]
    return report(tmp_path_factory.mktemp("report"), *words)


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_the_page_has_every_figure_for_both_widths_and_every_table(page):
    assert page.tags.count("svg") == 2 * len(FIGURES)
    assert page.tags.count("table") == 2
    for name in (*FIGURES, "rows", "prefixes"):
        assert f"{name}-title" in page.ids
        assert f"{name}-title" in page.labels


def test_the_ids_of_a_report_are_unique(page):
    assert len(page.ids) == len(set(page.ids))


def test_a_report_loads_no_outside_resource(text, page):
    assert "http" not in text
    assert not re.findall(r"(?:src|@import|url\((?!#))\s*=?", text)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)


def test_figures_take_their_colours_from_the_page_for_light_and_dark(text):
    assert "prefers-color-scheme: dark" in text
    assert not re.findall(r"#0103?0\d+", text)
    assert text.count("var(--series-0)") > 5


@pytest.mark.ci
def test_under_every_figure_stands_the_command_that_makes_it_again(
    text, page, tmp_path, monkeypatch
):
    assert len(page.code) == len(FIGURES) + 2
    for line in page.code:
        assert line.startswith("quire replay ")
        assert "--policies lru,fifo,optimum --block-size 16 --model llama-3.1-8b" in line
        assert "--report" in line
    trace_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = [*page.code[0].split()[1:], "--jobs", "1"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert (tmp_path / "report.html").read_text("utf-8") == text


@pytest.mark.ci
def test_no_folder_of_this_machine_is_in_the_page(tmp_path):
    (tmp_path / "model").mkdir()
    config = tmp_path / "model" / "config.json"
    config.write_text((quire.demo_model() / "config.json").read_text())
    text = report(tmp_path, "--capacity", "10", "--model", str(config), "--gpu", "cpu")
    assert str(tmp_path) not in text
    assert str(tmp_path.parent) not in text
    assert "quire replay trace.jsonl " in text


def test_a_colour_means_one_thing(text):
    """Policies, what became of tokens, and what is of no policy have colours of their own."""
    meant = {}
    for colour, label in re.findall(
        r'<li><i style="background: var\((--[\w-]+)\)"></i>([^<]+)', text
    ):
        assert meant.setdefault(colour, label) == label
    assert meant["--series-0"] == "lru"
    assert meant["--fate-0"] == "found"
    for policies in (["fifo", "lru", "lfu"], ["lru"], ["fifo"], ["optimum", "lfu"], policy_names()):
        used = [colour_of(name, policies) for name in dict.fromkeys([*policies, "lru", "optimum"])]
        assert len(used) == len(set(used))
    for figure in ("distances", "reuse-times"):
        drawn = text.partition(f'class="wide" role="img" aria-labelledby="{figure}-title"')[2]
        drawn = drawn.partition("</svg>")[0]
        assert "var(--plain)" in drawn
        assert "var(--series-" not in drawn


def test_a_phone_shows_every_column_of_every_table(text):
    assert "overflow-x" not in text
    assert not re.findall(r"\.(?:bar|best|left)[^{]*{ display: none", text)
    cells = re.findall(r"<td[^>]*>", text)
    assert all("data-head" in cell or 'class="bar"' in cell for cell in cells)


def test_the_rows_are_those_of_the_command_line(page, tmp_path):
    words = ["replay", str(trace_file(tmp_path)), "--block-size", "16", "--capacity", "10,30%"]
    words += ["--policies", "lru,fifo,optimum", "--jobs", "1", "--json"]
    for row in json.loads(CliRunner().invoke(app, words).stdout)["rows"]:
        assert f"{100 * row['token_hit']:.2f}\N{NO-BREAK SPACE}%" in page.text
        assert row["evictions"] is None or f"{row['evictions']:,}" in page.text


@pytest.mark.ci
def test_a_hostile_name_of_a_trace_is_text_and_nothing_else(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    text = report(folder, "--capacity", "10", name=HOSTILE.replace("/", "\N{FRACTION SLASH}"))
    page = Page(text)
    assert "script" not in page.tags
    assert "alert(1)" in page.text
    assert "{{ 7*7 }}" in page.text
    assert "<script" not in text


@pytest.mark.ci
@pytest.mark.parametrize(
    "words",
    [
        ["--policies", "optimum", "--capacity", "1"],
        ["--policies", "fifo", "--capacity", "1000000", "--concurrent", "--hints", "last-use"],
    ],
)
def test_any_choice_of_rows_makes_a_page(tmp_path, words):
    assert Page(report(tmp_path, *words)).tags.count("svg") == 2 * len(FIGURES)


@pytest.mark.ci
def test_a_trace_in_which_nothing_comes_back_makes_a_page(tmp_path):
    path, out = tmp_path / "one.jsonl", tmp_path / "one.html"
    path.write_text(
        '{"timestamp": 0, "input_length": 32, "output_length": 1, "hash_ids": [0, 1]}\n'
    )
    words = ["replay", str(path), "--block-size", "16", "--capacity", "1", "--report", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "Nothing was found." in Page(out.read_text("utf-8")).text


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
    words = [
        "replay",
        str(trace_file(tmp_path)),
        "--block-size",
        "16",
        "--capacity",
        "9",
        "--report",
    ]
    done = CliRunner().invoke(app, [*words, "/nowhere/report.html"])
    assert done.exit_code == 2
    assert "cannot write '/nowhere/report.html'" in done.stderr
