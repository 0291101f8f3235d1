"""GGUF files of tiny models: what llama.cpp's converters write, in plain numbers."""

import json

import numpy as np

PER_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def write_llama(path, model, tokenizer, *, title="a model", dtype=np.float32, merges=()):
    """Write a Llama of transformers and its byte-level tokenizer as a GGUF file; return the path.

    merges  pairs, where the tokenizer has none: llama.cpp wants some
    """
    import gguf

    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
