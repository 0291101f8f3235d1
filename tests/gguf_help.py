"""GGUF files of tiny models: what llama.cpp's converters write, in plain numbers."""

import json

import numpy as np

PER_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LFM2_TOP = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm",
            "output": "lm_head"}  # fmt: skip
LFM2_EACH = {
    "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2",
}  # fmt: skip
LFM2_ATTENTION = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
}  # fmt: skip
LFM2_CONV = {
    "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
}  # fmt: skip
MAMBA_TOP = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
}
MAMBA_EACH = {
    "attn_norm": "norm", "ssm_in": "mixer.in_proj", "ssm_conv1d": "mixer.conv1d", "ssm_x": "mixer.x_proj",
    "ssm_dt": "mixer.dt_proj", "ssm_out": "mixer.out_proj",
}  # fmt: skip


def write_llama(path, model, tokenizer, *, title="a model", dtype=np.float32, merges=(), part=0):
    """Write a Llama of transformers and its byte-level tokenizer as a GGUF file; return the path.

    merges  pairs, where the tokenizer has none: llama.cpp wants some
    part    tensors of each of several files, of which the path is the beginning; 0 for one file
    """
    import gguf

    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=part)
    writer.add_name(title)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        for add in (
            writer.add_key_length,
            writer.add_value_length,
            writer.add_rope_dimension_count,
        ):
            add(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_tokenizer(writer, config, tokenizer, merges)
    names = dict(TOP)
    for index in range(config.num_hidden_layers):
        names |= {f"blk.{index}.{k}": f"model.layers.{index}.{v}" for k, v in PER_LAYER.items()}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, own in names.items():
        values = state[f"{own}.weight"].float().numpy()
        if num_heads := heads.get(
            name.rpartition(".")[2]
        ):  # llama.cpp pairs neighbours in its rope
            halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, -1)
            values = halves.swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(f"{name}.weight", values.astype(dtype if values.ndim > 1 else np.float32))
    return _written(writer, path)


def write_lfm2(path, model, tokenizer, window=None):
    """Write an LFM2 of transformers, of attention and convolutions, as `write_llama` does."""
    import gguf

    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "lfm2")
    kinds = config.layer_types
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(len(kinds))
    writer.add_feed_forward_length(state["model.layers.0.feed_forward.w1.weight"].shape[0])
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([config.num_key_value_heads * (each != "conv") for each in kinds])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    if window is not None:
        writer.add_sliding_window(window)
    _add_tokenizer(writer, config, tokenizer, ())
    names = dict(LFM2_TOP)
    for index, kind in enumerate(kinds):
        each = LFM2_EACH | (LFM2_CONV if kind == "conv" else LFM2_ATTENTION)
        names |= {f"blk.{index}.{k}": f"model.layers.{index}.{v}" for k, v in each.items()}
    for name, own in names.items():
        values = state[f"{own}.weight"].float().numpy()
        writer.add_tensor(f"{name}.weight", values.squeeze(1) if values.ndim == 3 else values)
    return _written(writer, path)


def write_mamba(path, model, tokenizer):
    """Write a Mamba of transformers as `write_llama` does."""
    import gguf

    config, state = model.config, {k: v.float().numpy() for k, v in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(config.intermediate_size)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(config.time_step_rank)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    _add_tokenizer(writer, config, tokenizer, ())
    for name, own in MAMBA_TOP.items():
        writer.add_tensor(f"{name}.weight", state[f"{own}.weight"])
    for index in range(config.num_hidden_layers):
        layer, theirs = f"backbone.layers.{index}", f"blk.{index}"
        for name, own in MAMBA_EACH.items():
            values = state[f"{layer}.{own}.weight"]
            values = values.squeeze(1) if values.ndim == 3 else values
            writer.add_tensor(f"{theirs}.{name}.weight", np.ascontiguousarray(values))
            if f"{layer}.{own}.bias" in state:
                writer.add_tensor(f"{theirs}.{name}.bias", state[f"{layer}.{own}.bias"])
        writer.add_tensor(f"{theirs}.ssm_a", -np.exp(state[f"{layer}.mixer.A_log"]))
        writer.add_tensor(f"{theirs}.ssm_d", state[f"{layer}.mixer.D"])
    return _written(writer, path)


def _add_tokenizer(writer, config, tokenizer, merges):
    import gguf

    writer.add_vocab_size(config.vocab_size)
    inside = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = tokenizer.convert_ids_to_tokens(range(config.vocab_size))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token or f"[{index}]" for index, token in enumerate(tokens)])
    writer.add_token_scores([0.0] * len(tokens))
    special = set(tokenizer.get_added_vocab().values())
    kinds = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([kinds[index in special] for index in range(len(tokens))])
    merges = inside["merges"] or merges
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _written(writer, path):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
