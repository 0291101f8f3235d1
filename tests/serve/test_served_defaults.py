"""Defaults of a server: sampling of the model, names, a chat template."""

from types import SimpleNamespace

import openai
import pytest
from serve_help import command, fixtures
from transformers import GenerationConfig

import plain_http
from quire._version import __version__
from quire.cli.serve import Wanted
from quire.engines.loop.params import own_sampling
from quire.errors import ConfigError
from quire.serve.service import Bounds, ServedModel
from quire.web.keys import ApiKeys

TALK = [{"role": "user", "content": "What is a list?"}]
OWN = {"temperature": 0.0, "repetition_penalty": 1.5}

server, nothing_stays = fixtures(served={"sampling": OWN, "other_names": ["gpt-4", "quire-tiny"]})


def said(server, model="quire-tiny", **given):
    completions = server.client().chat.completions
    answer = completions.create(model=model, messages=TALK, max_tokens=16, extra_body=given)
    return answer.choices[0].message.content


def test_a_request_has_the_models_sampling_where_it_says_nothing(server):
    text = said(server, seed=1)
    assert text == said(server, seed=2) == said(server, temperature=None, seed=3)
    assert text == said(server, **OWN)
    assert text != said(server, repetition_penalty=1.0)
    assert text != said(server, temperature=1.7, seed=1)


def test_a_generation_config_gives_what_it_names():
    model = SimpleNamespace(generation_config=GenerationConfig(temperature=0.6, top_k=20))
    assert own_sampling(model) == {"temperature": 0.6, "top_k": 20}
    assert own_sampling(SimpleNamespace(generation_config=GenerationConfig())) == {}


@pytest.mark.parametrize(("kind", "wanted"), [("auto", OWN), ("quire", {})])
def test_the_operator_chooses_whose_defaults_hold(server, kind, wanted):
    running = SimpleNamespace(engine=server.service.running.engine)
    running.engine.own_sampling, before = OWN, running.engine.own_sampling
    settings = Wanted("t", "auto", "tiny", ApiKeys(), 1, 60.0, 1, None, None, None, {}, generation_config=kind)  # fmt: skip
    assert settings.service(running).sampling == wanted
    running.engine.own_sampling = before


def test_a_models_sampling_that_cannot_be_is_refused_at_the_start(server):
    with pytest.raises(ConfigError, match=r"top_p is 7"):
        ServedModel(server.service.running, "m", ApiKeys(), Bounds(), sampling={"top_p": 7})


def test_a_model_has_several_names(server):
    client = server.client()
    assert [each.id for each in client.models.list()] == ["quire-tiny", "gpt-4"]
    assert client.models.retrieve("gpt-4").id == "gpt-4"
    assert said(server, "gpt-4") == said(server)
    with pytest.raises(openai.NotFoundError, match="'quire-tiny' and 'gpt-4' are"):
        said(server, "gpt-5")


def test_version_and_ping_are_answered_and_embeddings_are_not(server):
    assert server.get("/version").json() == {"version": __version__}
    assert server.get("/ping").status_code == server.post("/ping").status_code == 200
    with pytest.raises(openai.NotFoundError, match="embeddings' is not offered here"):
        server.client().embeddings.create(model="quire-tiny", input="A")


def test_an_image_in_a_chat_is_refused_by_its_place(server):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    document = {"messages": [{"role": "user", "content": [image]}]}
    answer = server.post("/v1/chat/completions", document)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0].type"


@pytest.mark.ci
def test_the_command_takes_names_and_a_chat_template(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    words = ["--name", "a", "--name", "b", "--chat-template", str(template)]
    with command(*words, "--kv-memory", "16MiB", "--dtype", "float32") as (_, told):
        assert told["model"] == "a"
        names = [each["id"] for each in plain_http.get(told["url"] + "/v1/models").json()["data"]]
        assert names == ["a", "b"]
        asked = {"model": "b", "messages": TALK}
        tokens = plain_http.post(told["url"] + "/tokenize", json=asked).json()["tokens"]
        assert bytes(tokens).decode() == "[What is a list?]"
