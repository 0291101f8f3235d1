"""Tool calls that must be: written as the chat template writes them, so that the next prompt finds the answer."""

import copy
import json
import re
import sys
from pathlib import Path

import pytest
from serve_help import loaded, running, tiny

import plain_http
import real_models
from quire.chat import StructuredOutputs
from quire.chat.calls import called_in_template
from quire.engines.loop import SamplingParams
from quire.serve.protocol import ChatRequest

sys.path.insert(0, str(Path(__file__).parents[1] / "chat"))

from templates_help import SPECIAL, TAGS, dressed

FORMS = [name for name in SPECIAL if name != "xml"]

LOOK = {
    "type": "object",
    "properties": {
        "path": {"enum": ["the file", "this é"]},
        "lines": {"type": "array", "items": {"enum": [1, 20]}, "minItems": 2, "maxItems": 2},
        "deep": {"type": "object", "properties": {"is": {"enum": ["on", "off"]}}, "required": ["is"], "additionalProperties": False},
    },
    "required": ["path", "lines", "deep"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "It looks.", "parameters": LOOK}},
    {"type": "function", "function": {"name": "find", "description": "It finds.", "parameters": LOOK}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]  # fmt: skip
NAMED = {"type": "function", "function": {"name": "look"}}


def served(name, model=None, tokenizer=None):
    model, tokenizer = model or loaded()[0], copy.deepcopy(tokenizer or tiny()[1])
    end = dressed(tokenizer, name)
    if len(tokenizer) > model.config.vocab_size:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    return running(model, tokenizer=tokenizer)


def check_turns(server, choices, seeds=(1,), **given):
    """Have calls made, answer them, and check that each next prompt finds the answer before it but for a block."""
    size, lost = server.manager.block_size, 0
    for seed in seeds:
        talk, before = [{"role": "user", "content": f"Look at {seed}."}], 0
        for choice in choices:
            asked = {"messages": talk, "tools": TOOLS, "tool_choice": choice, "seed": seed}
            document, url = asked | {"max_tokens": 200} | given, f"{server.url}/v1/chat/completions"
            said = plain_http.post(url, json=document, timeout=300).json()
            (chosen,), usage = said["choices"], said["usage"]
            assert chosen["finish_reason"] == "tool_calls", said
            (call,) = chosen["message"]["tool_calls"]
            assert not chosen["message"]["content"]
            assert call["function"]["name"] in ("look", "find", "now")
            json.loads(call["function"]["arguments"])
            found = usage["prompt_tokens_details"]["cached_tokens"]
            lost = max(lost, before - found)
            before = (usage["prompt_tokens"] + usage["completion_tokens"] - 1) // size * size
            talk = [
                *talk,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": "Nothing is there."},
            ]
    assert lost <= 0
    server.quiet()


@pytest.mark.parametrize("name", FORMS)
def test_the_next_prompt_finds_a_forced_call(name):
    with served(name) as server:
        check_turns(server, ["required", NAMED, "required"], temperature=2)


@pytest.mark.ci
@pytest.mark.skipif(
    bool(real_models.missing(real_models.SMOLLM2)), reason=str(real_models.missing(real_models.SMOLLM2))
)  # fmt: skip
def test_the_next_prompt_finds_a_call_by_tokens_of_many_letters():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = real_models.folder(real_models.SMOLLM2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name in ("hermes", "mistral", "mistral_named"):  # Llama 3's template needs its own blanks
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16").eval()
        with served(name, model, tokenizer) as server:
            check_turns(server, [NAMED, "required"], temperature=0)


def test_a_template_without_json_leaves_forced_calls_plain_json():
    with served("xml") as server:
        check_turns_plain(server)


def check_turns_plain(server):
    talk = [{"role": "user", "content": "Look."}]
    asked = {"messages": talk, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200}
    (chosen,) = server.post("/v1/chat/completions", asked).json()["choices"]
    assert chosen["message"]["tool_calls"][0]["function"]["name"] in ("look", "find", "now")


@pytest.mark.parametrize(
    "change",
    [
        {"tool_choice": "auto"},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"tools": [{"function": {"name": 'a"b', "parameters": LOOK}}]},
    ],
)
def test_other_calls_have_no_form_of_the_template(change):
    import msgspec

    tokenizer = copy.deepcopy(tiny()[1])
    dressed(tokenizer, "hermes")
    talk = [{"role": "user", "content": "a"}]
    asked = {"messages": talk, "tools": TOOLS, "tool_choice": "required"}
    assert called_in_template(msgspec.convert(asked, ChatRequest), tokenizer) is not None
    assert called_in_template(msgspec.convert(asked | change, ChatRequest), tokenizer) is None


AUTO = [{"type": "function", "function": {"name": "now", "description": "The time."}}]


def calling(name, tokenizer):
    """A form of the answers by which the model calls of itself, without an id of its call."""
    call = json.dumps('[{"name": "now", "arguments": {}}]')
    marks = {"mistral": ("[TOOL_CALLS]", ""), "hermes": TAGS}[name]
    begin, end = (f"<[{tokenizer.convert_tokens_to_ids(each)}]>" if each else "" for each in marks)
    return StructuredOutputs(grammar=f"start: {begin} {call} {end}")


@pytest.mark.parametrize("name", ["mistral", "hermes"])
def test_a_call_without_an_id_gets_one_that_the_template_takes(name, monkeypatch):
    with served(name) as server:
        form = calling(name, server.service.reader.tokenizer)

        def params(**given):
            return SamplingParams(**given | {"structured_outputs": form})

        monkeypatch.setattr("quire.serve.generation.SamplingParams", params)
        for stream in (False, True):
            client = server.client()
            talk = [{"role": "user", "content": "What time is it?"}]
            asked = {"model": "quire-tiny", "tools": AUTO, "max_tokens": 100}
            if stream:
                with client.chat.completions.stream(messages=talk, **asked) as events:
                    message = events.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(messages=talk, **asked).choices[0].message
            (call,) = message.tool_calls
            assert re.fullmatch(
                "[0-9a-f]{9}" if name == "mistral" else "call_[0-9a-f]{24}", call.id
            )
            said = {
                "role": "assistant",
                "tool_calls": [call.model_dump(include={"id", "type", "function"})],
            }
            talk += [said, {"role": "tool", "tool_call_id": call.id, "content": "Noon."}]
            client.chat.completions.create(messages=talk, **asked)
        first = client.responses.create(
            model="quire-tiny",
            input="What time is it?",
            tools=[{"type": "function", "name": "now"}],
        )
        (item,) = first.output
        output = [{"type": "function_call_output", "call_id": item.call_id, "output": "Noon."}]
        client.responses.create(model="quire-tiny", input=output, previous_response_id=first.id)
        tools = [{"name": "now", "input_schema": {"type": "object"}}]
        asked = {"model": "quire-tiny", "max_tokens": 100, "tools": tools}
        question = {"role": "user", "content": "What time is it?"}
        document = server.post("/v1/messages", asked | {"messages": [question]}).json()
        (block,) = document["content"]
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": "Noon."}
        talk = [
            question,
            {"role": "assistant", "content": [block]},
            {"role": "user", "content": [result]},
        ]
        assert server.post("/v1/messages", asked | {"messages": talk}).status_code == 200
