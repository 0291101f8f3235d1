"""Adapters as models of a server: chosen by name on every path, apart in the cache, refused at the start."""

import copy
import json
import re

import pytest
from serve_help import command, loaded, running

from adapter_help import adapted, is_likeliest
from quire.cli.models import adapters_of
from quire.errors import ConfigError
from quire.serve.service import Bounds, ServedModel
from quire.web.keys import ApiKeys

ASKED = {"prompt": "A list keeps its order, and a set does not keep any at all", "max_tokens": 6, "temperature": 0, "ignore_eos": True}  # fmt: skip
CHAT = [{"role": "user", "content": "What is a list, and what is a set?"}]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders of adapters, and references by the name to ask for."""
    place, model = tmp_path_factory.mktemp("adapters"), loaded()[0]
    references = {
        name: adapted(model, place / name, seed) for seed, name in enumerate(("sql", "law"))
    }
    return {name: place / name for name in references}, {
        "quire-tiny": copy.deepcopy(model)
    } | references


@pytest.fixture(scope="module")
def server(made):
    with running(adapters=made[0]) as served:
        yield served
        served.quiet()


def test_each_name_is_answered_by_its_own_weights(server, made):
    tokenizer = server.service.reader.tokenizer
    texts = {}
    for name, reference in made[1].items():
        answer = server.post("/v1/completions", ASKED | {"model": name}).json()
        assert answer["model"] == name
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        texts[name] = answer["choices"][0]["text"]
        prompt = tokenizer(ASKED["prompt"])["input_ids"]
        whole = tokenizer(ASKED["prompt"] + texts[name])["input_ids"]
        if whole[: len(prompt)] == prompt and len(whole) == len(prompt) + 6:
            assert is_likeliest(reference, prompt, whole[len(prompt) :])
    assert len(set(texts.values())) == 3
    again = server.post("/v1/completions", ASKED | {"model": "sql", "stream": True}).text
    said = [json.loads(line[6:]) for line in again.splitlines() if line.startswith("data: {")]
    assert "".join(each["choices"][0]["text"] for each in said) == texts["sql"]
    assert {each["model"] for each in said} == {"sql"}


def test_an_adapter_is_chosen_on_every_path_and_an_unknown_one_is_not_found(server):
    paths = {
        "/v1/completions": {"prompt": "A list", "max_tokens": 2},
        "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2},
        "/v1/responses": {"input": "A list", "max_output_tokens": 2},
        "/v1/messages": {"messages": CHAT, "max_tokens": 2},
        "/v1/messages/count_tokens": {"messages": CHAT},
        "/tokenize": {"prompt": "A list"},
        "/detokenize": {"tokens": [3, 4]},
    }
    for path, asked in paths.items():
        answer = server.post(path, asked | {"model": "law"})
        assert answer.status_code == 200, path
        assert answer.json().get("model", "law") == "law"
        assert server.post(path, asked | {"model": "tax"}).status_code == 404
    told = server.get("/metrics").text
    assert re.search(r'^quire_adapter_prompts_total\{adapter="law"\} [4-9]', told, re.MULTILINE)


def test_models_are_listed_with_their_parents(server):
    cards = {each["id"]: each for each in server.get("/v1/models").json()["data"]}
    assert {name: card["parent"] for name, card in cards.items()} == {"quire-tiny": None, "sql": "quire-tiny", "law": "quire-tiny"}  # fmt: skip
    assert server.get("/v1/models/law").json()["root"] == "law"
    assert server.get("/v1/models/tax").status_code == 404


def test_chats_under_two_adapters_share_nothing_and_under_one_share_all(server):
    def cached(name):
        asked = {"messages": CHAT, "max_tokens": 1, "model": name, "cache_salt": "apart"}
        usage = server.post("/v1/chat/completions", asked).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached(name) for name in ("sql", "law", "quire-tiny")] == [0, 0, 0]
    assert min(cached(name) for name in ("sql", "law", "quire-tiny")) > 16


def test_the_operator_asks_for_the_cache_of_an_adapter_by_its_name(server):
    asked = ASKED | {"prompt": "The operator looks at what is cached of adapters, apart."}
    server.post("/v1/completions", asked | {"model": "sql"})
    looked = {name: server.post("/v1/cache/explain", {"prompt": asked["prompt"], "model": name}).json()["cached_tokens"] for name in ("sql", "law")}  # fmt: skip
    assert looked["sql"] > looked["law"] == 0
    evicted = server.post("/v1/cache/evict", {"all": True, "model": "sql"}).json()
    assert evicted["evicted_blocks"] > 0


def test_adapters_that_cannot_be_served_are_refused_before_the_model_is_loaded(made, server):
    sql = made[0]["sql"]
    for given, words in (
        (["sql"], "NAME=FOLDER"),
        ([f"={sql}"], "NAME=FOLDER"),
        ([f"quire-tiny={sql}"], "is a name already"),
        ([f"a={sql}", f"a={sql}"], "is a name already"),
        ([f"a={sql}/none"], "no adapter_config.json"),
    ):
        with pytest.raises(ConfigError, match=words):
            adapters_of(given, ["quire-tiny"])
    with pytest.raises(ConfigError, match="name of the model and of an adapter"):
        ServedModel(server.service.running, "law", ApiKeys(), Bounds())


@pytest.mark.ci
def test_the_command_serves_adapters(made):
    words = [f"--lora={name}={folder}" for name, folder in made[0].items()]
    with command(*words) as (_, said):
        import plain_http

        listed = plain_http.get(f"{said['url']}/v1/models").json()["data"]
        assert [each["id"] for each in listed] == ["quire-tiny", "sql", "law"]
