"""Published models, each as the keys of its config.json that sizes depend on.

Source: the `config.json` in each model's repository on the Hugging Face hub, by the name in `_HUB`;
everything else is derived from it. Qwen3.5 and Nemotron count the language model alone, without
vision towers and multi-token prediction layers.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from quire.sim.hardware.facts import ModelFacts
from quire.sim.hardware.names import plain, unknown

Heads = tuple[int, int, int]

_FP8 = {"quantization_config": {"quant_method": "fp8"}}
_MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}


def _config(
    family: str, layers: int, hidden: int, heads: Heads, feed: int, **more: Any
) -> dict[str, Any]:
    """Return a config; `heads` are query heads, KV heads, and their width."""
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "intermediate_size": feed,
        **more,
    }


def _llama(
    layers: int, hidden: int, heads: Heads, feed: int, context: int = 131072
) -> dict[str, Any]:
    return _config(
        "llama", layers, hidden, heads, feed, vocab_size=128256, max_position_embeddings=context
    )


def _qwen3_moe(layers: int, hidden: int, heads: Heads, expert: int) -> dict[str, Any]:
    return _config(
        "qwen3_moe", layers, hidden, heads, 3 * hidden, vocab_size=151936,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=expert,
        max_position_embeddings=40960,
    )  # fmt: skip


def _deepseek(heads: int, vocab: int, experts: int, dense: int, context: int) -> dict[str, Any]:
    return _config(
        "deepseek_v3", 61, 7168, (heads, heads, 192), 18432, vocab_size=vocab,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        n_routed_experts=experts, n_shared_experts=1, num_experts_per_tok=8,
        moe_intermediate_size=2048, first_k_dense_replace=dense, max_position_embeddings=context,
        **_FP8,
    )  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _config(
        "gpt_oss", layers, 2880, (64, 8, 64), 2880, vocab_size=201088,
        num_local_experts=experts, num_experts_per_tok=4, sliding_window=128, attention_bias=True,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        max_position_embeddings=131072, **_MXFP4,
    )  # fmt: skip


def _nemotron_3(pattern: str, hidden: int, heads: Heads, **more: Any) -> dict[str, Any]:
    return _config(
        "nemotron_h", len(pattern), hidden, heads, more["moe_intermediate_size"], vocab_size=131072,
        hybrid_override_pattern=pattern, mamba_head_dim=64, ssm_state_size=128, n_groups=8,
        conv_kernel=4, mamba_ssm_cache_dtype="float32", max_position_embeddings=1048576, **more,
    )  # fmt: skip


_DEEPSEEK_V3 = _deepseek(128, 129280, 256, 3, 163840)

_HUB: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-8b": ("meta-llama/Meta-Llama-3-8B", _llama(32, 4096, (32, 8, 128), 14336, 8192)),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", _llama(32, 4096, (32, 8, 128), 14336)),
    "llama-3.1-70b": ("meta-llama/Llama-3.1-70B", _llama(80, 8192, (64, 8, 128), 28672)),
    "llama-3.3-70b": ("meta-llama/Llama-3.3-70B-Instruct", _llama(80, 8192, (64, 8, 128), 28672)),
    "llama-3.1-405b": ("meta-llama/Llama-3.1-405B", _llama(126, 16384, (128, 8, 128), 53248)),
    "llama-3.2-1b": (
        "meta-llama/Llama-3.2-1B",
        _llama(16, 2048, (32, 8, 64), 8192) | {"tie_word_embeddings": True},
    ),
    "llama-3.2-3b": (
        "meta-llama/Llama-3.2-3B",
        _llama(28, 3072, (24, 8, 128), 8192) | {"tie_word_embeddings": True},
    ),
    "mistral-7b": (
        "mistralai/Mistral-7B-Instruct-v0.3",
        _config("mistral", 32, 4096, (32, 8, 128), 14336, vocab_size=32768, max_position_embeddings=32768),
    ),
    "mixtral-8x7b": (
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        _config(
            "mixtral", 32, 4096, (32, 8, 128), 14336, vocab_size=32000,
            num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=32768,
        ),
    ),
    "qwen2.5-0.5b": (
        "Qwen/Qwen2.5-0.5B",
        _config(
            "qwen2", 24, 896, (14, 2, 64), 4864, vocab_size=151936,
            tie_word_embeddings=True, max_position_embeddings=32768,
        ),
    ),
    "qwen2.5-7b": (
        "Qwen/Qwen2.5-7B",
        _config("qwen2", 28, 3584, (28, 4, 128), 18944, vocab_size=152064, max_position_embeddings=131072),
    ),
    "qwen2.5-72b": (
        "Qwen/Qwen2.5-72B",
        _config("qwen2", 80, 8192, (64, 8, 128), 29568, vocab_size=152064, max_position_embeddings=131072),
    ),
    "qwen3-0.6b": (
        "Qwen/Qwen3-0.6B",
        _config(
            "qwen3", 28, 1024, (16, 8, 128), 3072, vocab_size=151936,
            tie_word_embeddings=True, max_position_embeddings=40960,
        ),
    ),
    "qwen3-8b": (
        "Qwen/Qwen3-8B",
        _config("qwen3", 36, 4096, (32, 8, 128), 12288, vocab_size=151936, max_position_embeddings=40960),
    ),
    "qwen3-32b": (
        "Qwen/Qwen3-32B",
        _config("qwen3", 64, 5120, (64, 8, 128), 25600, vocab_size=151936, max_position_embeddings=40960),
    ),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", _qwen3_moe(48, 2048, (32, 4, 128), 768)),
    "qwen3-235b-a22b": ("Qwen/Qwen3-235B-A22B", _qwen3_moe(94, 4096, (64, 4, 128), 1536)),
    "qwen3.5-35b-a3b": (
        "Qwen/Qwen3.5-35B-A3B",
        _config(
            "qwen3_5_moe_text", 40, 2048, (16, 2, 256), 512, vocab_size=248320,
            full_attention_interval=4, linear_num_key_heads=16, linear_num_value_heads=32,
            linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
            num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
            shared_expert_intermediate_size=512, max_position_embeddings=262144,
        ),
    ),
    "deepseek-v3": ("deepseek-ai/DeepSeek-V3", _DEEPSEEK_V3),
    "deepseek-r1": ("deepseek-ai/DeepSeek-R1", _DEEPSEEK_V3),
    "kimi-k2": ("moonshotai/Kimi-K2-Instruct", _deepseek(64, 163840, 384, 1, 131072)),
    "gpt-oss-20b": ("openai/gpt-oss-20b", _gpt_oss(24, 32)),
    "gpt-oss-120b": ("openai/gpt-oss-120b", _gpt_oss(36, 128)),
    "gemma-4-31b": (
        "google/gemma-4-31B-it",
        _config(
            "gemma4_text", 60, 5376, (32, 16, 256), 21504, vocab_size=262144,
            global_head_dim=512, num_global_key_value_heads=4, attention_k_eq_v=True,
            sliding_window=1024, layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 10,
            tie_word_embeddings=True, max_position_embeddings=262144,
        ),
    ),
    "nemotron-3-super-120b": (
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B",
        _nemotron_3(
            "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
            4096, (32, 2, 128), mamba_num_heads=128, n_routed_experts=512, num_experts_per_tok=22,
            moe_intermediate_size=2688, moe_latent_size=1024,
            moe_shared_expert_intermediate_size=5376,
        ),
    ),
    "quire-tiny": (
        "the model in this package, quire/assets/quire-tiny",
        _config(
            "llama", 5, 256, (4, 2, 64), 704, vocab_size=264,
            tie_word_embeddings=True, max_position_embeddings=8192,
        ),
    ),
}  # fmt: skip

_ENDINGS = ("-instruct", "-it", "-base", "-chat", "-hf", "-thinking", "-fp8", "-bf16")
_OTHER_NAMES = {
    "llama-3-8b-instruct": "llama-3-8b",
    "nemotron-3-super-120b-a12b": "nemotron-3-super-120b",
    "nvidia-nemotron-3-super-120b-a12b": "nemotron-3-super-120b",
    "deepseek-v3.1": "deepseek-v3",
    "deepseek-v3-0324": "deepseek-v3",
    "kimi-k2-instruct-0905": "kimi-k2",
    "tiny": "quire-tiny",
}


def model_named(name: str) -> ModelFacts:
    """Return a published model, or the one whose config.json (or its folder) is at this path.

    Case, vendor and endings such as `-Instruct` do not matter. Raises `ConfigError`, for an
    unknown name with those that resemble it.
    """
    path = Path(name).expanduser()
    if path.suffix == ".json" or (path / "config.json").is_file():
        return ModelFacts.from_config(path)
    wanted = plain(name).removeprefix("meta-")
    while wanted not in _HUB:
        other = _OTHER_NAMES.get(wanted) or next(
            (wanted.removesuffix(end) for end in _ENDINGS if wanted.endswith(end)), None
        )
        if not other:
            raise unknown("model", name, _HUB, "pass the path of its config.json")
        wanted = other
    return _facts(wanted)


def model_names() -> list[str]:
    """Return the names of all published models that are known."""
    return list(_HUB)


def hub_name(name: str) -> str:
    """Return where the config of a known model was published."""
    return _HUB[name][0]


@cache
def _facts(name: str) -> ModelFacts:
    return ModelFacts.from_config(_HUB[name][1], name)
