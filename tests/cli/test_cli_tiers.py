"""Tiers on the command line: what is kept between two runs of a command, and bad words."""

import pytest

from cli_help import run, told

PROMPT = "What is a list, and how does it differ from a tuple, in words that all understand? " * 2


def generated(*words):
    (turn,) = told("generate", "--max-new-tokens", 2, *words, PROMPT)["turns"]
    return turn


def test_a_second_run_finds_on_disk_what_the_first_one_computed(tmp_path):
    file = tmp_path / "tiers.toml"
    file.write_text(
        f'[[tiers]]\nkind = "disk"\npath = "{tmp_path / "kv"}"\ncapacity = "64MiB"\n'
        "[stack]\ngate = false\n"
    )
    first = generated("--tier-file", file)
    again = generated("--tier-file", file, "--tier", "host:8MiB")
    assert first["tier_tokens"] == {}
    assert again["tier_tokens"]["disk"] >= 100
    assert again["text"] == first["text"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--tier", "host:1XB"), "XB"),
        (("--tier", "cloud:there"), "cloud"),
        (("--tier-file", "nowhere.toml"), "nowhere.toml"),
    ],
)
def test_tiers_that_cannot_be_are_refused_before_anything_is_loaded(words, says):
    result = run("generate", *words, "hello")
    assert result.exit_code
    assert says in result.output + str(result.exception)


@pytest.mark.parametrize(
    "text",
    [
        "[[tiers",
        "capacity = 3",
        'tiers = "host:1MiB"',
        '[stack]\nwrite = "never"\n[[tiers]]\nkind="host"\ncapacity="1MiB"',
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path, text):
    file = tmp_path / "tiers.toml"
    file.write_text(text)
    result = run("generate", "--tier-file", file, "hello")
    assert result.exit_code
