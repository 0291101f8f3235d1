"""LoRA adapters of quire-tiny, made by PEFT, and what transformers computes with them."""

import copy

import peft
import torch

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def adapted(base, folder, seed, **settings):
    """Save a random adapter of a model to a folder, and return a copy of the model with it."""
    torch.manual_seed(seed)
    given = {
        "r": 4,
        "lora_alpha": 16,
        "target_modules": list(TARGETS),
        "init_lora_weights": False,
    } | settings
    model = peft.get_peft_model(
        copy.deepcopy(base), peft.LoraConfig(task_type="CAUSAL_LM", **given)
    )
    model.eval().save_pretrained(folder)
    return model


def is_likeliest(reference, prompt, answer):
    """Whether a reference finds each token of an answer the likeliest one, forced to the ones before it."""
    with torch.inference_mode():
        logits = reference(input_ids=torch.tensor([[*prompt, *answer]])).logits[0]
    found = logits[len(prompt) - 1 : -1]
    chosen = found[torch.arange(len(answer)), torch.tensor(answer)]
    return bool((found.amax(-1) - chosen <= 1e-4).all())
