"""Documents of a chat: placed by the template, and their KV reused in any order where the operator allows it."""

import pytest
from serve_help import running, tiny

from quire.chat import ChatMessage, Conversation
from quire.chat.documents import segmented
from quire.errors import ConfigError
from quire_passages import AllRows, Passages

DOCUMENTS = [
    "A list holds its items in order, and items may be added to it and removed from it at any time. ",
    "A tuple holds its items in order as well, but once it was made nothing of it can be changed. ",
    "A dictionary maps keys to values; a key is found in the same time however many there are. ",
]
TEMPLATE = (
    "{{ bos_token }}{% for d in documents %}<doc {{ loop.index }}>{{ d.text }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)


@pytest.fixture(scope="module")
def server():
    passages = Passages("16MiB", AllRows(), worth=10.0)
    with running(passages=passages) as made:
        yield made
        made.quiet()


def body(documents, **more):
    messages = [
        {"role": "system", "content": "Answer from the documents."},
        {"role": "user", "content": "What is a tuple?"},
    ]
    return {"messages": messages, "documents": documents, "max_tokens": 8, "temperature": 0, **more}


def said(server, documents, **more):
    answer = server.post("/v1/chat/completions", body(documents, **more))
    assert answer.status_code == 200, answer.text
    server.quiet()
    return answer.json()


def asked(documents, *messages):
    told = messages or ({"role": "user", "content": "Why?"},)
    return Conversation(messages=[ChatMessage(**each) for each in told], documents=documents)


def encoding(tokenizer):
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"] if text else []


def test_documents_stand_before_the_last_message_of_the_user():
    tokenizer = tiny()[1]
    told = (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Why?"},
    )
    prompt = segmented(asked(["One.", "Two."], *told), tokenizer, encoding(tokenizer))
    parts = [tokenizer.decode(each) for each in prompt.segments]
    assert parts == [
        "<bos><user>Hi<assistant>Yes?<eos><user>",
        "One.\n\n",
        "Two.\n\n",
        "Why?<assistant>",
    ]
    assert list(prompt) == [token for part in prompt.segments for token in part]


def test_a_template_that_knows_documents_places_them(monkeypatch):
    tokenizer = tiny()[1]
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    prompt = segmented(asked(["One.", "Two.", "One."]), tokenizer, encoding(tokenizer))
    parts = [tokenizer.decode(each) for each in prompt.segments]
    assert parts == [
        "<bos><doc 1>",
        "One.",
        "<doc 2>",
        "Two.",
        "<doc 3>",
        "One.",
        "<user>Why?<assistant>",
    ]


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (TEMPLATE.replace("{{ d.text }}", ""), (), "places document 0 0 times"),
        (
            TEMPLATE.replace("{{ d.text }}", "{{ d.text }}{{ d.text }}"),
            (),
            "places document 0 2 times",
        ),
        (None, ({"role": "system", "content": "x"},), "no message of the user"),
    ],
)
def test_a_template_that_loses_documents_is_refused(template, messages, words, monkeypatch):
    tokenizer = tiny()[1]
    if template is not None:
        monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(ConfigError, match=words):
        segmented(asked(["One.", "Two."], *messages), tokenizer, encoding(tokenizer))


@pytest.mark.ci
def test_documents_in_another_order_are_reused_and_the_answer_says_so(server):
    (first,) = said(server, DOCUMENTS)["passages"]
    assert first["exactness"] == "exact"
    assert "no passage" in first["fallback"]
    answer = said(server, DOCUMENTS[::-1])
    (report,) = answer["passages"]
    assert report["exactness"] == "approximate"
    assert report["fallback"] is None
    assert [each["kind"] for each in report["details"]] == ["isolated"] * 3
    parts = ("exact_tokens", "moved_tokens", "recomputed_rows", "computed_tokens")
    assert sum(report[each] for each in parts) == answer["usage"]["prompt_tokens"]
    with running() as plain:
        other = said(plain, DOCUMENTS[::-1])
        assert "passages" not in other
        assert other["choices"] == answer["choices"]  # all rows were computed again


def test_a_stream_ends_with_what_became_of_them(server):
    said(server, DOCUMENTS)
    with server.client() as client:
        given = body([DOCUMENTS[1], DOCUMENTS[0]])
        documents = {"documents": given.pop("documents")}
        stream = client.chat.completions.create(
            model=server.service.model, stream=True, extra_body=documents, **given
        )
        events = list(stream)
    told = [each for each in events if getattr(each, "passages", None)]
    assert len(told) == 1
    assert told[0].choices[0].finish_reason == "length"
    assert told[0].passages[0]["exactness"] == "approximate"


def test_a_chat_without_documents_says_nothing_of_them(server):
    assert "passages" not in said(server, None)
    assert "passages" not in said(server, [])


def test_tokenize_counts_documents(server):
    given = {key: body(DOCUMENTS)[key] for key in ("messages", "documents")}
    told = server.post("/tokenize", given).json()
    assert told["count"] == said(server, DOCUMENTS)["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"documents": "text"}, "documents"),
        ({"documents": [1]}, "documents"),
        (
            {"documents": DOCUMENTS, "messages": [{"role": "system", "content": "x"}]},
            "no message of the user",
        ),
    ],
)
def test_bad_documents_are_refused(server, more, words):
    answer = server.post("/v1/chat/completions", {**body(None), **more})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_completions_take_no_documents(server):
    answer = server.post("/v1/completions", {"prompt": "x", "documents": DOCUMENTS})
    assert answer.status_code == 400
    assert "documents is not offered" in answer.json()["error"]["message"]


def test_empty_documents_are_left_out(server):
    assert said(server, ["", *DOCUMENTS])["passages"][0]["details"]
