import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from quire.core import FullAttention  # noqa: E402
from quire.errors import ConfigError, UnsupportedModel  # noqa: E402
from quire.groups import ChunkedAttention, Recurrent, SlidingWindow  # noqa: E402
from quire.tensors import KVLayout, ModelLayout, StateLayout, StateShape  # noqa: E402
from quire.tensors.kinds import KVShape, LayerKind  # noqa: E402

F32 = torch.float32
TINY = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def config(model_type, **values):
    return transformers.CONFIG_MAPPING[model_type](**{**TINY, **values})


def only(layout):
    """The memory of the only group of a model."""
    (group,) = layout.groups
    return group.memory


def test_bytes_follow_from_shape_and_dtype():
    layout = KVLayout(num_layers=2, kv_heads=3, k_width=8, v_width=4, dtype=F32, block_size=16)
    assert layout.bytes_per_token == 2 * 3 * (8 + 4) * 4
    assert layout.bytes_per_block == 16 * layout.bytes_per_token


def test_half_precision_takes_half_the_bytes():
    sizes = [KVLayout(2, 3, 8, 8, dtype).bytes_per_token for dtype in (F32, torch.bfloat16)]
    assert sizes[0] == 2 * sizes[1]


def test_a_capacity_holds_whole_blocks_only():
    layout = KVLayout(1, 1, 8, 8, F32, block_size=4)
    assert layout.num_blocks(layout.bytes_per_block) == 1
    assert layout.num_blocks(3 * layout.bytes_per_block - 1) == 2


def test_a_capacity_below_one_block_says_what_one_takes():
    layout = KVLayout(1, 1, 8, 8, F32, block_size=4)
    with pytest.raises(ConfigError, match=f"takes {layout.bytes_per_block} bytes"):
        layout.num_blocks(layout.bytes_per_block - 1)


@pytest.mark.parametrize(
    "wrong", [{"num_layers": 0}, {"kv_heads": -1}, {"k_width": 2.0}, {"block_size": True}]
)
def test_a_layout_needs_positive_integers(wrong):
    shape = {"num_layers": 1, "kv_heads": 1, "k_width": 8, "v_width": 8, "dtype": F32}
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        KVLayout(**{**shape, **wrong})


def test_a_layout_needs_a_float_dtype():
    with pytest.raises(ConfigError, match="floating"):
        KVLayout(1, 1, 8, 8, torch.int32)


@pytest.mark.parametrize(
    ("model_type", "values", "heads", "k_width", "v_width"),
    [
        ("llama", {}, 4, 16, 16),
        ("llama", {"num_key_value_heads": 2}, 2, 16, 16),
        ("llama", {"num_key_value_heads": 1, "head_dim": 24}, 1, 24, 24),
        ("qwen3", {"num_key_value_heads": 2, "head_dim": 32}, 2, 32, 32),
        ("mistral", {"num_key_value_heads": 2, "sliding_window": None}, 2, 16, 16),
        ("gpt_neox", {}, 4, 16, 16),
        ("falcon", {"multi_query": True}, 1, 16, 16),
        ("deepseek_v3", {"kv_lora_rank": 32, "qk_rope_head_dim": 8}, 1, 32, 8),
    ],
)
def test_the_layout_of_a_config(model_type, values, heads, k_width, v_width):
    layout = ModelLayout.from_config(config(model_type, **values), 8, torch.float16)
    assert only(layout) == KVLayout(3, heads, k_width, v_width, torch.float16, 8)


def test_gpt2_names_its_fields_differently():
    gpt2 = transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4)
    assert only(ModelLayout.from_config(gpt2)) == KVLayout(3, 4, 16, 16, F32, 16)


def test_the_dtype_of_the_config_is_the_default():
    layout = ModelLayout.from_config(config("llama", dtype=torch.bfloat16))
    assert only(layout).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("model_type", "values", "words"),
    [
        ("qwen3_next", {"num_hidden_layers": 4}, ["qwen3_next", "linear_attention"]),
        ("deepseek_v32", {}, ["deepseek_v32", "indexed_attention"]),
        ("mamba", {}, ["mamba", "state_size", "recurrent"]),
        ("jamba", {"num_hidden_layers": 5}, ["jamba", "linear_attention"]),
        ("bart", {}, ["bart", "encoder-decoder"]),
        ("mllama", {}, ["mllama", "composite", "cross-attention", "llava"]),
        ("paligemma", {}, ["paligemma", "composite", "not causal"]),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            ["llama", "'dynamic'", "length"],
        ),
    ],
)
def test_a_model_that_cannot_be_cached_is_refused_by_name_with_the_reason(
    model_type, values, words
):
    mapping = transformers.CONFIG_MAPPING[model_type]
    refused = (
        mapping() if model_type in {"bart", "mllama", "paligemma"} else config(model_type, **values)
    )
    with pytest.raises(UnsupportedModel) as error:
        ModelLayout.from_config(refused)
    for word in words:
        assert word in str(error.value)


