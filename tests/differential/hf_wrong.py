"""Models that a prefix cache would get wrong: classes of transformers, and mutations of healthy ones."""

import copy

import torch
import transformers
from hf_help import VOCAB, loud
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 256,
    "is_decoder": True,
    "is_encoder_decoder": False,
    **_IDS,
}
_BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    **_IDS,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
COUNTING = {
    **dict.fromkeys(
        ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "mbart", "mvp", "pegasus"),
        _DECODER,
    ),
    "plbart": _DECODER,
    "marian": {**_DECODER, "decoder_vocab_size": VOCAB},
    "trocr": _DECODER,
    "whisper": {
        **_DECODER,
        "max_target_positions": 256,
        "max_source_positions": 32,
        "num_mel_bins": 8,
        "begin_suppress_tokens": None,
        "suppress_tokens": None,
    },
    "roformer": {**_BERT, "embedding_size": 32, "is_decoder": True},
    "git": {**_BERT, "vision_config": _VISION},
}
"""Decoders whose positions count padding."""

_LONG = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
LONG = {
    "moshi": {**_LONG, "ffn_dim": 48, "head_dim": 8, "sliding_window": 64},
    "doge": {**_LONG, "intermediate_size": 48, "num_key_value_heads": 2, "keep_window_size": 64},
}
"""Models that are wrong past a window or a threshold, whose short texts show nothing."""


def wrong_model(family):
    """A random model of a family of `COUNTING` or `LONG`."""
    values = {**COUNTING, **LONG}[family]
    configs = {"trocr": transformers.TrOCRConfig}
    config = (configs.get(family) or transformers.CONFIG_MAPPING[family])(**values)
    return built(getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]), config)


def built(model_class, config):
    """A random model of a class, with weights large enough to disagree."""
    torch.manual_seed(0)
    model = loud(model_class._from_config(config, dtype=torch.float32).eval())
    model.generation_config.pad_token_id = 0
    return model


class CountsPadding(transformers.LlamaForCausalLM):
    """Counts positions by columns."""

    def forward(self, input_ids=None, past_key_values=None, position_ids=None, **arguments):
        start = past_key_values.get_seq_length() if past_key_values is not None else 0
        columns = torch.arange(start, start + input_ids.shape[1])[None]
        return super().forward(
            input_ids, past_key_values=past_key_values, position_ids=columns, **arguments
        )


class SeesPadding(transformers.LlamaForCausalLM):
    """Looks at padding."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **arguments):
        if attention_mask is not None:
            attention_mask = torch.ones_like(attention_mask)
        return super().forward(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, **arguments
        )


class MasksNoWindow(transformers.MistralForCausalLM):
    """Looks at everything that it is given, though its config names a window."""

    def __init__(self, config):
        super().__init__(config)
        self.model.config = copy.deepcopy(config)
        self.model.config.sliding_window = None


class KeepsState(transformers.LlamaForCausalLM):
    """Adds to its embeddings what the call before has left."""

    left = 0.0

    def forward(self, input_ids=None, past_key_values=None, position_ids=None, **arguments):
        start = past_key_values.get_seq_length() if past_key_values is not None else 0
        arguments.pop("inputs_embeds", None)
        embeds = self.model.embed_tokens(input_ids)
        if start:
            embeds = embeds + self.left
        self.left = embeds[:, -1:].mean()
        return super().forward(
            inputs_embeds=embeds,
            past_key_values=past_key_values,
            position_ids=position_ids,
            **arguments,
        )


class ChangesAtLength(transformers.LlamaForCausalLM):
    """Computes whole inputs twice as long as `config.rope_window` otherwise."""

    def forward(self, input_ids=None, position_ids=None, **arguments):
        embeds = self.model.embed_tokens(input_ids)
        if input_ids.shape[1] > 2 * self.config.rope_window:
            embeds = embeds * 0.5
        return super().forward(inputs_embeds=embeds, position_ids=position_ids, **arguments)


class SeesTheEnd(transformers.LlamaForCausalLM):
    """Shifts every token by the last one of the input."""

    def forward(self, input_ids=None, position_ids=None, **arguments):
        embeds = self.model.embed_tokens(input_ids)
        embeds = embeds + embeds[:, -1:]
        return super().forward(inputs_embeds=embeds, position_ids=position_ids, **arguments)


class CannotBeSmall(transformers.LlamaForCausalLM):
    """Has no twin: its weights are made for one vocabulary."""

    def __init__(self, config):
        if config.vocab_size != CannotBeSmall.vocab_size:
            raise ValueError(f"made for {CannotBeSmall.vocab_size} tokens")
        super().__init__(config)

    vocab_size = 300


MUTATIONS = {
    CountsPadding: "a short check",
    SeesPadding: "a short check",
    KeepsState: "a short check",
    SeesTheEnd: "a short check",
    MasksNoWindow: "computed before",
    ChangesAtLength: "computed before",
}
"""The check of the battery that finds each."""


def mutant(model_class, **changes):
    """A random model of a mutated class, with a window or threshold far past a short check."""
    values = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_window": 4096,
        **_IDS,
        **changes,
    }
    if issubclass(model_class, transformers.MistralForCausalLM):
        return built(model_class, transformers.MistralConfig(**values, sliding_window=4096))
    return built(model_class, transformers.LlamaConfig(**values))
