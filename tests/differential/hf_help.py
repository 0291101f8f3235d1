"""Tiny models of many families, and the comparison that all differential tests make."""

import copy
import functools
import inspect
import weakref
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

import quire
from quire import ops
from quire.engines.hf import PrefixCache
from quire.engines.hf.pools import first_token
from quire.engines.models.adapters import inside
from quire.engines.models.probe import probe_model

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

VOCAB = 97
PAD, EOS = 0, 2
TRAINED = Path(quire.__file__).parent / "assets" / "quire-tiny"


class StopHereError(Exception):
    """An error that a test raises within a forward."""


_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
GQA = {**_SMALL, "num_key_value_heads": 2}
_EXPERTS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}
_GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024}
FAMILIES = {
    "llama": GQA,
    "qwen2": GQA,
    "qwen3": {**GQA, "head_dim": 12},
    "mistral": {**GQA, "sliding_window": None},
    "phi": _SMALL,
    "gpt_neox": _SMALL,
    "deepseek_v3": {
        **_SMALL,
        **_EXPERTS,
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
    },
    "gpt2": _GPT,
}
MORE_FAMILIES = {
    "mixtral": {**GQA, **_EXPERTS, "sliding_window": None},
    "falcon": {**_SMALL, "multi_query": True, "new_decoder_architecture": False},
    "gpt_bigcode": _GPT,
    "gpt_neo": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 16,
    },
    "bloom": {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 512},
    "opt": {**_SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gemma": {**GQA, "head_dim": 8},
    "phi3": GQA,
    "stablelm": GQA,
    "olmo2": GQA,
    "glm4": {**GQA, "head_dim": 8},
    "cohere": GQA,
    "granite": GQA,
    "starcoder2": {**GQA, "sliding_window": None},
}
_THREE = {**GQA, "num_hidden_layers": 3, "head_dim": 8}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
_LINEAR = ["linear_attention", "full_attention", "linear_attention"]
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 4,
}
_MORE_EXPERTS = {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}
WINDOWED_FAMILIES = {
    "gemma2": {**_THREE, "sliding_window": 12, "layer_types": _SLIDING},
    "gemma3_text": {**_THREE, "sliding_window": 20, "layer_types": _SLIDING},
    "mistral+window": {**_THREE, "sliding_window": 8},
    "gpt_oss": {**_THREE, **_EXPERTS, "sliding_window": 12, "layer_types": _SLIDING},
    "llama4_text": {
        **_THREE,
        **_EXPERTS,
        "attention_chunk_size": 12,
        "intermediate_size_mlp": 48,
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        "no_rope_layers": [1, 0, 1],
        "moe_layers": [1],
    },
}
RECURRENT_FAMILIES = {
    "qwen3_next": {**_THREE, **_MORE_EXPERTS, **_DELTA, "layer_types": _LINEAR},
    "bamba": {**_THREE, **_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_THREE, **_MAMBA, "mamba_d_ssm": 64},
    "lfm2": {
        **_THREE,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "block_multiple_of": 8,
    },
    "lfm3": {
        **_THREE,
        **_MORE_EXPERTS,
        "layer_types": ["conv", "full_attention", "sliding_attention"],
        "sliding_window": 12,
    },
}
MORE_HYBRID_FAMILIES = {
    "gemma3n_text": {
        **_THREE,
        "num_hidden_layers": 4,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "vocab_size_per_layer_input": VOCAB,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        **_THREE,
        "num_hidden_layers": 4,
        "global_head_dim": 16,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
    },
    "cohere2": {**_THREE, "sliding_window": 12, "layer_types": _SLIDING},
    "olmo3": {**_THREE, "sliding_window": 12, "layer_types": _SLIDING},
    "exaone4": {**_THREE, "sliding_window": 12, "layer_types": _SLIDING},
    "qwen3_5_text": {**_THREE, **_MORE_EXPERTS, **_DELTA, "layer_types": _LINEAR},
    "olmo_hybrid": {**_THREE, **_DELTA, "layer_types": _LINEAR},
    "granitemoehybrid": {
        **_THREE,
        **_MORE_EXPERTS,
        **_MAMBA,
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 32,
    },
    "zamba2": {
        **_THREE,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "chunk_size": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "hybrid_layer_ids": [1],
        "num_mem_blocks": 1,
        "use_mamba_kernels": False,
    },
    "nemotron_h": {
        **_THREE,
        **_MORE_EXPERTS,
        "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "chunk_size": 4,
    },
    "inkling_text": {
        **_THREE,
        **_MORE_EXPERTS,
        "sliding_window": 12,
        "local_layer_ids": [0, 2],
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "d_rel": 4,
        "rel_extent": 64,
    },
}
REFUSED_FAMILIES = {
    "jamba": {
        **_THREE,
        **_MORE_EXPERTS,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "recurrent_gemma": {
        **_THREE,
        "lru_width": 32,
        "attention_window_size": 12,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "minimax": {**_THREE, **_MORE_EXPERTS, "layer_types": _LINEAR, "block_size": 4},
}
HYBRID_FAMILIES = {**WINDOWED_FAMILIES, **RECURRENT_FAMILIES}
ALL_FAMILIES = {**FAMILIES, **MORE_FAMILIES, **HYBRID_FAMILIES, **MORE_HYBRID_FAMILIES}


def tiny_config(family, **changes):
    """The config of a family's tiny model; `+` sets a variant's name off from its type."""
    values = {**ALL_FAMILIES, **REFUSED_FAMILIES}[family] | changes
    return transformers.CONFIG_MAPPING[family.split("+")[0]](**values)


def sow(seed):
    """Seed torch as `manual_seed` does, which notes each call with its traceback for a CUDA device that may come."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


@functools.cache
def tiny_model(family, seed=0, dtype=torch.float32, **changes):
    """A random model of a family, always the same one; weights large enough to disagree."""
    sow(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=dtype).eval()
    return settled(loud(model))


@functools.cache
def trained_model():
    """The byte-level model that ships with quire, in float32."""
    return settled(AutoModelForCausalLM.from_pretrained(TRAINED, dtype=torch.float32).eval())


def loud(model):
    """A random model whose weights are large enough to disagree."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1 and weight.std() < 0.05:
                weight.mul_(5.0)
    return model


def settled(model):
    """A model that says what padding and an end are, and does not sample."""
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = EOS
    model.generation_config.do_sample = False
    return model


_GROUP_NAMES = weakref.WeakKeyDictionary()


def group_names(model):
    """The names of a model's layer groups, probed once for as long as it lives."""
    model = inside(model)
    if model not in _GROUP_NAMES:
        groups = probe_model(model, 16)[1].groups
        _GROUP_NAMES[model] = tuple(group.name for group in groups)
    return _GROUP_NAMES[model]


def own(family):
    """A copy of a family's model, for a test to change."""
    return copy.deepcopy(tiny_model(family))


def make_cache(model, *, num_blocks=400, block_size=16, **options):
    """A debug cache of so many blocks in each layer group: fresh memory is NaN.

    No twin is asked: what is computed is compared, and tests of the battery ask one of each family.
    """
    if not isinstance(num_blocks, dict):
        num_blocks = dict.fromkeys(group_names(model), num_blocks)
    return PrefixCache(model, num_blocks, block_size, **{"debug": True, "verify": None, **options})


def random_ids(generator, num_tokens, rows=1):
    """Token ids that are neither padding nor an end."""
    return torch.randint(3, VOCAB, (rows, num_tokens), generator=generator)


def prompt(num_tokens, seed=0):
    """A prompt of such ids, `[1, num_tokens]`, always the same one."""
    return random_ids(torch.Generator().manual_seed(seed), num_tokens)


def left_padded(texts):
    """Texts of different lengths as `[rows, columns]` ids and mask."""
    columns = max(len(text) for text in texts)
    ids = torch.full((len(texts), columns), PAD)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, columns - len(text) :] = text
        mask[row, columns - len(text) :] = 1
    return ids, mask


def same(model, cache, ids, *, attention_mask=None, scope=None, store_until=None, **arguments):
    """Generate with and without quire, demand the same tokens and logits, return the tokens."""
    arguments = {"max_new_tokens": 5, **arguments}
    both = []
    for generate, extra in (
        (model.generate, {}),
        (cache.generate, {"scope": scope, "store_until": store_until}),
    ):
        sow(5)
        both.append(
            generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids) if attention_mask is None else attention_mask,
                return_dict_in_generate=True,
                output_logits=True,
                **extra,
                **arguments,
            )
        )
    plain, reused = both
    assert torch.equal(plain.sequences, reused.sequences)
    for one, two in zip(plain.logits, reused.logits, strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)
    ops.check(cache.manager)
    assert cache.manager.num_active == 0
    return reused.sequences


