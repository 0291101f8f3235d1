"""A tiny Llama under every kind of adapter that the installed PEFT registers."""

import warnings

import peft
import torch
from hf_help import own
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

KINDS = {kind.value: config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}

LEARNED_PROMPTS = {"PREFIX_TUNING", "PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING"} | {
    "CPT",
    "CARTRIDGE",
}

_TARGETS = {"target_modules": ["k_proj", "v_proj"]}
SETTINGS = {
    "LORA": {**_TARGETS, "r": 2, "lora_alpha": 8, "init_lora_weights": False},
    "ADALORA": {**_TARGETS, "init_r": 4, "target_r": 2, "total_step": 10},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 1},
    "C3A": {**_TARGETS, "block_size": 8},
    "FOURIERFT": {**_TARGETS, "n_frequency": 40},
    "LN_TUNING": {"target_modules": ["input_layernorm", "norm"]},
    "MISS": {**_TARGETS, "r": 4},
    "BOFT": {**_TARGETS, "boft_block_size": 4},
    "OFT": {**_TARGETS, "oft_block_size": 4, "r": 0},
    "HRA": {**_TARGETS, "r": 4},
    "PSOFT": {**_TARGETS, "r": 4},
    "ROAD": {**_TARGETS, "group_size": 8},
    "SHIRA": {**_TARGETS, "r": 4},
    "TRAINABLE_TOKENS": {"token_indices": [5, 8, 13], "target_modules": ["embed_tokens"]},
    "VBLORA": {**_TARGETS, "vector_length": 8, "num_vectors": 8},
    "WAVEFT": {**_TARGETS, "n_frequency": 40},
    "IA3": {**_TARGETS, "feedforward_modules": []},
    "SHADOW": {"target_modules": ["q_proj", "o_proj"]},
    "XLORA": {},
    "POLY": {**_TARGETS, "n_tasks": 1, "n_skills": 1},
}
VARIANTS = {
    "LORA+dora": ("LORA", {**SETTINGS["LORA"], "use_dora": True}),
    "LORA+tokens": ("LORA", {**SETTINGS["LORA"], "trainable_token_indices": [5, 8]}),
    "LORA+embedding": ("LORA", {**SETTINGS["LORA"], "target_modules": ["embed_tokens", "q_proj"]}),
    "LORA+saved": ("LORA", {**SETTINGS["LORA"], "modules_to_save": ["input_layernorm"]}),
    "LORA+bias": ("LORA", {**SETTINGS["LORA"], "lora_bias": True}),
    "LORA+parameters": (
        "LORA",
        {"r": 2, "target_modules": [], "target_parameters": ["q_proj.weight", "v_proj.weight"]},
    ),
}


class CannotBuildError(Exception):
    """PEFT cannot make this kind of adapter here, or its model cannot generate."""


def config_of(kind):
    """A config of a kind, or of a variant of it."""
    kind, settings = VARIANTS.get(kind, (kind, SETTINGS.get(kind, _TARGETS)))
    if kind in LEARNED_PROMPTS:
        settings = {"num_virtual_tokens": 4}
        if kind == "CPT":
            settings = {"cpt_token_ids": [5, 6, 7], "cpt_tokens_type_mask": [1, 2, 3]}
    settings = dict(settings)
    if kind == "ADAPTION_PROMPT":
        settings["target_modules"] = "self_attn"
    return KINDS[kind](task_type="CAUSAL_LM", **settings)


def wrapped_model(kind, seed=0):
    """A model with one random adapter, called `default`. Raises `CannotBuildError`."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wrapped = peft.get_peft_model(own("llama"), config_of(kind))
            wrapped.eval()
            with torch.no_grad():
                wrapped.get_base_model()(torch.tensor([[3, 4, 5]]))
        except Exception as error:
            raise CannotBuildError(f"{type(error).__name__}: {error}") from error
    disturb(wrapped)
    return wrapped


def disturb(wrapped, by=0.2):
    """Change what can be trained, as a step of an optimizer does."""
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=by)
