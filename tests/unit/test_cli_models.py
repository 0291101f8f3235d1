"""The commands that run a model, on a small random one."""

import io
import json
import shutil
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from quire import demo_model
from quire.cli import comparison, demo
from quire.cli.app import app
from quire.cli.chat import prompt_ids, timed
from quire.cli.models import load
from quire.engines.hf import PrefixCache
from quire.errors import TokensError

SMALL_DEMO = (
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
    """A random model with the packaged tokenizer, saved as any model is."""
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        pad_token_id=256,
        bos_token_id=257,
        eos_token_id=258,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(demo_model()).save_pretrained(path)
    return path


@pytest.fixture
def run():
    runner = CliRunner()
    return lambda *words, **options: runner.invoke(app, [str(word) for word in words], **options)


@pytest.fixture(scope="module")
def compared(folder):
    """A demo of two calls and the sample."""
    model, tokenizer = load(str(folder))
    size = comparison.DemoSize(
        num_conversations=2, num_turns=1, system_tokens=300, max_new_tokens=4
    )
    pair = comparison.SideBySide(model, tokenizer, PrefixCache(model, "8MiB"), size)
    return comparison.compare(pair, size, lambda _what: None, setup_s=0.0)


def drawn(found, columns):
    console = Console(width=columns, record=True, file=io.StringIO())
    ran = {"model": "a model", "parameters": 1e6, "device": "CPU, 2 threads", "dtype": "float32"}
    demo.show(console, found, ran)
    return console.export_text()


def test_the_demo_compares_and_reports(run, folder, tmp_path):
    saved = tmp_path / "run.json"
    result = run("demo", "--model", folder, "--json", "--save", saved, *SMALL_DEMO)
    assert result.exit_code == 0
    found = json.loads(result.stdout)
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
    assert found["ttft_ms_cold_median"] > 0
    assert found["ttft_ms_warm_median"] > 0
    assert found["ttft_speedup_median"] > 0
    assert found["seconds"] > 0
    pool = found["pool"]
    assert pool["free"] + pool["active"] + pool["cached"] == pool["num_blocks"]
    assert "tokens 0-" in run("inspect", saved).stdout


@pytest.mark.parametrize("columns", [80, 120])
def test_the_demo_table_fits_the_terminal(compared, columns):
    lines = drawn(compared, columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert not any("…" in line for line in lines)
    for word in ("A1", "B1", "4 samples", "speed-up", "outputs identical  yes", "free"):
        assert any(word in line for line in lines)


def test_the_demo_table_says_where_an_output_differs(compared):
    first = replace(compared.turns[0], identical=False)
    wrong = replace(compared, turns=[first, *compared.turns[1:]])
    shown = drawn(wrong, 80)
    assert "NO: 1 of 3 calls gave other tokens" in shown
    assert "yes: " not in shown


def test_the_demo_fails_in_red_where_an_output_differs(run, folder, monkeypatch):
    def wrong_with_quire(generate, *args, **arguments):
        made = timed(generate, *args, **arguments)
        is_quire = type(generate.__self__).__name__ == "PrefixCache"
        return made._replace(new_ids=[[0]]) if is_quire else made

    monkeypatch.setattr(comparison, "timed", wrong_with_quire)
    result = run("demo", "--model", folder, "--json", *SMALL_DEMO)
    assert result.exit_code == 1
    assert "outputs differ" in result.stderr
    assert json.loads(result.stdout)["outputs_identical"] is False


def test_generate_reuses_the_conversation_so_far(run, folder, tmp_path):
    turns = tmp_path / "turns.txt"
    turns.write_text("What is a list?\n\nAnd a tuple?\n")
    result = run(
        "generate", "--model", folder, "--system", "Be brief. " * 9, "--turns", turns,
        "--max-new-tokens", 5, "--json",
    )  # fmt: skip
    assert result.exit_code == 0
    first, second = json.loads(result.stdout)["turns"]
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] >= 96
    assert second["computed_tokens"] == second["prompt_tokens"] - second["cached_tokens"]
    assert first["new_tokens"] <= 5


def test_generate_streams_the_text_and_says_what_was_reused(run, folder):
    words = ("generate", "--model", folder, "--max-new-tokens", 4)
    told = run(*words, "--json", "Hello")
    shown = run(*words, "Hello")
    assert shown.stdout == json.loads(told.stdout)["turns"][0]["text"] + "\n"
    assert "0 cached + " in shown.stderr
    assert "first token after" in shown.stderr
    assert run(*words, input="Hello").stdout == shown.stdout


def test_generate_samples_the_same_text_for_the_same_seed(run, folder):
    words = (
        "generate",
        "--model",
        folder,
        "--max-new-tokens",
        9,
        "--temperature",
        1,
        "--json",
        "a",
    )
    texts = [
        json.loads(run(*words, "--seed", seed).stdout)["turns"][0]["text"] for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


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
        (("demo", "--dtype", "float33"), "'float33'"),
        (("bench", "hf", "--rows", "no_such"), "no_such"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, words, reason):
    result = run(*words)
    assert result.exit_code == 2
    assert reason in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_a_folder_without_a_model_is_named(run, tmp_path):
    result = run("generate", "--model", tmp_path, "hi")
    assert result.exit_code == 2
    assert "without config.json" in result.stderr


def test_weights_that_cannot_be_read_are_one_line(run, folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    result = run("generate", "--model", broken, "hi")
    assert result.exit_code == 2
    assert "cannot be loaded" in result.stderr


def test_a_model_that_the_hub_does_not_give_is_one_line(run, monkeypatch):
    monkeypatch.setattr("quire.cli.models._hub_answers", lambda: False)
    result = run("generate", "--model", "nobody/no-such-model", "hi")
    assert result.exit_code == 2
    assert "pass a local folder" in result.stderr


def test_a_pool_that_is_too_small_is_bad_input(run, folder):
    result = run("generate", "--model", folder, "--kv-memory", "100B", "hi")
    assert result.exit_code == 2
    assert "100" in result.stderr


def test_a_tokenizer_without_a_template_joins_the_messages(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    assert prompt_ids(tokenizer, talk).tolist() == [list(b"ab\n\nc")]
    with pytest.raises(TokensError, match="empty"):
        prompt_ids(tokenizer, [])


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
