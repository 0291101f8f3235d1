"""Every causal LM that the installed transformers registers, as a tiny model of random weights."""

import functools

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.engines.models.twin import shrunk
from quire.tensors.kinds import MEDIA_MODELS

PAD, EOS = 0, 2

_SECTIONS = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
# What a class needs beyond its config's defaults, with which it has no use or cannot be built.
NEEDED = {
    "bamba": {"attn_layer_indices": [2]},
    "blenderbot": {"encoder_layers": 2, "decoder_layers": 2},  # the cache is made for its encoder
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_shared_experts": 2, "n_routed_experts": 64, "num_experts_per_tok": 6},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "mistral3": {
        "image_token_index": 131000
    },  # behind ordinary ids, where texts of requests do not reach
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "qwen2_vl": {"text_config": {"rope_parameters": _SECTIONS}},
    "qwen2_5_vl": {"text_config": {"rope_parameters": _SECTIONS}},
    "reformer": {"axial_pos_embds": False},
    "voxtral": {"audio_token_id": 130000},
    "xmod": {"default_language": "en_XX"},
}
# The same class with other layers than its defaults give.
VARIANTS = {
    "mistral": {"mistral without a window": {"sliding_window": None}},
    "qwen2": {"qwen2 with a window": {"use_sliding_window": True, "max_window_layers": 14}},
    "phi3": {
        "phi3 with longrope": {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "long_factor": [2.0] * 48,
                "short_factor": [1.0] * 48,
                "original_max_position_embeddings": 4096,
            }
        }
    },
    "llama": {
        "llama with yarn": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 2048,
            }
        }
    },
}


class CannotBeBuilt(Exception):  # noqa: N818 - what is known of a class, not an error
    """There is no model of a class to compare with; the reason is the message."""


def registered():
    """The names of all causal LMs that transformers registers, of ours with media, and variants."""
    names = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *sorted(MEDIA_MODELS)]
    variants = [variant for of_one in VARIANTS.values() for variant in of_one]
    return list(dict.fromkeys([*names, *variants]))


def config_of(name):
    """The shrunk config of a class or variant."""
    kind = next((kind for kind, given in VARIANTS.items() if name in given), name)
    given = {**NEEDED.get(kind, {}), **VARIANTS.get(kind, {}).get(name, {})}
    config = CONFIG_MAPPING[kind](**given)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True  # an encoder's class looks at all tokens otherwise
    return shrunk(config)


@functools.lru_cache(maxsize=2)
def tiny(name):
    """A model of random weights, always the same ones, so large that all context counts.

    Raises `CannotBeBuilt` with what transformers says.
    """
    torch.manual_seed(0)
    try:
        config = config_of(name)
        media = name in MEDIA_MODELS and name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        auto = AutoModelForImageTextToText if media else AutoModelForCausalLM
        model = _AUTO.get(name, auto).from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1 and weight.std() < 0.05:
                    weight.mul_(5.0)
        model.generation_config.pad_token_id = PAD
        model.generation_config.eos_token_id = EOS
        model.generation_config.do_sample = False
        model.generate(
            torch.arange(3, 12)[None], attention_mask=torch.ones(1, 9).long(), max_new_tokens=2
        )
    except Exception as error:
        raise CannotBeBuilt(f"{type(error).__name__}: {_on_one_line(error)}") from error
    return model


_AUTO = {
    "qwen2_audio": transformers.AutoModelForSeq2SeqLM,
    "voxtral": transformers.AutoModelForSeq2SeqLM,
}


def _on_one_line(error):
    """The message of an error, on one line."""
    return " ".join(str(error).split())[:200]
