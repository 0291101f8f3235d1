"""Failures of commands are one line, and a document with `--json`: never a traceback, never late."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import cli_help
from parts import skip_without
from quire.cli import demo, generate
from traces import CONVERSATION, head_path
from turns import by_turns

TRACE = str(head_path(CONVERSATION))
QUIRE = [sys.executable, "-m", "quire"]
PLAN = ("plan", "--model", "llama-3.1-8b", "--gpu", "h100")
FILE, FOLDER, BYTES, JSON, BARE = "FILE", "FOLDER", "BYTES", "JSON", "BARE"
"""In a command: no such file, a folder, what is no text, JSON of another kind, `{` alone."""

READS = [
    ("inspect", "@"),
    ("curve", "@"),
    ("replay", "@"),
    ("simulate", "--trace", "@"),
    ("trace", "info", "@"),
    ("trace", "convert", "@", "out.jsonl"),
    ("trace", "info", TRACE, "--format", "conversations", "--tokenizer", "@"),
    (*PLAN, "--trace", "@"),
    ("plan", "--gpu", "h100", "--model", "@.json"),
    ("plan", "--model", "llama-3.1-8b", "--gpu", "@.json"),
    ("replay", TRACE, "--model", "@.json"),
    ("generate", "--file", "@"),
    ("generate", "--turns", "@"),
    ("generate", "--system", "@@", "hi"),
    ("generate", "--image", "@", "hi"),
    ("generate", "--tier-file", "@", "hi"),
    ("generate", "--lora", "@", "hi"),
    ("generate", "--model", "@", "hi"),
    ("demo", "--model", "@"),
    ("cache", "verify", "@"),
    ("cache", "evict", "@", "--all"),
]
WRITES = [
    ("generate", "hi", "--save"),
    ("generate", "hi", "--record"),
    ("replay", TRACE, "--csv"),
    ("replay", TRACE, "--report"),
    ("curve", TRACE, "--csv"),
    (*PLAN, "--report"),
    ("trace", "convert", TRACE),
    ("trace", "make", "chat"),
]
REFUSED = [
    ("generate", "hi", "--block-size", "-5"),
    ("demo", "--kv-memory", "much"),
    ("generate", "hi", "--tier", "host:1XB"),
    ("generate", "hi", "--block-size", "0"),
    ("replay", TRACE, "--block-size", "0"),
    ("replay", TRACE, "--report", "page.pdf"),
    (*PLAN, "--report", "plan.pdf"),
    ("simulate", "--trace", TRACE, "--num-gpus", "0"),
    ("simulate", "--trace", TRACE, "--router", "nobody"),
    ("bench", "tiers", "nothing:1GiB"),
    ("bench", "core", "--rows", "nothing"),
    ("cache", "evict", "there"),
    ("nothing",),
    ("demo", "--nothing"),
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command in a folder of its own; loading a model fails the test: it is too late then."""

    def too_late(*_, **__):
        pytest.fail("a model was loaded before the options were checked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generate, "load", too_late)
    monkeypatch.setattr(demo, "source_of", too_late)
    return cli_help.run


def bad_file(kind, folder):
    """Make a file or folder that no command can use."""
    place = folder / f"bad.{kind.lower()}"
    if kind == FOLDER:
        place.mkdir()
    elif kind != FILE:
        text = {BYTES: b"\xff\xfe\x00\x81" * 9, JSON: b'{"a": [1, 2]}', BARE: b"{"}[kind]
        place.write_bytes(text)
        place.with_name(place.name + ".json").write_bytes(text)
    return str(place)


def refused(done):
    """Check that a command said one line or a usage, and return what it said."""
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert "defect" not in done.stderr
    said = done.stderr.strip()
    assert said.startswith(("error: ", "Usage: "))
    return said


@pytest.mark.cases(7)
@pytest.mark.parametrize("kind", [FILE, FOLDER, BYTES, JSON, BARE])
@pytest.mark.parametrize("words", READS, ids=lambda words: " ".join(words).replace(TRACE, "T"))
def test_an_unreadable_file_is_an_error_of_one_line(run, tmp_path, monkeypatch, words, kind):
    if words[1] in {"--file", "--system", "--turns"} and kind in {JSON, BARE}:
        pytest.skip("any text is a prompt")
    if words[-2] in {"--model", "--lora"} or "--lora" in words or words[1] == "--model":
        monkeypatch.undo()  # it is the loading that refuses these
        monkeypatch.chdir(tmp_path)
    bad = bad_file(kind, tmp_path)
    refused(
        run(
            *(word.replace("@@", "\0").replace("@", bad).replace("\0", "@" + bad) for word in words)
        )
    )


@pytest.mark.cases(6)
@pytest.mark.parametrize("words", WRITES, ids=lambda words: " ".join(words).replace(TRACE, "T"))
@pytest.mark.parametrize("where", ["no/such/folder/x", "."])
def test_a_command_refuses_an_unwritable_output_before_it_works(run, words, where):
    ending = {"replay": ".html", "plan": ".html"}.get(words[0], "")
    ending = ending if words[-1] == "--report" else ""
    place = where + ending if where != "." else "."
    said = " ".join(refused(run(*words, place)).split())
    assert "cannot write" in said


@pytest.mark.cases(5)
@pytest.mark.parametrize("words", REFUSED, ids=lambda words: " ".join(words).replace(TRACE, "T"))
def test_a_command_refuses_impossible_options_before_it_works(run, words):
    refused(run(*words))


@pytest.mark.cases(3)
@pytest.mark.parametrize("words", [*REFUSED, ("inspect", "no.json"), ("trace", "info", "no.gz")],
                         ids=lambda words: " ".join(words).replace(TRACE, "T"))  # fmt: skip
def test_with_json_an_error_is_one_document_and_the_code_the_same(run, words):
    plain, done = run(*words), run(*words, "--json")
    assert done.exit_code == plain.exit_code
    told = json.loads(done.stdout)["error"]
    assert set(told) == {"kind", "message", "exit_code"}
    assert told["exit_code"] == done.exit_code
    assert told["message"]
    assert told["kind"] in {"ConfigError", "TierError", "TraceError", "UsageError"}
    assert done.stderr.startswith("error: ")


def test_a_recording_never_replaces_a_file(run, tmp_path):
    (tmp_path / "there.jsonl").write_text("kept")
    assert "there already" in refused(run("generate", "hi", "--record", "there.jsonl"))
    assert (tmp_path / "there.jsonl").read_text() == "kept"


def test_an_unforeseen_error_is_one_line_that_calls_it_a_defect(run, monkeypatch):
    monkeypatch.setattr(demo, "parse_bytes", lambda _: 1 / 0)
    done = run("demo")
    assert done.exit_code == 3
    assert done.stderr.startswith("error: ZeroDivisionError: division by zero (not foreseen")
    done = run("demo", "--debug")
    assert done.exit_code == 3
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


LONG = ("inspect",), ("inspect", "--json"), ("curve", TRACE), ("trace", "info", TRACE, "--json")


def full_disk():
    return os.open("/dev/full", os.O_WRONLY)


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


ENDS = {
    full_disk: (2, b"error: the system refuses: No space left on device\n"),
    closed_pipe: (141, b""),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("words", "where"),
    by_turns(LONG, ENDS),
    ids=lambda each: each.__name__ if callable(each) else " ".join(each).replace(TRACE, "T"),
)
def test_a_full_disk_or_a_closed_pipe_ends_a_command_without_a_traceback(words, where):
    skip_without(*words)
    out = where()
    done = subprocess.run([*QUIRE, *words], stdout=out, stderr=subprocess.PIPE, check=False)
    os.close(out)
    assert (done.returncode, done.stderr) == ENDS[where]


@pytest.mark.ci
def test_control_c_ends_a_command_with_one_line_also_while_workers_run(tmp_path):
    skip_without("trace")
    trace = tmp_path / "t.jsonl"
    subprocess.run([*QUIRE, "trace", "make", "chat", trace, "--num-requests", "10000"], check=True,
                   capture_output=True)  # fmt: skip
    words = [*QUIRE, "replay", trace, "--jobs", "2"]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not children(process.pid) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr == b"error: interrupted\n"


def children(pid):
    """The processes that a process has started."""
    path = f"/proc/{pid}/task/{pid}/children"
    return open(path).read().split() if os.path.exists(path) else []  # noqa: PTH110, PTH123