def test_rope_that_depends_on_the_length_is_found_wherever_it_stands():
    phi3 = transformers.Phi3Config(**TINY, pad_token_id=0)
    phi3.rope_parameters = {"full_attention": {"rope_type": "longrope"}}
    with pytest.raises(UnsupportedModel, match="longrope"):
        ModelLayout.from_config(phi3)


SLIDING = {
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


@pytest.mark.parametrize(
    ("model_type", "values", "groups"),
    [
        ("llama", {}, [("full", FullAttention(), (0, 1, 2))]),
        ("mistral", {"sliding_window": 8}, [("sliding", SlidingWindow(8), (0, 1, 2))]),
        (
            "gemma3_text",
            SLIDING,
            [("full", FullAttention(), (1,)), ("sliding", SlidingWindow(12), (0, 2))],
        ),
        (
            "llama4_text",
            {
                "attention_chunk_size": 20,
                "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
            },
            [("full", FullAttention(), (2,)), ("chunked", ChunkedAttention(20), (0, 1))],
        ),
    ],
)
def test_layers_of_one_kind_are_one_group(model_type, values, groups):
    layout = ModelLayout.from_config(config(model_type, **values), block_size=8)
    assert [(g.name, g.kind, g.layers) for g in layout.groups] == groups
    assert (layout.num_layers, layout.block_size) == (3, 8)
    assert all(g.memory.num_layers == len(g.layers) for g in layout.groups)
    assert layout.is_full_attention == (model_type == "llama")


def test_layers_of_one_kind_and_two_shapes_are_two_groups():
    gemma4 = config(
        "gemma4_text",
        **SLIDING,
        head_dim=8,
        global_head_dim=32,
        num_key_value_heads=2,
        num_kv_shared_layers=0,
    )
    full, sliding = ModelLayout.from_config(gemma4).groups
    assert (full.memory.k_width, sliding.memory.k_width) == (32, 8)
    kinds = [LayerKind("full_attention", "full", None, 0)] * 3
    shapes = [KVShape(2, 8, 8), KVShape(1, 8, 8), KVShape(2, 8, 8)]
    layout = ModelLayout.of_layers(kinds, shapes, [()] * 3, F32, 16)
    assert [(g.name, g.layers) for g in layout.groups] == [("full", (0, 2)), ("full-2", (1,))]


HYBRID = [
    LayerKind("linear_attention", None, None, 1),
    LayerKind("hybrid_sliding", "sliding", 12, 1),
    LayerKind("dummy", None, None, 0),
]
STATE = (StateShape("conv.0", (4, 3), F32), StateShape("recurrent.0", (2, 2), F32))


def hybrid_layout():
    shapes = [None, KVShape(2, 8, 8), None]
    return ModelLayout.of_layers(HYBRID, shapes, [STATE, STATE[:1], ()], F32, 16)


def test_a_hybrid_layer_belongs_to_two_groups_and_an_empty_one_to_none():
    layout = hybrid_layout()
    assert [(g.name, g.layers) for g in layout.groups] == [("sliding", (1,)), ("recurrent", (0, 1))]
    assert layout.groups[1].kind == Recurrent()
    assert layout.groups[1].bytes_per_block == (12 + 4 + 12) * 4
    assert layout.is_recurrent


def test_a_stored_dtype_changes_k_and_v_and_no_state():
    layout = hybrid_layout()
    sliding, recurrent = layout.stored_as(torch.float16).groups
    assert sliding.memory.dtype == torch.float16
    assert recurrent.memory == StateLayout((STATE, STATE[:1]))
    assert layout.stored_as(None) == layout


def test_an_interval_is_that_of_windows_and_states():
    sliding, recurrent = hybrid_layout().with_interval(64).groups
    assert sliding.kind == SlidingWindow(12, 0, 64)
    assert recurrent.kind == Recurrent(64)


def test_a_layout_without_a_layer_to_cache_is_refused():
    with pytest.raises(ConfigError, match="nothing to cache"):
        ModelLayout.of_layers(HYBRID[2:], [None], [()], F32, 16)


def test_a_config_alone_does_not_tell_the_shape_of_states():
    with pytest.raises(UnsupportedModel, match=r"linear_attention layers, .* read from a run"):
        ModelLayout.from_config(config("qwen3_next", num_hidden_layers=4))
