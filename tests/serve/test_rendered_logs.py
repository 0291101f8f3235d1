"""Requests of a log as token ids: those that the server reads in the same bodies."""

import copy
import json

import pytest
from serve_help import fixtures, tiny

from quire.errors import ConfigError
from quire_sim.caches import ExactTokens, cache_of, cache_report, predictions
from quire_sim.lint import lint_log
from quire_sim.lint.joined import JoinedLosses, least_of
from quire_sim.logs import open_log
from quire_sim.rendering import PieceTokenizer, PromptRenderer

TEMPLATE = (
    "<bos>{% if tools %}{% for t in tools %}{{ t.function | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer_with(template=TEMPLATE):
    tokenizer = copy.deepcopy(tiny()[1])
    tokenizer.chat_template = template
    return tokenizer


server, nothing_stays = fixtures(tokenizer=tokenizer_with())

FUNCTION = {"name": "find", "description": "Finds a shelf.", "parameters": {"type": "object"}}
CALL = {"id": "a", "type": "function", "function": {"name": "find", "arguments": '{"q": 1}'}}
LINES = "First line.\nSecond line, of é and 中.\n\n  third\n- fourth\n"

BODIES = {
    "/v1/chat/completions": {
        "tools": [{"type": "function", "function": FUNCTION}],
        "messages": [
            {"role": "developer", "content": LINES},
            {"role": "user", "content": [{"type": "text", "text": "Where?"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "a", "content": "Shelf 7 <eos> of 9"},
        ],
    },
    "/v1/messages": {
        "max_tokens": 5,
        "system": [{"type": "text", "text": LINES, "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "find", "description": "Finds.", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": "Where?"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "find", "input": {"q": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "7"}]},
        ],
    },
    "/v1/responses": {
        "instructions": LINES,
        "tools": [{"type": "function", **FUNCTION}],
        "input": [
            {"role": "user", "content": "Where?"},
            {"type": "function_call", "call_id": "a", "name": "find", "arguments": '{"q": 1}'},
            {"type": "function_call_output", "call_id": "a", "output": "7"},
        ],
    },
    "/v1/completions": {"prompt": LINES},
}  # fmt: skip

READ = {
    "/v1/chat/completions": "/tokenize",
    "/v1/completions": "/tokenize",
    "/v1/messages": "/v1/messages/tokenize",
    "/v1/responses": "/v1/responses/tokenize",
}


def logged(tmp_path, records):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return open_log(path)


@pytest.mark.parametrize("url", BODIES)
def test_a_logged_body_has_the_tokens_that_the_server_reads_in_it(server, tmp_path, url):
    body = BODIES[url]
    read = server.post(READ[url], body).json()["tokens"]
    log = logged(tmp_path, [{"url": url, "request": body | {"model": "quire-tiny"}}])
    (request,) = log
    assert PromptRenderer(tokenizer_with()).ids(request) == read


def test_pieces_have_the_tokens_of_the_whole_text_and_are_tokenized_once(monkeypatch):
    tokenizer = tokenizer_with()
    pieces = PieceTokenizer(tokenizer)
    text = f"<user>{LINES}<eos><assistant>{LINES * 3}<eos>"
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [ord(each) for each in "".join(pieces.segments(text))] == expected
    monkeypatch.setattr(pieces, "_encoded", lambda texts: [[0] for _ in texts])
    assert [ord(each) for each in "".join(pieces.segments(text))] == expected
    assert "".join(pieces.segments("<user>of other words")).endswith("\0")


def test_figures_with_a_model_are_exact(tmp_path):
    renderer = PromptRenderer(tokenizer_with())
    said = [{"role": "user", "content": LINES * 4}]
    more = [
        *said,
        {"role": "assistant", "content": "It is here."},
        {"role": "user", "content": "And?"},
    ]
    log = logged(tmp_path, [{"model": "m", "messages": each} for each in (said, more, said)])
    first, second, _ = (renderer.ids(each) for each in log)
    report = lint_log(log, renderer=renderer)
    assert not report.is_estimated
    assert report.prompt_tokens == 2 * len(first) + len(second)
    assert report.hit_tokens == 2 * len(first)


def test_what_a_changed_line_loses_is_counted_in_tokens(tmp_path):
    renderer = PromptRenderer(tokenizer_with())
    rest = "Answer in two short sentences.\nName the shelf.\n" * 20
    bodies = [
        {"model": "m", "messages": [{"role": "system", "content": f"Now: 2026-11-0{n}T08:0{n}:00Z\n{rest}"}, {"role": "user", "content": "a"}]}
        for n in (1, 2)
    ]  # fmt: skip
    log = logged(tmp_path, bodies)
    report = lint_log(log, renderer=renderer, keep=lambda _: True)
    (loss,) = report.losses
    assert loss.cause == "time"
    tail = len(tiny()[1](rest, add_special_tokens=False)["input_ids"])
    assert tail <= loss.tokens <= tail + 16
    first, second = (renderer.ids(each) for each in log)
    common = next(n for n, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1])
    assert report.hit_tokens == common


def test_a_template_that_drops_reasoning_of_earlier_turns_is_a_cause(tmp_path):
    drops = (
        "{% for m in messages %}<{{ m.role }}>{% if loop.last or m.role != 'assistant' %}{{ m.content }}"
        "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}<eos>{% endfor %}"
    )
    thought = "<think>" + "Let me see where it may be. " * 20 + "</think>Shelf 7." + " Really." * 20
    said = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": thought}]
    after = [*said, {"role": "user", "content": "And?"}]
    log = logged(tmp_path, [{"model": "m", "messages": each} for each in (said, after)])
    assert lint_log(log).causes == []
    (cause,) = lint_log(log, renderer=PromptRenderer(tokenizer_with(drops))).causes
    assert cause.cause == "template"
    assert cause.example.old.startswith("<think>")


def test_a_request_that_the_server_would_refuse_is_counted_with_its_reason(tmp_path):
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    refused = {"model": "m", "messages": [{"role": "user", "content": [image]}]}
    taken = {"model": "m", "messages": [{"role": "user", "content": "Hello there"}]}
    report = lint_log(logged(tmp_path, [taken, refused]), renderer=PromptRenderer(tokenizer_with()))
    assert report.requests == 1
    assert "not rendered: " in report.unread[0]
    with pytest.raises(ConfigError):
        PromptRenderer(tokenizer_with()).ids(next(iter(logged(tmp_path, [refused]))))


def through(log, renderer, server):
    """Return the losses of a log in the cache of a server, in tokens of a model."""
    losses = JoinedLosses()
    report = lint_log(log, renderer=renderer, watchers=[losses.add])
    found = list(predictions(log, cache_of(server), ExactTokens(renderer).prompt))
    for each in found:
        losses.find(each.hit, least_of(report))
    losses.join(report, cache_report(server, found))
    return report


def merging():
    """Return a tokenizer of the kind of GPT-2, which keeps a blank with the word behind it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([ANSWER * 9], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


ANSWER = "it is the one behind the door, as the clerk of the third branch says. "


@pytest.mark.parametrize(("blank", "causes"), [(" ", ["joint"]), ("", [])])
def test_tokens_that_merge_across_the_joint_with_an_answer_are_a_cause(tmp_path, blank, causes):
    renderer = PromptRenderer(merging())
    prompt = f"The shelf of the third branch is named here. Answer:{blank}"
    answer = ("" if blank else " ") + (ANSWER * 9).strip()
    bodies = [prompt, f"{prompt}{answer}\nAnd the fourth branch?"]
    log = logged(
        tmp_path,
        [
            {"request": {"model": "m", "prompt": each}, "response": {"choices": [{"text": answer}]}}
            for each in bodies
        ],
    )
    report = through(log, renderer, "vllm")
    assert [each.cause for each in report.losses] == causes
    lost = len(renderer.tokenizer(answer, add_special_tokens=False)["input_ids"])
    assert report.lost_tokens == pytest.approx(lost * len(causes), abs=4)


def test_an_answer_of_other_words_merges_nothing(tmp_path):
    renderer = PromptRenderer(merging())
    prompt, answer = "Name the shelf. Answer: ", ANSWER * 9
    bodies = [prompt, prompt + "the clerk of the third branch says so. " * 9]
    log = logged(
        tmp_path,
        [
            {"request": {"model": "m", "prompt": each}, "response": {"choices": [{"text": answer}]}}
            for each in bodies
        ],
    )
    assert through(log, renderer, "sglang").losses == []
