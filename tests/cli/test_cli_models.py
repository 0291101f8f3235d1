"""The commands that run a model, on a small random one."""

import io
import json
import shutil

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from cli_help import refusal, run, saved_llama, shown, told
from quire.cli import comparison, demo
from quire.cli.chat import prompt_inputs, timed
from quire.cli.models import load
from quire.engines.hf import PrefixCache
from quire.errors import TokensError

SMALL_DEMO = (
    "--engine", "transformers",
    "--num-conversations", 2, "--num-turns", 2, "--system-tokens", 300, "--max-new-tokens", 6, "--kv-memory", "8MiB",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """One thread: the models are too small for two, and other work may need the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def compared(folder):
    """A demo of two calls and the sample."""
    model, tokenizer = load(str(folder))
    size = comparison.DemoSize(2, 1, 300, 4)
    pair = comparison.SideBySide(model, tokenizer, PrefixCache(model, "8MiB"), size)
    ran = {"model": "a model", "parameters": 1e6, "device": "CPU, 2 threads", "dtype": "float32"}
    return comparison.compare(pair, size, lambda _what: None) | ran


def drawn(found, columns):
    console = Console(width=columns, record=True, file=io.StringIO())
    demo.show(console, found)
    return console.export_text()


def test_the_demo_compares_and_reports(folder, tmp_path):
    saved = tmp_path / "run.json"
    found = told("demo", "--model", folder, "--save", saved, *SMALL_DEMO)
    assert found["outputs_identical"] is True
    assert len(found["turns"]) == 4
    assert len(found["sample"]["replies"]) == 4
    cold, *others = found["turns"]
    assert cold["cached_tokens"] == 0
    assert all(turn["cached_tokens"] >= 300 for turn in others)
    calls = [*found["turns"], found["sample"]]
    assert found["prompt_tokens"] == sum(call["prompt_tokens"] for call in calls)
    assert found["reused_tokens"] == sum(call["cached_tokens"] for call in calls)
    assert found["hit_rate"] == found["reused_tokens"] / found["prompt_tokens"]
    medians = ("ttft_ms_cold_median", "ttft_ms_warm_median", "ttft_speedup_median", "seconds")
    assert all(found[name] > 0 for name in medians)
    pool = found["pool"]
    assert pool["free"] + pool["active"] + pool["cached"] == pool["num_blocks"]
    assert "tokens 0-" in shown("inspect", saved)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_demo_table_fits_the_terminal(compared, columns):
    lines = drawn(compared, columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert not any("…" in line for line in lines)
    for word in ("A1", "B1", "4 samples", "speed-up", "outputs identical  yes", "free"):
        assert any(word in line for line in lines)


def test_the_demo_table_says_where_an_output_differs(compared):
    first, *others = compared["turns"]
    wrong = comparison.figures([first | {"identical": False}, *others], compared["sample"])
    wrong = compared | wrong
    text = drawn(wrong, 80)
    assert "NO: 1 of 3 calls gave other tokens" in text
    assert "yes: " not in text


def test_the_demo_fails_in_red_where_an_output_differs(folder, monkeypatch):
    def wrong_with_quire(generate, *args, **arguments):
        made = timed(generate, *args, **arguments)
        is_quire = type(generate.__self__).__name__ == "PrefixCache"
        return made._replace(new_ids=[[0]]) if is_quire else made

    monkeypatch.setattr(comparison, "timed", wrong_with_quire)
    result = run("demo", "--model", folder, "--json", *SMALL_DEMO)
    assert result.exit_code == 1
    assert "outputs differ" in result.stderr
    assert json.loads(result.stdout)["outputs_identical"] is False


def test_generate_reuses_the_conversation_so_far(folder, tmp_path):
    turns = tmp_path / "turns.txt"
    turns.write_text("What is a list?\n\nAnd a tuple?\n")
    words = ("--system", "Be brief. " * 9, "--turns", turns, "--max-new-tokens", 5)
    first, second = told("generate", "--model", folder, *words)["turns"]
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] >= 96
    assert second["computed_tokens"] == second["prompt_tokens"] - second["cached_tokens"]
    assert first["new_tokens"] <= 5


def test_generate_streams_the_text_and_says_what_was_reused(folder):
    words = ("generate", "--model", folder, "--max-new-tokens", 4)
    done = run(*words, "Hello")
    assert done.stdout == told(*words, "Hello")["turns"][0]["text"] + "\n"
    assert "0 cached + " in done.stderr
    assert "first token after" in done.stderr
    assert shown(*words, input="Hello") == done.stdout


def test_generate_samples_the_same_text_for_the_same_seed(folder):
    words = ("generate", "--model", folder, "--max-new-tokens", 9, "--temperature", 1, "a")
    texts = [told(*words, "--seed", seed)["turns"][0]["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("generate", "--kv-memory", "12 parsecs", "hi"), "'parsecs'"),
        (("demo", "--kv-memory", "12 parsecs"), "'parsecs'"),
        (("generate", ""), "the prompt is empty"),
        (("generate", "hi", "--file", "x.txt"), "once"),
        (("generate", "--file", "no/such.txt"), "cannot read 'no/such.txt'"),
        (("generate", "--system", "@no/such.txt", "hi"), "cannot read 'no/such.txt'"),
        (("generate", "--model", "./no-such-model", "hi"), "no folder './no-such-model'"),
        (("demo", "--model", "/no/such/model"), "no folder '/no/such/model'"),
        (("demo", "--num-conversations", 99), "--num-conversations is 99"),
        (("demo", "--engine", "transformers", "--dtype", "float33"), "'float33'"),
        (("demo", "--save", "x.json"), "--save is for --engine transformers"),
        (("bench", "hf", "--rows", "no_such"), "no_such"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, reason):
    assert reason in refusal(*words)


def test_a_folder_without_a_model_is_named(tmp_path):
    assert "without config.json" in refusal("generate", "--model", tmp_path, "hi")


def test_weights_that_cannot_be_read_are_one_line(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    assert "cannot be loaded" in refusal("generate", "--model", broken, "hi")


def test_a_model_that_the_hub_does_not_give_is_one_line(monkeypatch):
    monkeypatch.setattr("quire.cli.models._hub_answers", lambda: False)
    said = refusal("generate", "--model", "nobody/no-such-model", "hi")
    assert "pass a local folder" in said


def test_a_pool_that_is_too_small_is_bad_input(folder):
    assert "100" in refusal("generate", "--model", folder, "--kv-memory", "100B", "hi")


def test_a_tokenizer_without_a_template_joins_the_messages(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    assert prompt_inputs(tokenizer, talk)["input_ids"].tolist() == [list(b"ab\n\nc")]
    with pytest.raises(TokensError, match="empty"):
        prompt_inputs(tokenizer, [])


def test_the_number_of_threads_is_what_plain_generate_is_fastest_with(folder, monkeypatch):
    torch.set_num_threads(2)
    slow_threads = 2

    def slow_on_two(generate, *args, **arguments):
        made = timed(generate, *args, **arguments)
        factor = 9 if torch.get_num_threads() == slow_threads else 1
        return made._replace(total_s=made.total_s * factor)

    monkeypatch.setattr(comparison, "timed", slow_on_two)
    model, _ = load(str(folder))
    assert comparison.settle_threads(model) == 1
    assert torch.get_num_threads() == 1
