"""A server over a GGUF file: caching, tenants, scores, forms and faults as over models of transformers."""

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("gguf")

from serve_help import LONG, running, short, tiny, together
from test_clients import cells, client_anthropic, client_openai

import plain_http
from gguf_help import write_llama
from quire import Recorder
from quire.engines.gguf import GgufModel
from quire.errors import ConfigError
from quire.exchange import BlockRemoved, BlockStored, EventLog
from quire.serve.service import Bounds
from quire.web.keys import ApiKeys

pytestmark = pytest.mark.system("llama.cpp")

KEYS = {"ann": "key-of-ann", "bob": "key-of-bob", "clients": cells.KEY}
SIZE, PINNED = 16, 320
COLD = {"prompt": "A list", "max_tokens": 2, "temperature": 0}
TEXT = (
    "A list keeps the order of what was put into it, and a dict maps keys to values. " * 3 + "So:"
)
"""240 tokens, of whole blocks, and three."""
NEAR = 0.1
"""Distance of log-probabilities: llama.cpp's attention computes in half precision, and by the places of cells."""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """quire-tiny as a GGUF file."""
    return write_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf", *tiny(), merges=[("t", "5")])


@pytest.fixture(scope="module")
def make(file):
    """Serve the file with some options, and see that the residents of its context are what they are told to be."""

    def served(n_ctx=16384, **options):
        return running(GgufModel(file, n_ctx=n_ctx, n_threads=1), **options)

    return served


@pytest.fixture(scope="module")
def events():
    return EventLog(10_000)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return tmp_path_factory.mktemp("recorded") / "requests.jsonl"


@pytest.fixture(scope="module")
def server(make, events, recorded):
    keys = ApiKeys([*KEYS.items()], cells.OPERATOR_KEY, pins={"ann": PINNED})
    bounds = Bounds(max_inflight=cells.MAX_INFLIGHT)
    watchers = [events, Recorder(recorded, SIZE)]
    with make(keys=keys, bounds=bounds, watchers=watchers) as made:
        yield made
        for name in KEYS:
            operate(made, "purge", {"tenant": name})
        made.quiet()
    watchers[1].close()


@pytest.fixture(autouse=True)
def every_position_is_accounted_for(request):
    yield
    if "server" in request.fixturenames:
        check(request.getfixturevalue("server"))


def check(server):
    """Check that the context has the positions that residents of ended requests have, and no others."""

    def seen(engine):
        engine._forward.residents.check()
        return len(engine._forward.residents.by_owner)

    running_ = server.service.running
    if not server.manager.num_active:
        assert asyncio.run(running_.call(seen)) == 0


def headers(name):
    return {"Authorization": f"Bearer {KEYS[name]}"}


def ask(server, path="/v1/completions", name="ann", **given):
    asked = {"model": "quire-tiny", "max_tokens": 4, "temperature": 0} | given
    answer = server.post(path, asked, headers=headers(name))
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(server, name="ann", prompt=TEXT, **given):
    said = ask(server, name=name, prompt=prompt, **given)
    return said["usage"]["prompt_tokens_details"]["cached_tokens"]


def operate(server, path, document=None):
    key = {"Authorization": f"Bearer {cells.OPERATOR_KEY}"}
    send = server.get if document is None else server.post
    more = {} if document is None else {"document": document}
    answer = send(f"/v1/cache/{path}".removesuffix("/"), **more, headers=key)
    assert answer.status_code == 200, answer.text
    return answer.json()


def forget(server, name):
    """Have the blocks of a tenant alone left of what it has computed: the cells of a purge are overwritten."""
    operate(server, "purge", {"tenant": "bob" if name == "ann" else "ann"})
    assert not server.service.running.engine._forward.residents.idle


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    ("client", "feature"),
    [
        pytest.param(each, feature, id=f"{each.__name__}-{feature}")
        for each in (client_openai, client_anthropic)
        for feature in cells.features(vars(each))
        if feature != "reasoning"
    ],
)
def test_a_client_has_a_feature(server, client, feature):
    with asyncio.Runner() as loop:
        cells.call(getattr(client, feature), cells.Server(server.url, "quire-tiny"), loop)


