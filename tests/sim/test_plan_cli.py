"""`quire plan` as people type it."""

from pathlib import Path

import pytest

from cli_help import refusal, shown, told
from quire import demo_model
from quire.errors import ConfigError
from quire_sim.cli.plan import parse_tokens, short_tokens
from traces import CONVERSATION, head_path

TIERS = "host=256GiB@50GB/s,disk=2TiB@6GB/s"
TRACED = ("plan", "--model", "qwen3-32b", "--gpu", "h100", "--below", TIERS, "--trace",
          head_path(CONVERSATION))  # fmt: skip


def test_a_plan_shows_memory_users_tiers_and_blocks():
    text = shown("plan", "--model", "Llama-3.1-8B", "--gpu", "H100")
    for word in ("15.0 GiB weights", "27,825 of 16 tokens", "54 with 8k tokens", "host", "always"):
        assert word in text
    assert "use --block-size 64" in text


@pytest.mark.ci
def test_a_trace_adds_what_memory_is_worth():
    text = shown(*TRACED)
    for words in ("What memory below the device buys", "host 64 GiB", "+ disk 2 TiB"):
        assert words in text
    assert "different K and V" in text


@pytest.mark.cases(1)
@pytest.mark.parametrize("columns", ["80", "120"])
def test_a_plan_fits_the_terminal(columns):
    text = shown(*TRACED, env={"COLUMNS": columns})
    assert max(map(len, text.splitlines())) <= int(columns)


def test_json_is_the_whole_plan_and_nothing_else():
    words = ("--model", "llama-3.1-70b", "--gpu", "h100", "--num-gpus", 4, "--context", "32k")
    made = told("plan", *words, "--below", TIERS)
    assert made["memory"]["context"] == 32768
    assert made["num_gpus"] == 4
    assert [tier["name"] for tier in made["tiers"]] == ["host", "disk"]
    assert made["worth"] == []


def test_smaller_numbers_make_room():
    words = ("plan", "--model", "llama-3.1-8b", "--gpu", "l4")
    plain = told(*words)["memory"]
    small = told(*words, "--dtype", "fp8", "--kv-dtype", "fp8")["memory"]
    in_16_bits = 2 * 128_256 * 4_096  # the embedding and the last layer
    assert (small["weight_bytes"] - in_16_bits) * 2 == plain["weight_bytes"]
    assert small["block_bytes"] * 2 == plain["block_bytes"]
    assert small["users"] > plain["users"]


def test_a_config_of_ones_own_is_planned_for():
    made = told("plan", "--model", demo_model() / "config.json", "--gpu", "cpu")
    assert made["params"] == 3_756_800


def test_measured_steps_set_the_rates():
    words = ("plan", "--model", "quire-tiny", "--gpu", "cpu")
    speed = told(*words, "--measured", "512=40ms,4096=400ms")["speed"]
    assert speed["prefill_s"] != told(*words)["speed"]["prefill_s"]
    assert speed["basis"].startswith("a roofline at")
    assert speed["error"] < 1e-6  # two points, two unknowns


@pytest.mark.cases(1)
@pytest.mark.parametrize("ending", ["html", "svg"])
def test_the_picture_is_written_as_one_file(tmp_path, ending):
    file = tmp_path / f"plan.{ending}"
    shown("plan", "--model", "qwen3-8b", "--gpu", "h100", "--report", file)
    assert f"<{ending}" in file.read_text("utf-8")


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--model", "lama-3.1-8b", "--gpu", "h100"), "did you mean llama-3.1-8b"),
        (("--model", "qwen3-8b", "--gpu", "h1000"), "did you mean h100"),
        (("--model", "llama-3.1-405b", "--gpu", "h100"), "--num-gpus 16"),
        (("--model", "llama-3.1-405b", "--gpu", "h100"), "--dtype fp8 with --num-gpus 8"),
        (("--model", "qwen3-8b", "--gpu", "h100", "--context", "lots"), "no number of tokens"),
        (("--model", "qwen3-8b", "--gpu", "h100", "--context", "1m"), "was made for"),
        (("--model", "qwen3-8b", "--gpu", "h100", "--below", "host"), "is not a tier"),
        (("--model", "qwen3-8b", "--gpu", "h100", "--dtype", "fp3"), "number format"),
        (("--model", "qwen3-8b", "--gpu", "h100", "--trace", "none.jsonl"), "none.jsonl"),
        (("--model", "qwen3-8b", "--gpu", "h100", "--report", "plan.pdf"), ".html or .svg"),
        (("--model", "none/config.json", "--gpu", "h100"), "cannot read"),
    ],
)
def test_mistakes_are_answered_in_one_line(words, says):
    assert says in refusal("plan", *words)
    assert not Path("plan.pdf").exists()


def test_tokens_are_written_as_people_say_them():
    assert [parse_tokens(text) for text in ("8k", "8192", "1M", "128K", "1,000", " 2 k ")] == [
        8192, 8192, 1 << 20, 131_072, 1000, 2048,
    ]  # fmt: skip
    for text in ("", "k", "-8k", "0", "8g", "1.5k", "9" * 30):
        with pytest.raises(ConfigError):
            parse_tokens(text)
    assert [short_tokens(tokens) for tokens in (8192, 1 << 20, 1000)] == ["8k", "1M", "1,000"]
