"""The commands that run a model, on a small random one."""

import shutil

import pytest
import torch
from transformers import AutoTokenizer

from cli_help import refusal, run, saved_llama, shown, told
from quire.cli.chat import prompt_inputs
from quire.errors import TokensError


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


def test_generate_reuses_the_conversation_so_far(folder, tmp_path):
    turns = tmp_path / "turns.txt"
    turns.write_text("What is a list?\n\nAnd a tuple?\n")
    words = ("--system", "Be brief. " * 9, "--turns", turns, "--max-new-tokens", 5)
    first, second = told("generate", "--model", folder, *words)["turns"]
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] >= 96
    assert second["computed_tokens"] == second["prompt_tokens"] - second["cached_tokens"]
    assert first["new_tokens"] <= 5


def test_generate_saves_a_state_that_inspect_shows(folder, tmp_path):
    saved = tmp_path / "run.json"
    told("generate", "--model", folder, "--save", saved, "--max-new-tokens", 1, "Hello. " * 9)
    assert "tokens 0-" in shown("inspect", saved)


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
        (("generate", "--model", "./no-such-model", "hi"), "no file or folder './no-such-model'"),
        (("demo", "--model", "/no/such/model"), "no file or folder '/no/such/model'"),
        (("generate", "--dtype", "float33", "hi"), "'float33'"),
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