def check_stored(model, cache, tokens, scope=None):
    """Check that the pools hold a cached prefix as a fresh forward computes it; return its length."""
    store, factory = cache.kept.store, cache._calls.factory
    ids = tokens.numpy().astype("int32")
    seq = store.open(ids, cache.kept.identity.scope(scope))
    try:
        length = seq.num_cached
        if length == 0:
            return 0
        held = [
            [_room(factory.like(memory, 1), length - first_token(group.kind, length))]
            * memory.num_layers
            for group, memory in factory.token_groups
        ]
        held = [[(k.clone(), v.clone()) for k, v in layers] for layers in held]
        store.load(seq, length, held)
        states = store.load_states(seq) if cache.layout.is_recurrent else []
        fresh = factory.cache(tokens[None], np.zeros(1, dtype=np.int64))
        arguments = {"past_key_values": fresh, "use_cache": True}
        if "position_ids" in inspect.signature(model.forward).parameters:
            arguments["position_ids"] = torch.arange(length)[None]
        with torch.no_grad():
            model(tokens[None, :length], **arguments)
        for (group, _), layers in zip(factory.token_groups, held, strict=True):
            first = first_token(group.kind, length)
            for layer, kv in zip(group.layers, layers, strict=True):
                for one, two in zip(kv, fresh.kv_layers[layer].row(0, first, length), strict=True):
                    torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-3)
        if cache.layout.is_recurrent:
            assert len(states) == len(fresh.state_layers)
            for one_layer, two_layer in zip(states, fresh.row_states(0), strict=True):
                for one, two in zip(one_layer, two_layer, strict=True):
                    torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-3)
        return length
    finally:
        cache.manager.close(seq)


def _room(like, num_tokens):
    return tuple(part[0].expand(-1, num_tokens, -1).clone() for part in like)
