"""Token ids in answers, and chat templates that are checked at the start."""

import pytest
from serve_help import fixtures, tiny

from quire.chat.conversation import check_template
from quire.errors import ConfigError

TALK = [{"role": "user", "content": "What is a list?"}]
ASKED = {"model": "quire-tiny", "temperature": 0, "max_tokens": 6}
IDS = {"return_token_ids": True}

server, nothing_stays = fixtures()


def ids_of(text):
    return tiny()[1](text, add_special_tokens=False)["input_ids"]


def test_a_chat_has_its_token_ids(server):
    asked = ASKED | {"messages": TALK, "n": 2} | IDS
    made = server.post("/v1/chat/completions", asked).json()
    prompt = server.post("/tokenize", {"messages": TALK}).json()["tokens"]
    assert made["prompt_token_ids"] == prompt
    for choice in made["choices"]:
        assert choice["token_ids"] == ids_of(choice["message"]["content"])
    plain = server.post("/v1/chat/completions", asked | {"return_token_ids": False}).json()
    assert not {"prompt_token_ids", "token_ids"} & {*plain, *plain["choices"][0]}


def test_a_completion_has_the_token_ids_of_each_prompt(server):
    made = server.post("/v1/completions", ASKED | {"prompt": ["A list", "It"], "n": 2} | IDS).json()
    assert "prompt_token_ids" not in made
    for choice, prompt in zip(made["choices"], ("A list", "A list", "It", "It"), strict=True):
        assert (
            choice["prompt_token_ids"]
            == server.post("/tokenize", {"prompt": prompt}).json()["tokens"]
        )
        assert choice["token_ids"] == ids_of(choice["text"])


@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_has_each_token_id_once(server, chat):
    client = server.client()
    asked = ASKED | {"stream": True, "n": 2, "extra_body": IDS}
    if chat:
        chunks = [*client.chat.completions.create(**asked, messages=TALK)]
        told = [each for each in chunks if hasattr(each, "prompt_token_ids")]
        assert len(told) == 1
        assert told[0] is chunks[0]
    else:
        chunks = [*client.completions.create(**asked, prompt="A list")]
        told = [each for each in chunks if hasattr(each.choices[0], "prompt_token_ids")]
        assert len(told) == 2
    for index in range(2):
        mine = [each.choices[0] for each in chunks if each.choices[0].index == index]
        text = "".join((each.delta.content if chat else each.text) or "" for each in mine)
        ids = [token for each in mine for token in getattr(each, "token_ids", ())]
        assert ids == ids_of(text)
        assert len(ids) == 6


def test_tokens_with_log_probabilities_are_named_by_their_ids(server):
    names = {"return_tokens_as_token_ids": True} | IDS
    asked = ASKED | {"prompt": "A list", "logprobs": 2}
    (named,), (plain,) = (
        server.post("/v1/completions", asked | more).json()["choices"] for more in (names, {})
    )
    assert named["logprobs"]["tokens"] == [f"token_id:{each}" for each in named["token_ids"]]
    assert all(name.startswith("token_id:") for name in named["logprobs"]["top_logprobs"][0])
    for name in ("text_offset", "token_logprobs"):
        assert named["logprobs"][name] == plain["logprobs"][name]
    asked = ASKED | {"messages": TALK, "logprobs": True, "top_logprobs": 1}
    (choice,) = server.post("/v1/chat/completions", asked | names).json()["choices"]
    told = choice["logprobs"]["content"]
    assert [each["token"] for each in told] == [f"token_id:{each}" for each in choice["token_ids"]]
    assert told[0]["top_logprobs"][0]["token"] == told[0]["token"]


def test_a_response_refuses_token_ids_by_name(server):
    answer = server.post("/v1/responses", {"input": "A"} | IDS)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "return_token_ids")


def test_a_chat_template_with_a_syntax_error_is_refused_with_its_line():
    with pytest.raises(ConfigError, match="--chat-template has a syntax error in line 2: "):
        check_template("{{ messages }}\n{% for m in messages %}{% endif %}")
    check_template("{% generation %}{{ raise_exception('no') }}{% endgeneration %}{{ tools[3].x }}")
