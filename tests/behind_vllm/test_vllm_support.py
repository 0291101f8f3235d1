"""Refusals of vLLM configs by the connector: by name and with the reason."""

from types import SimpleNamespace

import pytest

from quire.engines.vllm.support import GROUPS, REFUSED, check_supported
from quire.errors import ConfigError


def config(method=None, **parallel):
    parallel = {"tensor_parallel_size": 1, **parallel}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 3, use_mla=False),
        speculative_config=SimpleNamespace(method=method) if method else None,
    )


def group(kind, block_size=16):
    return SimpleNamespace(kv_cache_spec=type(kind, (), {"block_size": block_size})())


@pytest.mark.parametrize("kind", [*REFUSED, "NewSpec"])
def test_other_layer_groups_are_refused_with_the_reason(kind):
    why = REFUSED.get(kind, "does not know")
    with pytest.raises(ConfigError, match=f"layers of {kind}: .*{why}"):
        check_supported(config(), [group("FullAttentionSpec"), group(kind)], {})


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "draft_model"])
def test_drafting_models_are_refused_and_drafts_from_the_text_are_not(method):
    with pytest.raises(ConfigError, match=method):
        check_supported(config(method), [group("FullAttentionSpec")], {})
    for each in ("ngram", "suffix"):
        check_supported(config(each), [group(kind) for kind in GROUPS], {})


@pytest.mark.parametrize(
    "name",
    [
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
        "nnodes",
        "tensor_parallel_size",
    ],
)
def test_other_divisions_of_a_model_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=name):
        check_supported(config(**{name: 2}), [group("FullAttentionSpec")], {})


def test_several_block_sizes_and_unknown_options_are_refused():
    with pytest.raises(ConfigError, match=r"\[16, 32\]"):
        check_supported(config(), [group("FullAttentionSpec"), group("SlidingWindowSpec", 32)], {})
    with pytest.raises(ConfigError, match="tires"):
        check_supported(config(), [group("FullAttentionSpec")], {"tires": []})
