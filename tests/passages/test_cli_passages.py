"""`quire bench passages` and `quire passages check`: what they say, and what they refuse."""

import gzip
import json

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from cli_help import refusal, run, shown, told
from quire import demo_model
from quire.errors import ConfigError
from quire_passages import Passages
from quire_passages.bench import rows as passage_rows
from quire_passages.bench.methods import FULL, METHODS, QUICK, family
from quire_passages.bench.picture import COLOURS, page, picture
from quire_passages.bench.prose import is_held_out, joined, read_library
from quire_passages.bench.texts import read_texts
from quire_passages.hf import PassageModel
from quire_passages.hf.beside import FullAnswer
from quire_passages.settings import TEXT_PROMPTS
from quire_passages.verdict import Verdict

TEXT = " ".join(
    f"Item {n} of the list is called {['ab', 'cd', 'ef', 'gh'][n % 4]}." for n in range(300)
)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(passage_rows, "QUICK_CASES", 2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    path = tmp_path_factory.mktemp("notes") / "notes.txt"
    path.write_text(TEXT, "utf-8")
    return path


@pytest.mark.ci
def test_each_method_has_a_row_of_a_workload(tmp_path):
    report = tmp_path / "passages.svg"
    words = ("bench", "passages", "--quick", "--workloads", "facts", "--report", report)
    rows = told(*words)
    assert [row["name"] for row in rows] == [FULL, *QUICK]
    assert {row["workload"] for row in rows} == {"facts"}
    assert all(0 <= row["agree_rate"] <= 1 and row["ms"] > 0 for row in rows)
    assert {"local_rate", "update_rate", "boundary_rate"} <= set(rows[0])
    assert report.read_text("utf-8").startswith("<svg")


@pytest.mark.ci
def test_the_table_is_of_the_rows_asked_for():
    text = shown("bench", "passages", "--quick", "--workloads", "facts", "--rows", "moved")
    assert "moved" in text
    assert "boundary" in text
    assert "epic" not in text


def test_names_that_do_not_exist_are_refused_with_those_that_do():
    assert "epic_8" in refusal("bench", "passages", "--rows", "epic_9")
    assert "tiny-new" in refusal("bench", "passages", "--workloads", "poems")
    assert ".html or .svg" in refusal("bench", "passages", "--report", "passages.pdf")


def test_a_page_has_the_picture_and_every_figure():
    row = {
        "workload": "facts",
        "name": "epic_8",
        "agree_rate": 0.917,
        "kl": 0.0123,
        "rows_rate": 0.25,
    }
    drawn = page(
        [
            row,
            row | {"name": "moved", "rows_rate": 0.0},
            {"workload": "time", "name": "moved", "ms": 4.5},
        ]
    )
    for said in ("<svg", "91.7%", "0.0123", "25.0%", "4.50", "<h2>time</h2>"):
        assert said in drawn
    assert picture([row]).count("<circle") == 1 + len(COLOURS), "a point, and the legend"


def test_families_are_names_without_budgets():
    found = {family(name) for name in METHODS}
    assert {
        "naive",
        "moved",
        "epic",
        "random",
        "kv_deviation",
        "cache_craft",
        "cache_craft_published",
    } <= found


def test_a_model_is_checked_on_texts_with_bounds_and_progress(notes):
    words = (
        "passages",
        "check",
        "quire-tiny",
        "--texts",
        notes,
        "--prompts",
        2,
        "--passage-tokens",
        40,
    )
    done = run(*words, "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 1  # two prompts are no verdict
    assert found["relocatable"]
    assert found["prompts"] == 2
    assert found["chosen"] is None
    assert "2 prompts so far" in found["refusal"]
    first = found["estimates"][0]
    assert first["policy"] == "none"
    assert first["agreement_low"] < first["agreement"] <= first["agreement_high"] <= 1


def test_a_check_that_is_interrupted_tells_what_it_has_found(notes, monkeypatch):
    add = Verdict.add

    def last(self, outcomes):
        add(self, outcomes)
        monkeypatch.setattr(FullAnswer, "beside", ending)

    def ending(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Verdict, "add", last)
    done = run("passages", "check", "quire-tiny", "--texts", notes, "--passage-tokens", 40)
    assert done.exit_code == 1
    assert "1 prompts so far" in done.stdout
    assert "none" in done.stdout


def test_a_model_that_the_gate_refuses_is_told_no_with_the_layer(tmp_path, notes):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=264, n_positions=512, n_embd=32, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(demo_model()).save_pretrained(tmp_path)
    done = run("passages", "check", tmp_path, "--texts", notes, "--json")
    assert done.exit_code == 1
    assert "layer 0" in done.stdout
    assert '"relocatable": false' in done.stdout


def test_passages_that_are_too_short_are_refused_with_what_is_needed(tmp_path):
    (tmp_path / "short.txt").write_text("A short text.", "utf-8")
    line = refusal("passages", "check", "quire-tiny", "--texts", tmp_path / "short.txt")
    assert "the longest text has 13 characters" in line
    assert "more than 1,600" in line


@pytest.mark.ci
def test_held_out_text_is_read_alone_and_no_paragraph_twice():
    library = read_library(is_held_out)
    assert library
    assert all(is_held_out(name) for name in library)
    paragraphs = [part for each in library.values() for entry in each for part in entry.paragraphs]
    assert len(paragraphs) == len(set(paragraphs))
    assert len(joined(library)) == len(library)


def on_tiny(notes, *more):
    """Return the words that measure policies on quire-tiny, on few short prompts."""
    words = ("bench", "passages", "--model", "quire-tiny", "--dtype", "float32", "--texts", notes)
    return (*words, "--passage-tokens", 40, "--quick", *more)


@pytest.mark.ci
def test_policies_on_a_model_are_measured_again_from_a_file(notes, tmp_path, monkeypatch):
    file, report = tmp_path / "outcomes.jsonl", tmp_path / "passages.svg"
    some = ("--rows", "moved,earlier,oracle_error_15%", "--outcomes", file)
    rows = told(*on_tiny(notes, *some, "--prompts", 2))
    assert [row["name"] for row in rows] == [
        *("full", "prefix", "moved", "earlier", "oracle_error_15%")
    ]
    assert {row["prompts"] for row in rows} == {2}
    assert len(file.read_text("utf-8").splitlines()) == 3
    longer = told(*on_tiny(notes, *some, "--prompts", 3, "--report", report))
    assert {row["prompts"] for row in longer} == {3}
    drawn = report.read_text("utf-8")
    assert "oracle error 15%" in drawn
    assert "quire-tiny" in drawn
    monkeypatch.setattr(PassageModel, "answer", None)  # nothing is computed a second time
    assert told(*on_tiny(notes, *some, "--prompts", 2)) == rows
    assert "best in half the time" in shown(*on_tiny(notes, *some, "--prompts", 3))
    assert "seed is 50 there, 51 here" in refusal(*on_tiny(notes, *some, "--seed", 51))


@pytest.mark.ci
def test_a_measurement_that_is_interrupted_tells_what_it_has(notes, monkeypatch):
    answer = PassageModel.answer

    def once(self, *given, **named):
        monkeypatch.setattr(PassageModel, "answer", ending)
        return answer(self, *given, **named)

    def ending(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(PassageModel, "answer", once)
    rows = told(*on_tiny(notes, "--rows", "moved"))
    assert {row["prompts"] for row in rows} == {1}
    assert "no prompt was measured" in shown(*on_tiny(notes, "--rows", "moved"))


def test_options_of_a_model_are_refused_without_one():
    assert "--model" in refusal("bench", "passages", "--prompts", 3)
    words = ("bench", "passages", "--model", "quire-tiny", "--workloads", "facts")
    assert "leave it out" in refusal(*words)
    assert "epic_16" in refusal("bench", "passages", "--model", "quire-tiny", "--rows", "epic_17")


def test_texts_may_be_man_pages(tmp_path):
    page = tmp_path / "tool.1.gz"
    source = """.TH TOOL 1
.SH DESCRIPTION
The tool reads each of the given files in turn and prints the lines that
.B match
the pattern, one after the other.
.PP
.nf
x = 1
.fi
With \\fIno\\fR files it reads what comes in, which is \\-\\-stdin by another name.
"""
    page.write_bytes(gzip.compress(source.encode()))
    (text,) = read_texts([page])
    assert text.split("\n\n") == [
        (
            "The tool reads each of the given files in turn and prints the lines that match the pattern, "
            "one after the other."
        ),
        "With no files it reads what comes in, which is --stdin by another name.",
    ]
    assert read_texts(None) is None
    page.write_bytes(b"no archive")
    with pytest.raises(ConfigError, match=r"tool\.1\.gz"):
        read_texts([page])


def test_an_operators_texts_become_prompts_of_a_server(notes, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    notes = tmp_path / "long.txt"
    notes.write_text(TEXT, "utf-8")
    settings = Passages("1MiB").on_texts(tokenizer, [notes])
    assert len(settings.prompts) == TEXT_PROMPTS
    again = Passages("1MiB").on_texts(tokenizer, [notes])
    assert settings.prompts_name == again.prompts_name
    assert "is given without --passages" in refusal("serve", "--passage-texts", notes)
    missing = tmp_path / "none.txt"
    assert "none.txt" in refusal("serve", "--passages", "1MiB", "--passage-texts", missing)
