"""A made model with long positions that answers each prompt with the same call of a tool."""

import json
from itertools import pairwise
from typing import Any

END = "<|im_end|>"
POSITIONS = 65_536
SURE = 100.0  # the weight of the next token: no drawing of random numbers takes another one

BASH = {"command": "git status --short", "description": "Show changed files"}

TEMPLATE = r"""
{%- set has_system = messages[0].role == 'system' %}
{{- '<|im_start|>system\n' }}
{{- messages[0].content if has_system else 'You are a helpful assistant.' }}
{%- if tools %}
    {{- '\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with '
        'function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within '
        '<tool_call></tool_call> XML tags:\n<tool_call>\n'
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in messages[has_system | int:] %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content or not message.tool_calls %}{{- '\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""
"""A chat template like that of Qwen 2.5, whose calls are those of Hermes."""


def add_calls(tokenizer: Any, name: str = "Bash", arguments: Any = BASH) -> list[int]:
    """Give a tokenizer the template, and one token for each part of a call; return these, a line end before them."""
    from tokenizers import AddedToken

    called = "\n" + json.dumps({"name": name, "arguments": arguments}) + "\n"
    parts = ["<tool_call>", called, "</tool_call>"]
    tokenizer.add_tokens([AddedToken(each, normalized=False, special=False) for each in parts])
    marks = [AddedToken(each, normalized=False) for each in ("<|im_start|>", END)]
    tokenizer.add_tokens(marks, special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    (newline,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    return [newline, *tokenizer.convert_tokens_to_ids([*parts, END])]


def made_model(
    tokenizer: Any, name: str = "Bash", arguments: Any = BASH, *, layers: int = 2
) -> Any:
    """Return a model with random attention that answers each prompt with one call; gives the tokenizer its template.

    The first dimensions of the residual stream say which token of the call came last; layers do not write there.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    chain = add_calls(tokenizer, name, arguments)
    end = chain[-1]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        eos_token_id=end,
        bos_token_id=None,
    )
    torch.manual_seed(1)
    model, size = LlamaForCausalLM(config).float().eval(), len(chain)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:size] = 0
            layer.mlp.down_proj.weight[:size] = 0
        read, told = model.model.embed_tokens.weight, model.lm_head.weight
        read[:, :size], told[:] = 0, 0
        read[:, size - 1] = 1  # of a token that is not of the call the answer ends
        for at, (token, following) in enumerate(pairwise(chain)):
            read[token, size - 1], read[token, at], told[following, at] = 0, 1, SURE
        told[end, size - 1] = SURE
    return model
