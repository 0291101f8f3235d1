"""Tiny models of every rotary kind, with fixed seeds, and prompts of passages."""

from functools import cache
from tempfile import TemporaryDirectory

import numpy as np
import torch
import transformers

from quire_passages import Segments
from quire_passages.hf import PassageModel

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,  # attention that looks at something
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 256,
}
_MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
_MIXED = ["sliding_attention", "sliding_attention", "full_attention"]


def rope(given):
    """Return the settings of a scaled rotary embedding."""
    return {"rope_parameters": {"rope_theta": 10000.0, **given}}


MOVED = {
    "llama": ("Llama", {}),
    "llama linear": ("Llama", rope({"rope_type": "linear", "factor": 4.0})),
    "llama llama3": ("Llama", rope(_LLAMA3)),
    "llama yarn": ("Llama", rope(_YARN)),
    "llama dynamic below its maximum": ("Llama", rope({"rope_type": "dynamic", "factor": 2.0})),
    "phi3 longrope below its threshold": (
        "Phi3",
        {**rope(LONGROPE), "original_max_position_embeddings": 256},
    ),
    "phi3": ("Phi3", {}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 moe": ("Qwen3Moe", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral with windows": ("Mistral", {"sliding_window": 9}),
    "gptneox": ("GPTNeoX", {"rotary_pct": 0.25}),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "cohere": ("Cohere", {}),
    "cohere2": ("Cohere2", {"sliding_window": 9, "layer_types": _MIXED}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 9, "layer_types": _MIXED}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 9, "layer_types": _MIXED}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "olmo2": ("Olmo2", {}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.25}),
    "starcoder2": ("Starcoder2", {"sliding_window": None}),
    "deepseek v3": ("DeepseekV3", _MLA),
    "deepseek v3, halves": ("DeepseekV3", {**_MLA, "rope_interleave": False}),
    "gpt-oss": (
        "GptOss",
        {"head_dim": 16, "sliding_window": 9, "num_local_experts": 4, "layer_types": _MIXED},
    ),
    "granite": ("Granite", {}),
    "nemotron": ("Nemotron", {}),
}
"""Models whose keys can be moved: class and settings."""

REFUSED = {
    "gpt2": ("GPT2", {"n_positions": 512, "n_embd": 64, "n_layer": 3, "n_head": 4}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "mamba": ("Mamba", {"state_size": 4}),
    "qwen3 next": (
        "Qwen3Next",
        {
            "head_dim": 16,
            "num_experts": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
    ),
}
"""Models whose keys cannot."""


_KEPT = TemporaryDirectory(prefix="quire-gates-")
GATES = _KEPT.name
"""Where caches of one run of tests find what the gate has found of a model, which takes it longer than most tests."""


@cache
def passage_model_of(kind, **given):
    """A model of `MOVED` behind its gate, which tests share and do not change."""
    return PassageModel(made(*MOVED[kind], **given))


def made(name, given, seed=0, **more):
    """Return a model of a class of transformers, in eval mode, with random weights from a seed."""
    suffix = {
        "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
        "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
    }
    config_name, model_name = suffix.get(name, (f"{name}Config", f"{name}ForCausalLM"))
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**{**SMALL, **given, **more})
    return getattr(transformers, model_name)(config).eval()


def prompt(seed=0, sizes=(5, 20, 17, 30, 23, 6), vocab=128):
    """Return segments of random tokens: a head, passages, a question."""
    source = np.random.default_rng(seed)
    return Segments.of([source.integers(3, vocab, size) for size in sizes])