def test_the_cache_is_explained_and_shown_and_tenants_share_nothing(server):
    operate(server, "purge", {"tenant": "ann"})
    assert cached(server, "ann") == cached(server, "bob") == cached(server, cache_salt="x") == 0
    assert cached(server, "ann") == cached(server, "bob") == 240
    told = operate(server, "explain", {"prompt": TEXT, "tenant": "ann"})
    assert told["segments"][0] == {"start": 0, "stop": 240, "cached": True, "why": "15 shared blocks"}  # fmt: skip
    cold = operate(server, "explain", {"prompt": f"No. {TEXT}", "tenant": "ann"})
    assert (cold["cached_tokens"], cold["segments"][0]["why"]) == (0, "cold")
    state = operate(server, "")
    (group,) = state["groups"]
    assert group["free"] + group["active"] + group["cached"] == group["num_blocks"]
    assert operate(server, "purge", {"tenant": "ann"})["complete"]
    assert (cached(server, "ann"), cached(server, "bob")) == (0, 240)


@pytest.mark.parametrize("stream", [False, True])
def test_a_breakpoint_pins_blocks_from_which_its_prompt_is_restored(server, stream):
    operate(server, "purge", {"tenant": "ann"})
    talk = [{"role": "user", "content": TEXT * 2}]
    given = {"messages": talk, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    key = {"x-api-key": KEYS["ann"]}
    asked = {"model": "quire-tiny", "max_tokens": 4, "temperature": 0, "stream": stream}
    assert server.post("/v1/messages", asked | given, headers=key).status_code == 200
    assert [each["num_tokens"] for each in operate(server, "pins")["data"]] == [PINNED]
    first = ask(server, "/v1/messages", messages=talk)
    operate(server, "evict", {"all": True, "tenant": "ann"})
    forget(server, "ann")
    again = ask(server, "/v1/messages", messages=talk)
    assert again["usage"]["cache_read_input_tokens"] == PINNED
    assert again["content"] == first["content"]


def test_hints_order_what_is_evicted(server):
    operate(server, "purge", {"tenant": "ann"})
    for end, hint in (("once", "never"), ("more", "session")):
        ask(server, prompt=f"{end} {TEXT}", reuse=hint, session_id="s")
    assert operate(server, "evict", {"num_blocks": 15})["evicted_blocks"] == 15
    left = [cached(server, prompt=f"{end} {TEXT}", max_tokens=1) for end in ("once", "more")]
    assert left[0] < left[1] == 240


def test_events_and_a_recording_tell_what_is_cached(server, events, recorded):
    prompt = list(range(5, 5 + 3 * SIZE + 3))
    events.take()
    ask(server, prompt=prompt, cache_salt="told")
    stored = [each for each in events.take() if isinstance(each, BlockStored)]
    assert [token for each in stored for token in each.token_ids] == prompt[: 3 * SIZE]
    assert {(each.scope.tenant, each.scope.salt) for each in stored} == {("ann", "told")}
    operate(server, "evict", {"all": True, "tenant": "ann", "cache_salt": "told"})
    assert any(isinstance(each, BlockRemoved) for each in events.take())
    row = json.loads(recorded.read_text().splitlines()[-1])
    assert (row["in"], row["out"]) == (len(prompt), 3)


def test_scores_of_a_prompt_are_equal_on_hits_and_misses(server):
    asked = {"prompt": TEXT, "logprobs": 2, "echo": True, "max_tokens": 0}
    operate(server, "purge", {"tenant": "ann"})
    cold = ask(server, **asked)["choices"][0]["logprobs"]["token_logprobs"]
    assert cached(server) > 0
    warm = ask(server, **asked)["choices"][0]["logprobs"]["token_logprobs"]
    forget(server, "ann")
    restored = ask(server, **asked)["choices"][0]["logprobs"]["token_logprobs"]
    right = scores_of_transformers(tiny()[1](TEXT)["input_ids"])
    for told in (cold, warm, restored):
        assert told[0] is None
        assert told[1:] == pytest.approx(right, abs=NEAR)
    said = ask(server, prompt=TEXT, prompt_logprobs=1)["choices"][0]
    for one, token in zip(said["prompt_logprobs"][1:], right, strict=True):
        assert max(each["logprob"] for each in one.values()) >= token - NEAR


def scores_of_transformers(ids):
    import torch

    with torch.inference_mode():
        scores = tiny()[0](torch.tensor([ids])).logits[0].log_softmax(-1)
    return scores[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_the_form_that_is_asked_for(server, stream):
    forms = {
        "regex": (
            {"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2,9}z"}},
            "[0-9]{3}-[a-f]{2,9}z",
        ),
        "choice": ({"guided_choice": ["north", "south"]}, "north|south"),
    }
    for form, pattern in forms.values():
        asked = {"prompt": TEXT, "max_tokens": 60, "temperature": 1, "seed": 3, "n": 3} | form
        if stream:
            texts = streamed(server, **asked)
        else:
            texts = [each["text"] for each in ask(server, **asked)["choices"]]
        assert len(texts) == 3
        assert all(re.fullmatch(pattern, each) for each in texts), texts


def streamed(server, **given):
    """The texts of a stream's choices, put together."""
    asked = {"model": "quire-tiny", "temperature": 0, "stream": True} | given
    answer = server.post("/v1/completions", asked, headers=headers("ann"))
    texts = {}
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return [texts[each] for each in sorted(texts)]


def test_streams_are_the_whole_answers_also_where_they_are_cut_or_stopped(server):
    whole = ask(server, prompt=TEXT, max_tokens=40)["choices"][0]["text"]
    for more in ({}, {"stop": [whole[5:9]]}, {"max_tokens": 7}):
        asked = {"prompt": TEXT, "max_tokens": 40} | more
        told = ask(server, **asked)["choices"][0]["text"]
        assert streamed(server, **asked) == [told]
        assert whole.startswith(told)


@pytest.mark.parametrize("more", [{}, {"n": 3, "temperature": 1}, {"prompt": ["One", "Two"]}])
def test_a_client_that_goes_is_forgotten_and_what_it_computed_is_found(server, more):
    operate(server, "purge", {"tenant": "ann"})
    asked = LONG | {"prompt": TEXT, "stream": True, "max_tokens": 2000} | more
    given = {"json": asked, "headers": headers("ann")}
    with plain_http.stream("POST", f"{server.url}/v1/completions", **given) as answer:
        lines = answer.iter_lines()
        for _ in range(40):
            next(lines)
    server.quiet()
    check(server)
    if more.get("prompt") is None:
        assert cached(server) >= 240


def test_an_error_of_llama_cpp_is_told_and_the_server_lives(make, monkeypatch):
    with make(num_blocks=200) as server:
        before = server.post("/v1/completions", COLD).json()["choices"][0]["text"]
        context = server.service.running.engine._forward._context
        decode, calls = context.decode, []

        def failing(chunks):
            calls.append(chunks)
            if len(calls) > 20:
                raise RuntimeError("llama_decode failed")
            return decode(chunks)

        monkeypatch.setattr(context, "decode", failing)
        asked = LONG | {"stream": True, "max_tokens": 200}
        answer = plain_http.post(f"{server.url}/v1/completions", json=asked, timeout=120)
        *_, last = (line for line in answer.text.splitlines() if line.startswith("data: {"))
        assert json.loads(last[6:])["error"]["type"] == "server_error"
        assert short(server).status_code == 500
        monkeypatch.undo()
        server.quiet()
        assert server.post("/v1/completions", COLD).json()["choices"][0]["text"] == before
        server.quiet()
        check(server)


@pytest.mark.parametrize("n_ctx", [16384, 512])
def test_requests_that_are_preempted_or_lose_their_cells_answer_as_alone(make, n_ctx):
    asked = [LONG | {"max_tokens": 90, "prompt": f"{at} {TEXT[:60]}"} for at in range(6)]
    with make(n_ctx=n_ctx, num_blocks=24) as server, ThreadPoolExecutor(6) as crew:
        alone = [
            server.post("/v1/completions", each).json()["choices"][0]["text"] for each in asked
        ]
        evict_all(server)
        with together(server, 6):
            answers = list(crew.map(lambda each: server.post("/v1/completions", each), asked))
        assert [each.status_code for each in answers] == [200] * 6
        told = [each.json()["choices"][0]["text"] for each in answers]
        assert server.service.running.engine.stats().preemptions > 0
        assert sum(one == other for one, other in zip(told, alone, strict=True)) >= 4  # ties
        server.quiet()
        check(server)


def evict_all(server):
    assert server.post("/v1/cache/evict", {"all": True}).status_code == 200


def test_adapters_and_passages_are_refused_by_name(file):
    from quire.engines.loop import Engine

    model = GgufModel(file, n_ctx=512)
    with pytest.raises(ConfigError, match=r"adapters .'sql'.*give the folder"):
        Engine(model, tiny()[1], num_blocks=8, adapters={"sql": file.parent})
    Engine(model, tiny()[1], num_blocks=8).close()
    model.close()
