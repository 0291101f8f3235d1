"""The commands that need no model: help, errors, doctor, inspect, bench."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import parts
from cli_help import refusal, run, shown, told
from quire import ops
from quire._version import __version__
from quire.cli import doctor, inspection
from quire.cli.output import milliseconds, times
from quire.core import CacheManager
from quire.extras import EXTRAS

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import flag_table

GROUPS = ((), ("trace",), ("cache",), ("bench",))


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "words", [*GROUPS, *(path.split() for path, _ in flag_table.commands())], ids=" ".join
)
def test_help_of_every_command_has_usage_and_an_example(words):
    text = shown(*words, "--help")
    assert "Usage" in text
    assert not words or "Example" in text


def test_version_is_one_line():
    assert shown("--version") == f"quire {__version__}\n"


@pytest.mark.parametrize("words", [["--help"], ["demo", "--help"]])
def test_help_imports_neither_numpy_nor_torch(words):
    code = (
        f"import sys; sys.argv = ['quire', *{words}]\n"
        "from quire.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'numpy', 'torch', 'transformers', 'openai'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_command_ends_without_a_look_at_all_that_it_imported():
    code = (
        "import atexit, gc, sys; sys.argv = ['quire', '--version']\n"
        "from quire.cli import main\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 1000))\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"


def test_doctor_prints_json_only():
    found = told("doctor")
    assert found["quire"] == __version__
    assert set(found["extras"]) == set(EXTRAS)
    assert found["cpu_cores"] >= 1
    assert found["packages"]["numpy"]


def test_doctor_says_which_parts_are_installed(monkeypatch):
    found = {name: part["installed"] for name, part in told("doctor")["parts"].items()}
    assert found == {name: parts.is_installed(name) for name in parts.PACKAGES}
    monkeypatch.setattr(doctor, "_is_installed", lambda name: name != "quire-sim")
    found = told("doctor")["parts"]["quire-sim"]
    assert not found["installed"]
    assert "replay" in found["commands"]
    (line,) = [line for line in shown("doctor").splitlines() if "quire-sim" in line]
    assert "not installed" in line


def test_doctor_says_how_to_get_what_is_missing(monkeypatch):
    present = doctor._version
    hidden = {"torch", "transformers"}
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in hidden else present(name))
    found = told("doctor")
    assert found["extras"]["hf"]["missing"] == ["torch", "transformers"]
    assert found["cuda"] == []
    text = shown("doctor")
    assert "not installed" in text
    assert "pip install '.[hf]' in a clone of quire" in text


def test_inspect_draws_a_demonstration_without_a_file():
    text = shown("inspect")
    for word in ("active", "cached", "free", "ref", "careful librarian", "cold: never seen before"):
        assert word in text


def test_the_demonstration_has_something_of_everything():
    state = inspection.demonstration()
    stats = state["stats"]
    assert all(stats[f"{kind}_blocks"] for kind in ("published", "copied", "evicted"))
    assert all(stats["missed"][reason] for reason in ("cold", "last_token"))
    assert len(state["sequences"]) == 2


def test_inspect_reads_the_snapshot_of_a_manager(tmp_path):
    manager = CacheManager(8, 4)
    seq = manager.open(range(100, 109), priority=3)
    manager.reserve(seq, 9)
    manager.commit(seq, range(100, 109))
    manager.close(seq)
    file = tmp_path / "run.json"
    file.write_text(json.dumps(ops.snapshot(manager)))
    text = shown("inspect", file, env={"COLUMNS": "120"})
    for word in ("2 blocks", "[100, 101, 102, 103, 104, 105, 106, 107]", "priority 3"):
        assert word in text
    assert told("inspect", file) == ops.snapshot(manager)


def test_a_tree_is_drawn_below_80_columns():
    assert max(map(len, shown("inspect", env={"COLUMNS": "80"}).splitlines())) <= 80


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot read"),
        ("no json", "no snapshot"),
        ("[]", "no snapshot"),
        ('{"block_size": 16}', "missing"),
        (
            '{"block_size":1,"policy":"lru","groups":[{}],"roots":[],"sequences":[],"stats":{}}',
            "no snapshot",
        ),
    ],
)
def test_inspect_refuses_what_is_no_snapshot(tmp_path, content, reason):
    file = tmp_path / "run.json"
    if content is not None:
        file.write_text(content)
    assert reason in refusal("inspect", file)


def test_debug_shows_a_traceback_where_it_stands_last_and_leaves_the_code(tmp_path):
    words = ("inspect", tmp_path / "none.json")
    result = run(*words, "--debug")
    assert result.stderr.startswith("Traceback")
    assert "quire.errors.ConfigError: " in result.stderr
    assert result.exit_code == run(*words).exit_code == 2
    assert run("inspect", "--no-such-option", "--debug").exit_code == 2


def test_bench_core_prints_the_rows_asked_for():
    found = told("bench", "core", "--rows", "alloc_free_1")
    assert [row["name"] for row in found] == ["alloc_free_1"]
    assert found[0]["median_us"] > 0


@pytest.mark.parametrize("words", [("core", "--rows", "no_such"), ("tiers", "no_such:1GiB")])
def test_bench_refuses_unknown_names(words):
    assert "no_such" in refusal("bench", *words)


def test_numbers_keep_the_digits_that_say_something():
    assert [milliseconds(s) for s in (0.00421, 0.0421, 4.21)] == ["4.21", "42.1", "4,210"]
    assert [times(factor) for factor in (0.5, 9.26, 24.4)] == ["0.50x", "9.3x", "24x"]


def test_a_terminal_without_utf8_gets_ascii():
    words = [sys.executable, "-m", "quire", "inspect"]
    env = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "60"}
    done = subprocess.run(words, capture_output=True, env=env, check=True)
    assert b"##" in done.stdout
    assert done.stdout.isascii()
