"""Tiny composite models of every class that takes media."""

import functools

import torch
import transformers
from hf_help import GQA, settled

IMAGE, VIDEO, BREAK, TILE = 90, 91, 94, 95
WINDOW = 12

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
TILED = ("smolvlm", "idefics3", "idefics2")
SIZED = ("mistral3", "llava+pixtral")
AUDIO = ("qwen2_audio", "voxtral")
WINDOWED = ("gemma3", "llama4", "llava+window", "qwen2_vl+window")
ENTRIES = ("llava", "internvl", "aya_vision", "cohere2_vision", "got_ocr2", "vipllava")
MODELS = (*ENTRIES, "llava_next", *SIZED, *TILED, *WINDOWED, *QWEN, *AUDIO)

_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_CLIP = {"model_type": "clip_vision_model", **_VISION, "projection_dim": 16}
_SIGLIP = {"model_type": "siglip_vision_model", **_VISION}
_WHISPER = {
    "num_mel_bins": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "d_model": 16,
    "max_source_positions": 16,
}
_LLAMA = {"model_type": "llama", **GQA}
_QWEN2 = {"model_type": "qwen2", **GQA}
_EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "intermediate_size_mlp": 48,
}  # fmt: skip
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


def _llava(text, **vision):
    return {
        "vision_config": vision or _CLIP,
        "text_config": text,
        "image_token_id": IMAGE,
        "vision_feature_layer": -1,
    }


def _pixtral(**more):
    vision = {**_VISION, "model_type": "pixtral", "image_size": 64, "patch_size": 2, "head_dim": 8}
    return {**_llava(_LLAMA, **vision), "vision_feature_select_strategy": "full", **more}


def _tiled(**more):
    return {
        "vision_config": {**_VISION, "patch_size": 2},
        "text_config": _LLAMA,
        "image_token_id": IMAGE,
        "pad_token_id": 0,
        **more,
    }


def _qwen(vision, **text):
    return {
        "vision_config": {
            "num_heads": 4, "patch_size": 2, "temporal_patch_size": 1, "spatial_merge_size": 2, **vision,
        },
        "text_config": {**GQA, "rope_parameters": _MROPE, **text},
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": 92,
        "vision_end_token_id": 93,
    }  # fmt: skip


_QWEN2_VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 32}
_QWEN3_VISION = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32,
    "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64,
}  # fmt: skip
_VALUES = {
    "llava": _llava(_LLAMA),
    "llava+window": _llava(
        {"model_type": "mistral", **GQA, "num_hidden_layers": 2, "sliding_window": WINDOW}
    ),
    "llava+pixtral": _pixtral(),
    "mistral3": _pixtral(spatial_merge_size=2),
    "llava_next": {
        **_llava(_LLAMA),
        "image_grid_pinpoints": [[8, 16], [16, 8], [16, 16], [8, 24]],
    },
    "vipllava": {**_llava(_LLAMA), "vision_feature_layers": [-1], "vision_feature_layer": [-1]},
    "aya_vision": {
        **_llava(_LLAMA, **{**_SIGLIP, "patch_size": 2}), "downsample_factor": 2,
        "vision_feature_select_strategy": "full",
    },
    "cohere2_vision": {
        "vision_config": {**_SIGLIP, "patch_size": 2}, "text_config": _LLAMA, "image_token_id": IMAGE,
        "downsample_factor": 2, "alignment_intermediate_size": 64,
    },
    "got_ocr2": {
        "vision_config": {
            **_VISION, "image_size": 32, "patch_size": 4, "output_channels": 8, "mlp_dim": 24,
            "window_size": 2, "global_attn_indexes": [1], "initializer_range": 0.02,
        },
        "text_config": _QWEN2,
        "image_token_id": IMAGE,
    },
    "internvl": {
        "vision_config": {**_VISION, "image_size": [16, 16], "patch_size": [4, 4]},
        "text_config": _QWEN2,
        "image_token_id": IMAGE,
        "downsample_ratio": 0.5,
    },
    "smolvlm": _tiled(scale_factor=2),
    "idefics3": _tiled(scale_factor=2),
    "idefics2": _tiled(
        perceiver_config={
            "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2, "hidden_size": 32,
            "resampler_head_dim": 8, "num_key_value_heads": 1,
        }
    ),
    "gemma3": {
        "vision_config": {**_SIGLIP, "image_size": 16},
        "text_config": {
            "model_type": "gemma3_text", **GQA, "num_hidden_layers": 3, "head_dim": 8,
            "sliding_window": WINDOW, "layer_types": _KINDS, "query_pre_attn_scalar": 8,
        },
        "mm_tokens_per_image": 16,
        "image_token_id": IMAGE,
    },
    "llama4": {
        "vision_config": {
            **_VISION, "patch_size": 2, "vision_output_dim": 16, "projector_input_dim": 16,
            "projector_output_dim": 16, "pixel_shuffle_ratio": 0.5, "intermediate_size": 64,
        },
        "text_config": {
            "model_type": "llama4_text", **GQA, **_EXPERTS, "num_hidden_layers": 3, "head_dim": 8,
            "attention_chunk_size": WINDOW, "no_rope_layers": [1, 0, 1], "moe_layers": [1],
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        },
        "image_token_id": IMAGE,
    },
    "qwen2_vl": _qwen(_QWEN2_VISION),
    "qwen2_vl+window": _qwen(
        _QWEN2_VISION, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen2_5_vl": _qwen(
        {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "window_size": 8,
         "fullatt_block_indexes": [1]}
    ),
    "qwen3_vl": _qwen(_QWEN3_VISION, num_hidden_layers=3, head_dim=8),
    "qwen3_vl_moe": _qwen(
        _QWEN3_VISION, num_hidden_layers=3, head_dim=8, **_EXPERTS, decoder_sparse_step=1
    ),
    "qwen2_audio": {"audio_config": _WHISPER, "text_config": _QWEN2, "audio_token_id": IMAGE},
    "voxtral": {
        "audio_config": {
            "num_mel_bins": 8, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "max_source_positions": 16,
        },
        "text_config": _LLAMA,
        "audio_token_id": IMAGE,
    },
}  # fmt: skip


def media_config(name):
    """The config of a class's tiny model; `+` sets a variant's name off from its type."""
    return transformers.CONFIG_MAPPING[name.split("+")[0]](**_VALUES[name])


@functools.cache
def media_model(name):
    """A random model, always the same one; weights large enough to disagree."""
    torch.manual_seed(0)
    kinds = transformers.AutoModelForMultimodalLM
    model = kinds.from_config(media_config(name), dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(5.0)
                if (
                    float(weight.std()) == 0
                ):  # zeros or ones: nothing of an image would come through
                    weight.copy_(torch.randn_like(weight) / 4)
    return settled(model)
