"""Reasoning apart from content: the formats, texts that grow, prompts that open it, and forms behind it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from templates_help import REASONING, SPECIAL
from transformers import AddedToken, AutoTokenizer

from quire import demo_model
from quire.chat import ChatMessage, Conversation
from quire.chat.conversation import needs_short_ids
from quire.chat.grammars import Grammars
from quire.chat.reasoning import FORMATS, check_parser, reasoning_format
from quire.errors import ConfigError

THINK = FORMATS["qwen3"]
HARMONY = FORMATS["openai_gptoss"]

TEMPLATES = {
    "qwen3": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "opened": "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}",
    "mistral": "{% for m in messages %}{{ m.content }}{% endfor %}{# [THINK]...[/THINK] #}",
    "openai_gptoss": "Reasoning: {{ reasoning_effort }}{% for m in messages %}{% if m.thinking %}"
    "<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}{{ m.content }}{% endfor %}",
    "granite": "{% if thinking %}Write 'Here is my thought process:' first.{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}",
}
SO = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
ANALYSED = f"{SO}<|channel|>final<|message|>Yes."
WHOLE = [
    ("qwen3", "<think>\nLet me see.\n</think>\n\nYes.", "Let me see.", "Yes."),
    ("qwen3", "\n<think></think>Yes.", "", "Yes."),
    ("qwen3", "Yes, <think>no</think>.", "", "Yes, <think>no</think>."),
    ("qwen3", "<think>\nLet me", "Let me", ""),
    ("qwen3", "<think>\nLet me </thi", "Let me </thi", ""),
    ("qwen3", "<thi", "", "<thi"),
    ("deepseek_r1", "Let me see.\n</think>\n\nYes.", "Let me see.", "Yes."),
    ("deepseek_r1", "<think>\nLet me see.</think>Yes.", "Let me see.", "Yes."),
    ("deepseek_r1", "Let me", "Let me", ""),
    ("mistral", "[THINK]Let me see.[/THINK]Yes.", "Let me see.", "Yes."),
    ("openai_gptoss", ANALYSED, "So.", "Yes."),
    ("openai_gptoss", "<|channel|>final<|message|>Yes.", "", "Yes."),
    ("openai_gptoss", "<|channel|>commentary<|message|>I look.", "", "I look."),
    ("openai_gptoss", f"{SO}<|channel|>analysis<|message|>Now.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.", "So.\nNow.", "I look."),
    ("openai_gptoss", f"{SO}<|channel|>commentary to=functions.a json<|message|>{{}}", "So.", "<|channel|>commentary to=functions.a json<|message|>{}"),
    ("openai_gptoss", f"{SO} to=functions.a<|channel|>commentary json<|message|>{{}}", "So.", " to=functions.a<|channel|>commentary json<|message|>{}"),
    ("granite", "Here is my thought process: So.\n\nHere is my response: Yes.", " So.", " Yes."),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model())


def with_template(tokenizer, name):
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


@pytest.mark.parametrize(("name", "text", "thought", "content"), WHOLE)
def test_an_answer_has_its_reasoning_before_its_content(name, text, thought, content):
    assert FORMATS[name].split(text, is_whole=True) == (thought, content)


@pytest.mark.parametrize(("name", "text", "thought", "content"), WHOLE)
def test_a_text_that_grows_never_takes_back_what_was_told(name, text, thought, content):
    format_, told = FORMATS[name], ("", "")
    for size in range(len(text) + 1):
        now = format_.split(text[:size], is_whole=False)
        assert all(new.startswith(old) for new, old in zip(now, told, strict=True)), text[:size]
        told = now
    assert all(new.startswith(old) for new, old in zip((thought, content), told, strict=True))


PARTS = st.lists(st.sampled_from([*"ab<\n ", "<think>", "</think>", "<thi", "</", "think>"]))


@given(PARTS.map("".join), st.sampled_from(["qwen3", "deepseek_r1", "granite"]), st.data())
def test_any_text_cut_anywhere_is_told_once(text, name, data):
    format_, told, size = FORMATS[name], ("", ""), 0
    while size < len(text):
        size += data.draw(st.integers(1, 9))
        now = format_.split(text[:size], is_whole=False)
        assert all(new.startswith(old) for new, old in zip(now, told, strict=True))
        told = now
    whole = format_.split(text, is_whole=True)
    assert all(new.startswith(old) for new, old in zip(whole, told, strict=True))
    if name == "qwen3" and not text.lstrip().startswith("<think>"):
        assert whole == ("", text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_shows_its_format(name):
    found = reasoning_format("auto", TEMPLATES[name])
    assert found == FORMATS["qwen3" if name == "opened" else name]


def test_a_template_without_reasoning_has_no_format(tokenizer):
    assert reasoning_format("auto", "{{ messages }}<|channel|>") is None
    assert reasoning_format("none", TEMPLATES["qwen3"]) is None
    assert reasoning_format("mistral", "") == FORMATS["mistral"]
    with pytest.raises(ConfigError, match=r"is one of auto, none, mistral.*got 'qwen'"):
        check_parser("qwen")


@pytest.mark.parametrize(
    ("template", "more", "wanted"),
    [
        ("opened", {}, ("", "</think>")),
        ("qwen3", {}, ("<think>", "</think>")),
        ("qwen3", {"chat_template_kwargs": {"enable_thinking": False}}, None),
        ("qwen3", {"reasoning_effort": "none"}, None),
        ("qwen3", {"reasoning_effort": "high"}, ("<think>", "</think>")),
    ],
)
def test_a_prompt_says_where_its_answer_begins(tokenizer, template, more, wanted):
    asked = Conversation(messages=[ChatMessage(role="user", content="A <think>")], **more)
    text = asked.text(with_template(tokenizer, template))
    found = THINK.after(text[-40:])
    assert (found and found.tags) == wanted


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("<think>Let me", ("", "</think>")),
        ("<think>Let me</think>\n\nYes,", None),
        ("Yes,", None),
        ("", ("<think>", "</think>")),
    ],
)
def test_an_answer_that_goes_on_with_a_message_is_where_that_ends(said, wanted):
    found = THINK.after(said, said)
    assert (found and found.tags) == wanted


def test_an_effort_goes_to_the_template_or_to_its_switch(tokenizer):
    def text(template, effort):
        asked = Conversation(messages=[ChatMessage(role="user", content="A")])
        asked.reasoning_effort = effort
        return asked.text(with_template(tokenizer, template))

    assert text("openai_gptoss", "low") == "Reasoning: lowA"
    assert text("granite", "low") == "Write 'Here is my thought process:' first.A"
    assert text("granite", "none") == text("granite", None) == "A"
    assert text("mistral", "none") == "A"
    with pytest.raises(ConfigError, match="reasoning_effort is 'low'"):
        text("mistral", "low")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_earlier_answers_goes_to_the_template_by_each_name(tokenizer, name):
    answer = ChatMessage(role="assistant", content="B", **{name: "So."})
    assert "reasoning" not in answer.plain()
    asked = Conversation(messages=[ChatMessage(role="user", content="A"), answer])
    text = asked.text(with_template(tokenizer, "openai_gptoss"))
    assert "<|channel|>analysis<|message|>So.<|end|>B" in text


@pytest.mark.parametrize("added", [False, True])
def test_reasoning_is_counted_in_tokens_with_its_tags(added):
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    if added:
        tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])

    def counted(text, format_=THINK):
        return format_.num_tokens(tokenizer, ids(text))

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    assert counted("<think>Let me.</think>Yes") == len(ids("<think>Let me.</think>"))
    assert counted("<think>Let") == len(ids("<think>Let"))
    assert counted("Yes</think>") == counted("") == 0
    opened = FORMATS["deepseek_r1"]
    assert counted("So.</think>Yes", opened) == len(ids("So.</think>"))
    assert counted("", opened) == 0


FORMS = [
    ("json", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}', '{"a": 3}'),
    ("regex", "ab+c", "abbc"),
    ("choice", '["yes", "no"]', "no"),
    ("grammar", 'start: "x"+', "xx"),
    ("grammar", 'root ::= "x"+', "xx"),
]  # fmt: skip


@pytest.mark.parametrize("added", [None, False, True])
def test_a_form_begins_behind_the_reasoning(added):
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    if added is not None:
        tags = [AddedToken(each, special=added) for each in ("<think>", "</think>")]
        tokenizer.add_tokens(tags, special_tokens=added)
    grammars = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])

    def matches(text, tags, form):
        grammar = grammars.open(*form, tags)
        for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
            if not grammar.allowed([])[token]:
                return False
            grammar.take([token])
        return bool(grammar.allowed([])[tokenizer.eos_token_id])

    for kind, grammar, said in FORMS:
        form, other = (kind, grammar), said + "!"
        both, closed = ("<think>", "</think>"), ("", "</think>")
        assert matches(said, both, form)
        assert matches(f'<think>so, {{"no</think>\n\n{said}', both, form)
        assert matches(f"<think></think>{said}", both, form)
        assert matches(f"so, {said}</think>{said}", closed, form)
        assert not matches(f"<think>{said}", both, form)
        assert not matches(f"<think>so</think>{other}", both, form)
        assert not matches(f"so</think>{said}", both, form)
        assert not matches(said, closed, form)
    with pytest.raises(ConfigError, match=r"structured_outputs.grammar cannot be used: at 1\(8\)"):
        grammars.open("grammar", "start: foo", ("", "</think>"))


def test_gpt_oss_writes_its_form_behind_its_final_tag():
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    names = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
    grammar = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id]).open(
        "choice", '["yes", "no"]', HARMONY.tags
    )
    assert HARMONY.has_special(tokenizer)
    for token in tokenizer(ANALYSED.replace("Yes.", "yes"), add_special_tokens=False).input_ids:
        assert grammar.allowed([])[token], tokenizer.decode([token])
        grammar.take([token])
    assert grammar.allowed([])[tokenizer.eos_token_id]


@pytest.mark.parametrize("name", [*SPECIAL, *REASONING])
def test_a_template_that_needs_short_ids_of_calls_is_known(tokenizer, name):
    tokenizer.chat_template = SPECIAL[name][0] if name in SPECIAL else REASONING[name]
    assert needs_short_ids(tokenizer) == (name == "mistral")
