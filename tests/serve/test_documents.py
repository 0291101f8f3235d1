"""Documents of a chat: placed by the template, and their KV reused in any order where the operator allows it."""

import pytest
from serve_help import running, tiny
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from quire.chat import ChatMessage, Conversation
from quire.chat.conversation import Document
from quire.chat.documents import encode_behind, segmented
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
    passages = Passages("16MiB", AllRows(), target=None, worth=10.0)
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


@pytest.mark.parametrize("knows_documents", [True, False])
def test_documents_with_titles_are_placed_with_them(knows_documents, monkeypatch):
    tokenizer = tiny()[1]
    if knows_documents:
        template = TEMPLATE.replace("{{ d.text }}", "{{ d.title }}: {{ d.text }}")
        monkeypatch.setattr(tokenizer, "chat_template", template)
    given = [Document("One.", "First", id=1), Document("Two."), "Three."]
    prompt = segmented(asked(given), tokenizer, encoding(tokenizer))
    parts = [tokenizer.decode(each) for each in prompt.segments[1:]]
    if knows_documents:
        wanted = ["One.", "<doc 2>: ", "Two.", "<doc 3>: ", "Three.", "<user>Why?<assistant>"]
    else:
        wanted = ["First\nOne.\n\n", "Two.\n\n", "Three.\n\n", "Why?<assistant>"]
    assert parts == wanted


def characters(*steps):
    """Return a tokenizer of characters, "\u2581" for a blank, with these normalizers before it."""
    letters = [chr(code) for code in range(32, 127)] + ["\n", "\u2581"]
    vocab = {letter: at for at, letter in enumerate(letters)}
    made = Tokenizer(models.BPE(vocab, []))
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", left=1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_parts_make_the_text_where_a_tokenizer_puts_a_blank_before_each():
    tokenizer = characters(normalizers.Prepend("\u2581"))  # as Llama 2's and Mistral 0.1's do
    encode = encoding(tokenizer)
    following = encode_behind(tokenizer, encode)
    parts = ["Read.\n", "A list. ", " (a tuple)\n\n", "Why?"]
    ids = encode(parts[0]) + [token for part in parts[1:] for token in following(part)]
    assert tokenizer.decode(ids) == "".join(parts)
    assert tokenizer.decode([t for part in parts for t in encode(part)]) != "".join(parts)


def test_a_tokenizer_whose_parts_make_another_text_is_refused():
    tokenizer = characters(normalizers.Strip())
    with pytest.raises(ConfigError, match=r"gives another text for 'a\.b' in parts"):
        encode_behind(tokenizer, encoding(tokenizer))


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
    kinds = [each["kind"] for each in report["details"]]
    assert kinds == [None, "contextual", "isolated"]  # the first one is computed exactly
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


def test_documents_as_objects_are_read(server):
    plain = said(server, DOCUMENTS)
    objects = said(server, [{"text": each, "title": "", "id": "x"} for each in DOCUMENTS])
    assert objects["choices"] == plain["choices"]
    assert objects["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_documents_are_answered_exactly_until_they_were_measured():
    with (
        running(passages=Passages("16MiB", min_tokens=2, worth=10.0, capture="isolated")) as made,
        running() as plain,
    ):
        for order in (1, -1):
            answer = said(made, DOCUMENTS[::order])
            (report,) = answer["passages"]
            assert report["exactness"] == "exact"
            assert "passages are measured first" in report["fallback"]
            assert answer["choices"] == said(plain, DOCUMENTS[::order])["choices"]
        told = made.get("/metrics").text
        assert 'quire_passage_verdicts{verdict="open"} 1.0' in told
        assert "quire_passage_prompts_total 2.0" in told
        assert made.get("/v1/cache").json()["passages"]["open"] == 1
        made.quiet()


def test_tokenize_counts_documents(server):
    given = {key: body(DOCUMENTS)[key] for key in ("messages", "documents")}
    told = server.post("/tokenize", given).json()
    assert told["count"] == said(server, DOCUMENTS)["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"documents": "text"}, "documents"),
        ({"documents": [1]}, "documents"),
        ({"documents": [{"title": "x"}]}, "`text`"),
        ({"documents": [{"text": "x", "snippet": "y"}]}, "`snippet`"),
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
