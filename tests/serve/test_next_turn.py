"""Templates that drop the reasoning of earlier turns: what the next prompt will not have is demoted, and `explain` says why."""

import copy
import sys
from pathlib import Path

import pytest
from serve_help import loaded, running, tiny, wait_for

import plain_http
from quire.chat import ChatMessage, Conversation, StructuredOutputs
from quire.chat.conversation import drops_reasoning
from quire.chat.reasoning import FORMATS
from quire.core.tokens import common_bytes
from quire.engines.loop import SamplingParams
from quire.ops.demoting import LOWEST
from quire.serve.operator import DROPPED

sys.path.insert(0, str(Path(__file__).parents[1] / "chat"))

from templates_help import REASONING

QUESTION = [{"role": "user", "content": "Is a list that has two items mutable, and how would one see that?"}]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "now"}}]
THOUGHT = "<think>\\n[a-z ]{70}\\n</think>\\n\\n"
ANSWER = "[a-z ]{40}\\."
CALL = '<tool_call>\\n\\{"name": "now", "arguments": \\{\\}\\}\\n</tool_call>'


@pytest.mark.parametrize("name", REASONING)
def test_a_template_that_drops_reasoning_is_known(name):
    tokenizer = copy.deepcopy(tiny()[1])
    tokenizer.chat_template = REASONING[name]
    assert drops_reasoning(tokenizer) == (name != "keeping")
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert not drops_reasoning(tokenizer)


OPENED = "<think>\nSo it is.\n</think>\n\nYes."
ANSWERS = {
    "qwen3": (OPENED, 0),
    "deepseek_r1": ("So it is.\n</think>\n\nYes.", -len("<think>\n")),
    "openai_gptoss": (
        "<|channel|>analysis<|message|>So it is.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        len("<|channel|>"),
    ),
    "keeping": (OPENED, len(OPENED)),
}
"""An answer by a template's name, and where the next prompt leaves it, from the prompt's end on."""


@pytest.mark.parametrize("name", ANSWERS)
def test_the_next_prompt_leaves_an_answer_where_the_template_says(name):
    tokenizer = copy.deepcopy(tiny()[1])
    tokenizer.chat_template = REASONING[name]
    answer, shared = ANSWERS[name]
    thought, content = FORMATS.get(name, FORMATS["qwen3"]).split(answer, is_whole=True)
    assert (thought, content) == ("So it is.", "Yes.")
    asked = Conversation(messages=[ChatMessage(role="user", content="Is it?")])
    made = ChatMessage(role="assistant", content=content, reasoning_content=thought)
    prompt = asked.text(tokenizer)
    after = asked.followed_by(made).text(tokenizer)
    known = prompt + answer
    assert common_bytes(known.encode(), after.encode()) == len(prompt) + shared


@pytest.fixture(scope="module")
def server():
    tokenizer = copy.deepcopy(tiny()[1])
    tokenizer.chat_template = REASONING["qwen3"]
    with running(loaded()[0], tokenizer=tokenizer) as made:
        yield made
        made.quiet()


@pytest.fixture(autouse=True)
def fresh(server, monkeypatch):
    """Each test begins with an empty cache; a form is that of the whole answer, reasoning included."""

    def params(**given):
        return SamplingParams(**given | {"reasoning_tags": None})

    monkeypatch.setattr("quire.serve.generation.SamplingParams", params)
    yield
    settled(server)
    server.post("/v1/cache/evict", {"all": True})


def settled(server):
    """Wait until all that is done later is done."""
    server.quiet()
    wait_for(lambda: not server.service.num_later)
    server.quiet()


def said(server, regex, messages=QUESTION, **more):
    asked = {"messages": messages, "guided_regex": regex, "max_tokens": 400, "seed": 1} | more
    answer = server.post("/v1/chat/completions", asked)
    assert answer.status_code == 200, answer.text
    settled(server)
    return answer.json()


def explained(server, messages, **more):
    answer = server.post("/v1/cache/explain", {"messages": messages, **more}).json()
    return answer, [each["why"] for each in answer["segments"] if not each["cached"]]


def demoted(server):
    """The tokens of demoted blocks."""
    nodes = server.manager.kernel.tree.nodes()
    return sum(len(node.key) // 4 for node in nodes if node.priority == LOWEST)


def follows(answer, *messages):
    message = answer["choices"][0]["message"]
    return [*QUESTION, message, *(messages or [{"role": "user", "content": "Why?"}])]


def test_the_rest_of_an_answer_that_reasoned_is_demoted(server):
    answer, size = said(server, THOUGHT + ANSWER), server.manager.block_size
    usage = answer["usage"]
    assert demoted(server) > usage["completion_tokens"] - 2 * size
    told, why = explained(server, follows(answer))
    assert usage["prompt_tokens"] <= told["cached_tokens"] < usage["prompt_tokens"] + 3
    assert why == [DROPPED, "last_token"]


def test_an_answer_without_reasoning_is_not_demoted(server):
    answer = said(server, ANSWER)
    assert not demoted(server)
    told, why = explained(server, follows(answer))
    whole = answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    assert told["cached_tokens"] > whole - 2 * server.manager.block_size
    assert DROPPED not in why


def test_reasoning_before_a_call_is_kept_until_the_final_answer(server):
    more = {"tools": TOOLS}
    called = said(server, THOUGHT + CALL, **more)
    (call,) = called["choices"][0]["message"]["tool_calls"]
    assert not demoted(server)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "It is noon."}
    asked = follows(called, result)
    told, why = explained(server, asked, **more)
    assert told["cached_tokens"] > called["usage"]["total_tokens"] - 2 * server.manager.block_size
    assert DROPPED not in why
    final = said(server, ANSWER, asked, **more)
    last = [*asked, final["choices"][0]["message"], {"role": "user", "content": "Why?"}]
    told, why = explained(server, last, **more)
    first = called["usage"]["prompt_tokens"]
    assert first <= told["cached_tokens"] < first + 3
    assert why == [DROPPED, "last_token"]
    assert demoted(server) > final["usage"]["total_tokens"] - first - 2 * server.manager.block_size


