"""A twin's config: everything smaller, every relation and every kind of layer still there."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hypothesis import strategies as st  # noqa: E402
from transformers import CONFIG_MAPPING, AutoModelForCausalLM  # noqa: E402

from quire.engines.models.twin import MAX_DISTANCE, shrunk  # noqa: E402
from quire.tensors.kinds import layer_kinds  # noqa: E402
from turns import drawn  # noqa: E402

# Numbers as published ones are: heads that no power of two divides, parts of heads, patterns.
PUBLISHED = {
    "qwen2": {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2},
    "qwen3": {"hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128},
    "gemma2": {"num_hidden_layers": 26},
    "gemma3_text": {"num_hidden_layers": 34},
    "phi": {"hidden_size": 2560, "num_attention_heads": 32},
    "glm4_moe": {"num_hidden_layers": 46},
    "gpt_oss": {},
    "deepseek_v3": {"num_hidden_layers": 61},
    "qwen3_next": {"num_hidden_layers": 48},
    "jamba": {},
    "falcon_h1": {},
    "falcon": {},
    "llama4_text": {},
    "nemotron_h": {},
    "gemma3n_text": {},
    "gemma4_text": {},
    "modernbert-decoder": {},
    "recurrent_gemma": {},
    "mamba2": {},
    "gpt_neo": {},
    "longcat_flash": {},
    "hrm_text": {},
    "zamba": {},
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_twin_has_every_kind_of_layer_and_is_built_and_run_at_once(name):
    config = CONFIG_MAPPING[name](**PUBLISHED[name])
    twin = shrunk(config)
    model = AutoModelForCausalLM.from_config(twin, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.arange(3, 53)[None]).logits
    assert torch.isfinite(logits).all()
    assert sum(weight.numel() for weight in model.parameters()) < 2_500_000
    assert twin.num_hidden_layers <= 16
    assert _kinds(twin) == _kinds(config)


def _kinds(config):
    words = getattr(config, "layer_types", None) or ["all"]
    words = list(words[: config.num_hidden_layers])
    mlps = getattr(config, "mlp_layer_types", None) or ["all"]
    return set(words), set(mlps)


@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3_text", "gpt_oss", "llama4_text", "mistral", "lfm3"]
)
def test_windows_and_chunks_stay_and_are_short(name):
    config = CONFIG_MAPPING[name]()
    windows = [
        {kind.window for kind in layer_kinds(each) if kind.window}
        for each in (config, shrunk(config))
    ]
    assert len(windows[0]) == len(windows[1]) > 0
    assert all(0 < window <= MAX_DISTANCE for window in windows[1])


def test_distances_keep_their_order_and_those_that_were_equal_stay_equal():
    config = CONFIG_MAPPING["llama4_text"](
        attention_chunk_size=8192,
        floor_scale=8192,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16384,
        },
    )
    twin = shrunk(config)
    chunk, floor = twin.attention_chunk_size, twin.floor_scale
    assert chunk == floor < twin.rope_parameters["original_max_position_embeddings"] <= MAX_DISTANCE


def test_the_ids_of_special_tokens_are_in_the_vocabulary_and_differ():
    config = CONFIG_MAPPING["qwen2_vl"](vision_start_token_id=151652, image_token_id=151655)
    twin = shrunk(config)
    text = twin.text_config
    ids = [twin.image_token_id, twin.video_token_id, twin.vision_start_token_id, text.eos_token_id]
    known = [token for token in ids if token is not None]
    assert len(set(known)) == len(known)
    assert all(token < text.vocab_size for token in known)


def test_sections_of_a_rotation_sum_to_what_is_rotated():
    config = CONFIG_MAPPING["qwen2_vl_text"](
        hidden_size=1536,
        num_attention_heads=12,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    )
    twin = shrunk(config)
    head = twin.hidden_size // twin.num_attention_heads
    assert sum(twin.rope_parameters["mrope_section"]) == head // 2


def test_factors_of_a_long_rotation_are_as_many_as_its_frequencies():
    config = CONFIG_MAPPING["phi3"](
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "long_factor": [2.0] * 48,
            "short_factor": [1.0] * 48,
            "original_max_position_embeddings": 4096,
        }
    )
    twin = shrunk(config)
    rope, head = twin.rope_parameters, twin.hidden_size // twin.num_attention_heads
    assert len(rope["long_factor"]) == len(rope["short_factor"]) == head // 2
    assert rope["original_max_position_embeddings"] <= MAX_DISTANCE


def test_a_composite_hands_over_the_width_of_its_text():
    twin = shrunk(CONFIG_MAPPING["qwen2_vl"](vision_config={"hidden_size": 8192}))
    assert twin.vision_config.hidden_size == twin.text_config.hidden_size < 128


def test_neither_quantization_nor_the_original_is_touched():
    config = CONFIG_MAPPING["llama"](quantization_config={"quant_method": "gptq", "bits": 4})
    before = config.to_dict()
    assert not hasattr(shrunk(config), "quantization_config")
    assert config.to_dict() == before


def test_the_twin_of_a_twin_is_itself():
    for name in ("llama", "gemma3_text", "deepseek_v3", "falcon_h1"):
        twin = shrunk(CONFIG_MAPPING[name]())
        assert shrunk(twin).to_dict() == twin.to_dict()


@drawn(8, 100,
    groups=st.sampled_from([(32, 8), (14, 2), (7, 1), (5, 5), (71, 1), (24, 3), (2, 1), (40, 40)]),
    head=st.sampled_from([None, 16, 64, 80, 96, 128, 256]),
    rotated=st.sampled_from([None, 0.25, 0.4, 0.5, 1.0]),
    pattern=st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=1, max_size=40),
    window=st.integers(1, 40_000),
)  # fmt: skip
def test_any_attention_keeps_its_relations(groups, head, rotated, pattern, window):
    heads, kv_heads = groups
    hidden = heads * 64
    rope = {"rope_type": "default", "rope_theta": 1e4}
    rope |= {} if rotated is None else {"partial_rotary_factor": rotated}
    config = CONFIG_MAPPING["qwen3"](
        hidden_size=hidden,
        head_dim=head or 64,
        intermediate_size=3 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=len(pattern),
        layer_types=pattern,
        use_sliding_window=True,
        sliding_window=window,
        rope_parameters=rope,
    )
    twin = shrunk(config)
    assert twin.num_attention_heads % twin.num_key_value_heads == 0
    assert (heads == kv_heads) == (twin.num_attention_heads == twin.num_key_value_heads)
    assert (kv_heads == 1) == (twin.num_key_value_heads == 1)
    assert twin.intermediate_size == 3 * twin.hidden_size
    assert set(twin.layer_types) == set(pattern)
    assert 0 < twin.sliding_window <= min(window, MAX_DISTANCE)
    if head is None:
        assert twin.num_attention_heads * twin.head_dim == twin.hidden_size
    assert int(twin.head_dim * (rotated or 1)) % 2 == 0
    model = AutoModelForCausalLM.from_config(twin, dtype=torch.float32).eval()
    assert torch.isfinite(model(torch.arange(9)[None]).logits).all()
