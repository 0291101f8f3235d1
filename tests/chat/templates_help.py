"""Chat templates like those of models, by the format of their tool calls."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from made_agent import TEMPLATE as HERMES

MISTRAL = """\
<s>{%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'system' %}{{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{- raise_exception('ids have nine letters') }}{% endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids have nine letters') }}{% endif %}
            {%- set text = call.function | tojson %}
            {{- text[:-1] + ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']</s>' }}
        {%- endfor %}
    {%- else %}{{- ' ' + message.content + '</s>' }}
    {%- endif %}
{%- endfor %}"""
"""Like that of Mistral 7B v0.3, whose calls have ids of nine letters."""

MISTRAL_NAMED = """\
<s>{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'system' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
        {%- endfor %}
        {{- '</s>' }}
    {%- else %}{{- message.content + '</s>' }}
    {%- endif %}
{%- endfor %}"""
"""Like that of Mistral Small 3.2, in which the name stands before the arguments."""

LLAMA3 = """\
<|begin_of_text|>{%- if tools %}<|start_header_id|>system<|end_header_id|>

Environment: ipython
{{ tools | tojson(indent=4) }}<|eot_id|>{% endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
"""Like that of Llama 3.1."""

XML = """\
{%- for tool in tools or [] %}<tool>{{ tool.function.name }}</tool>{% endfor %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
    {%- for call in message.tool_calls or [] %}<call={{ call.function.name }}>
        {%- for key, value in call.function.arguments.items() %}<{{ key }}>{{ value }}</{{ key }}>{% endfor %}</call>
    {%- endfor %}<eos>
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
"""A template that writes calls otherwise than as JSON."""

SPECIAL = {
    "hermes": (HERMES, "<|im_end|>", ("<|im_start|>",)),
    "mistral": (MISTRAL, "</s>", ("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")),
    "mistral_named": (MISTRAL_NAMED, "</s>", ("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")),
    "llama3": (LLAMA3, "<|eot_id|>", ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")),
    "xml": (XML, "<eos>", ()),
}  # fmt: skip
"""By name: a template, the token that ends an answer, and its other special tokens."""

TAGS = ("<tool_call>", "</tool_call>")
"""Tokens of Qwen's vocabularies that are not special."""


def dressed(tokenizer, name):
    """Give a tokenizer a template and its tokens; return the id of the token that ends an answer."""
    from tokenizers import AddedToken

    template, end, special = SPECIAL[name]
    tokenizer.chat_template = template
    marks = [AddedToken(each, normalized=False) for each in (end, *special)]
    tokenizer.add_tokens(marks, special_tokens=True)
    if name == "hermes":
        tokenizer.add_tokens([AddedToken(each, normalized=False, special=False) for each in TAGS])
    tokenizer.eos_token = end
    return tokenizer.convert_tokens_to_ids(end)


QWEN3 = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{- '<|im_start|>system\\n<tools>' + (tools | tojson) + '</tools><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set thought = message.reasoning_content or '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
"""Like that of Qwen3: it has the reasoning of answers behind the last question, as between calls of tools."""

DEEPSEEK_R1 = """\
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|User|>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<|Assistant|>' + message.content.split('</think>')[-1] + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{% endif %}"""
"""Like that of DeepSeek-R1: the prompt opens the reasoning, and no earlier one is there."""

GPT_OSS = """\
{%- for tool in tools or [] %}{{- '<|start|>developer<|message|>' + (tool.function | tojson) + '<|end|>' }}{% endfor %}
{%- set called = namespace(name='') %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- set later = namespace(ends=false) %}
        {%- for other in messages[loop.index:] %}
            {%- if other.role == 'assistant' and not other.tool_calls %}{% set later.ends = true %}{% endif %}
        {%- endfor %}
        {%- if message.content and message.thinking %}{{- raise_exception('Cannot pass both content and thinking') }}{% endif %}
        {%- if (message.content or message.thinking) and not later.ends %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}{% set called.name = call.name %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson }}{{- '<|call|>' }}
    {%- elif message.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson }}{{- '<|end|>' }}
    {%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""
"""Like that of gpt-oss: it has the analysis before calls as long as no final answer followed."""

KEEPING = QWEN3.replace("loop.index0 > ns.last and (loop.last or thought)", "thought")
"""Like that of Qwen3, but with the reasoning of all answers."""

REASONING = {"qwen3": QWEN3, "deepseek_r1": DEEPSEEK_R1, "openai_gptoss": GPT_OSS, "keeping": KEEPING}  # fmt: skip
"""Templates of models that reason, by the format of their reasoning."""