def test_each_of_several_answers_is_demoted(server):
    answer = said(server, THOUGHT + ANSWER, n=3, temperature=1.5)
    assert len({each["message"]["content"] for each in answer["choices"]}) == 3
    size = server.manager.block_size
    assert demoted(server) > answer["usage"]["completion_tokens"] - 6 * size


def test_the_empty_reasoning_of_a_prompt_is_dropped(server):
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = said(server, ANSWER, **off)
    told, why = explained(server, follows(answer), **off)
    assert told["cached_tokens"] < answer["usage"]["prompt_tokens"]
    assert why == [DROPPED, "last_token"]


def test_a_cut_answer_is_demoted(server):
    answer = said(server, THOUGHT + ANSWER, max_tokens=60)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert demoted(server) > 60 - 2 * server.manager.block_size


@pytest.mark.ci
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 400, "stream": True}),
        ("/v1/responses", {"input": QUESTION[0]["content"], "max_output_tokens": 400, "prompt_cache_key": "mine"}),
        ("/v1/responses", {"input": QUESTION[0]["content"], "max_output_tokens": 400, "stream": True}),
        ("/v1/messages", {"model": "quire-tiny", "messages": QUESTION, "max_tokens": 400, "thinking": {"type": "adaptive"}}),
    ],
)  # fmt: skip
def test_a_stream_and_other_apis_are_demoted(server, monkeypatch, path, asked):
    whole = StructuredOutputs(regex=THOUGHT + ANSWER)

    def params(**given):
        return SamplingParams(**given | {"reasoning_tags": None, "structured_outputs": whole})

    monkeypatch.setattr("quire.serve.generation.SamplingParams", params)
    answer = server.post(path, asked)
    assert answer.status_code == 200, answer.text
    settled(server)
    assert demoted(server) > 120 - 2 * server.manager.block_size


def test_a_prompt_that_is_stored_only_is_not_demoted(server):
    asked = {"model": "quire-tiny", "messages": QUESTION, "max_tokens": 0}
    for thinking in ({"type": "adaptive"}, {"type": "disabled"}):
        assert server.post("/v1/messages", asked | {"thinking": thinking}).status_code == 200
        settled(server)
        assert not demoted(server)


def test_an_answer_that_its_client_leaves_is_not_demoted(server):
    asked = {"messages": QUESTION, "stream": True, "max_tokens": 3000, "ignore_eos": True}
    with plain_http.stream("POST", f"{server.url}/v1/chat/completions", json=asked) as answer:
        next(answer.iter_lines())
    settled(server)
    assert not demoted(server)


HARMONY_CALL = (
    "<|channel|>analysis<|message|>[a-z ]{70}<|end|><|start|>assistant<|channel|>commentary to=functions\\.now "
    '<|constrain|>json<|message|>\\{"zone": "[a-z]{4}"\\}'
).replace("|", "\\|")


@pytest.mark.parametrize("stream", [False, True])
def test_gpt_oss_calls_in_its_commentary(monkeypatch, stream):
    tokenizer = copy.deepcopy(tiny()[1])
    tokenizer.chat_template = REASONING["openai_gptoss"]
    with running(loaded()[0], tokenizer=tokenizer) as server:
        assert server.service.reader.tool_format == "harmony"
        whole = StructuredOutputs(regex=HARMONY_CALL)

        def params(**given):
            return SamplingParams(**given | {"reasoning_tags": None, "structured_outputs": whole})

        monkeypatch.setattr("quire.serve.generation.SamplingParams", params)
        asked = {"model": "quire-tiny", "messages": QUESTION, "tools": TOOLS, "max_tokens": 400}
        completions = server.client().chat.completions
        if stream:
            with completions.stream(**asked) as events:
                (choice,) = events.get_final_completion().choices
        else:
            (choice,) = completions.create(**asked).choices
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content or "") == ("tool_calls", "")
        assert call.function.name == "now"
        assert call.function.arguments.startswith('{"zone": "')
        assert len(choice.message.reasoning_content) == 70
        settled(server)
        assert not demoted(server)
        answer = choice.message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": call.id, "content": "Noon."}
        told, why = explained(server, [*QUESTION, answer, result], tools=TOOLS)
        assert told["cached_tokens"] > 150
        assert DROPPED not in why
