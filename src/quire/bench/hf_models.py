"""The models that the transformers rows are measured on."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from quire.assets import demo_model


def quire_tiny() -> Any:
    """Load quire-tiny in float32, in eval mode, on the CPU."""
    models: Any = AutoModelForCausalLM
    return models.from_pretrained(demo_model(), dtype=torch.float32).eval()


def random_llama(hidden: int, layers: int) -> Any:
    """Make a Llama of random weights (seed 0), float32, in eval mode, on the CPU."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 256, 1),
        max_position_embeddings=8192,
        initializer_range=0.05,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng():  # pyright: ignore[reportUnknownMemberType]
        torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
        return LlamaForCausalLM(config).eval()
