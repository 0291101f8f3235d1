"""The engine gives the tokens of the plain model, whatever runs beside a request; or refuses the model by name."""

from collections import Counter

import pytest
import torch
from loop_help import tiny_config, tiny_model, trained_model
from traffic_help import TIGHT, GeneratingBeside, Traffic
from transformers import AutoModelForCausalLM

from quire.engines.loop import Engine
from quire.errors import UnsupportedModel
from turns import few

# What each brings: grouped heads, no rotation, parallel layers, latent attention, experts, windows, sinks, soft caps, chunks.
FAMILIES = (
    "llama",
    "qwen3",
    "phi",
    "gpt_neox",
    "gpt2",
    "deepseek_v3",
    "mixtral",
    "gemma2",
    "gemma3_text",
    "mistral+window",
    "gpt_oss",
    "llama4_text",
)
MORE = (
    "qwen2",
    "mistral",
    "phi3",
    "opt",
    "gemma",
    "stablelm",
    "olmo2",
    "glm4",
    "cohere",
    "granite",
)
MORE += ("starcoder2", "gpt_bigcode", "cohere2", "olmo3", "exaone4", "gemma4_text")


def model_of(family, **changes):
    """With temperature tuning llama4 counts rows, and is refused."""
    if family == "llama4_text":
        changes["attn_temperature_tuning"] = False
    return tiny_model(family, **changes)


def traffic(family, seed):
    return Traffic(model_of(family), seed)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "family",
    few(FAMILIES, "llama", "gpt_neox", "gpt2", "deepseek_v3", "gemma2", "gpt_oss", "llama4_text"),
)
def test_random_traffic_gives_the_tokens_of_the_plain_model(family):
    counts = traffic(family, seed=1).live(10, **TIGHT).counts
    assert counts["compared"] > 5
    assert counts["cached tokens"] > 0
    assert counts["ties"] <= 1


@pytest.mark.long
@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_long_random_traffic_gives_the_tokens_of_the_plain_model(family):
    seen = sum((traffic(family, seed).lives(4, 50, **TIGHT).counts for seed in range(2)), Counter())
    assert seen["requests"] >= 400
    assert seen["ties"] <= 4
    for what in (
        "drawn",
        "aborted",
        "pins",
        "RequestFailed",
        "DeadlinePassed",
        "PrefixCache",
        "written",
        "scored",
        "scored and preempted",
        "formed",
        "formed and cached",
        "limited",
        "retained",
    ):
        assert seen[what] > 0
    # Where all layers have a window, what lies behind it makes room.
    assert seen["preemptions"] > 0 or family == "mistral+window"


@pytest.mark.ci
@pytest.mark.parametrize(
    "family",
    [
        "gemma3_text",
        *(pytest.param(each, marks=pytest.mark.long) for each in FAMILIES if each != "gemma3_text"),
    ],
)
def test_plain_calls_on_another_thread_give_what_they_give_alone(family):
    traffic = Traffic(model_of(family), seed=5)
    with GeneratingBeside(traffic.model) as beside:
        traffic.live(12)
    assert beside.compared > 3


@pytest.mark.ci
def test_the_trained_model_gives_its_own_tokens():
    assert Traffic(trained_model(), seed=3).live(8).counts["ties"] == 0


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bloom", "ALiBi"),
        ("mpt", "ALiBi"),
        ("gpt_neo", "0 layers goes through"),
        ("falcon", "does not compute packed rows"),
        ("qwen3_next", r"layers 0, 2 are recurrent \(linear_attention\)"),
        ("lfm2", r"layers 0, 2 are recurrent \(conv\)"),
        ("gemma3n_text", "4 layers goes through"),
        ("llama4_text", "tiny twin .* does not compute packed rows as it does plain ones"),
    ],
)
def test_a_model_whose_rows_cannot_be_packed_is_refused_by_name(family, reason):
    with pytest.raises(UnsupportedModel, match=f"{family}.*{reason}"):
        Engine(tiny_model(family))


def test_a_family_without_packed_rows_is_refused_in_half_precision():
    with pytest.raises(UnsupportedModel, match=r"falcon.*does not compute packed rows"):
        Engine(tiny_model("falcon", dtype=torch.bfloat16))


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_a_rotation_that_depends_on_the_length_is_refused(scaling):
    rope = {"rope_type": scaling, "rope_theta": 1e4, "factor": 2.0}
    rope |= {
        "original_max_position_embeddings": 64,
        "long_factor": [1.0] * 4,
        "short_factor": [1.0] * 4,
    }
    with pytest.raises(UnsupportedModel, match=f"{scaling}.*rope scaling"):
        Engine(AutoModelForCausalLM.from_config(tiny_config("llama", rope_parameters=rope)).eval())
