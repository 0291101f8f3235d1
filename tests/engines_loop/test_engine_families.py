"""The engine gives the tokens of the plain model, whatever runs beside a request; or refuses the model by name."""

import pytest
from loop_help import Traffic, tiny_config, tiny_model, trained_model
from transformers import AutoModelForCausalLM

from quire.engines.loop import Engine
from quire.errors import UnsupportedModel

# What each brings: grouped heads, no rotation, parallel layers, latent attention, experts, windows, sinks, soft caps.
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
ROOMY = {"num_blocks": 400, "block_size": 8}
# Pools that a few requests fill: they are preempted; and steps that cut prompts into pieces.
TIGHT = {"num_blocks": 26, "block_size": 4, "max_running": 6, "max_step_tokens": 23, "max_chunk": 9}


@pytest.mark.parametrize("family", FAMILIES)
def test_random_traffic_gives_the_tokens_of_the_plain_model(family):
    traffic = Traffic(tiny_model(family), seed=1, **TIGHT).run(30)
    assert traffic.compared > 20
    assert traffic.ties <= 1
    # Where all layers have a window, what lies behind it makes room.
    assert traffic.engine.stats().preemptions > 0 or family == "mistral+window"
    assert traffic.engine.stats().cached_tokens > 0


@pytest.mark.long
@pytest.mark.parametrize("options", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_long_random_traffic_gives_the_tokens_of_the_plain_model(family, options):
    for seed in range(4):
        traffic = Traffic(tiny_model(family), seed, **options).run(60)
        assert traffic.ties <= 2


def test_the_trained_model_gives_its_own_tokens():
    traffic = Traffic(trained_model(), seed=3, **ROOMY).run(20)
    assert traffic.ties == 0


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


def test_chunked_attention_is_exact_where_its_positions_are_not_counted_by_rows():
    model = tiny_model("llama4_text", attn_temperature_tuning=False)
    assert Traffic(model, seed=2, **TIGHT).run(20).ties <= 1


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
