"""Decode steps as CUDA graphs: the tokens of the plain model, while requests come and go and the model changes."""

import sys
from pathlib import Path
from random import Random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

sys.path.append(str(Path(__file__).parents[1] / "engines_loop"))

import loop_help  # noqa: E402
from loop_help import nothing_held, plain_answer, ties, tiny_model  # noqa: E402

from quire.engines.loop import Engine, SamplingParams  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

HEADS = [[3 + (7 * n + i * (n + 3)) % 90 for i in range(45)] for n in range(3)]


def graphs(engine):
    kept = engine._forward.model._decoder._kept[1]
    return None if kept is None else kept._graphs


def answers(engine, prompts, num_tokens=6):
    params = SamplingParams(temperature=0, max_tokens=num_tokens)
    return [tuple(o.outputs[0].token_ids) for o in engine.generate(prompts, params)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral+window"])
def test_requests_that_come_and_go_get_the_tokens_of_the_plain_model(family):
    random, model, asked, count = Random(4), tiny_model(family).cuda(), {}, 0
    engine = Engine(model, num_blocks=160, block_size=4, max_running=20, max_step_tokens=90)
    while count < 60 or engine.has_unfinished():
        for _ in range(random.choice((0, 0, 1, 4)) if count < 60 else 0):
            head = random.choice(HEADS)[: random.randrange(45)]
            prompt = head + [random.randrange(3, 90) for _ in range(random.randrange(1, 12))]
            params = SamplingParams(temperature=0, max_tokens=random.randrange(1, 16))
            asked[engine.add_request(prompt, params)] = prompt
            count += 1
        if asked and random.random() < 0.05:
            gone = random.choice([*asked])
            engine.abort(gone)
            del asked[gone]
        for output in engine.step():
            if output.finished:
                (answer,), prompt = output.outputs, asked.pop(output.request_id)
                ties(model, prompt, answer.token_ids, len(answer.token_ids))
    assert len(graphs(engine)) > 2
    nothing_held(engine)


def test_a_changed_model_is_captured_anew():
    model = tiny_model("llama").cuda()
    engine, prompts = Engine(model, num_blocks=160, block_size=4), HEADS

    def check():
        loop_help._generated.cache_clear()
        found = answers(engine, prompts)
        assert found == [plain_answer(model, prompt, 6) for prompt in prompts]
        return found

    first = check()
    assert graphs(engine)
    layer = model.model.layers[1].mlp.up_proj
    with torch.no_grad():
        layer.weight.mul_(-1.0)
    assert (second := check()) != first
    layer.weight = torch.nn.Parameter(layer.weight.detach() * -2)
    assert check() != second
    assert graphs(engine)
    calls = []
    hook = layer.register_forward_hook(lambda *_: calls.append(1))
    check()
    seen = len(calls)
    assert seen > 10
    hook.remove()
    check()
    assert len(calls) == seen
    assert graphs(engine)


def test_a_step_whose_capture_fails_is_computed_without_a_graph(monkeypatch, caplog):
    def broken(*_, **__):
        raise RuntimeError("no room for a graph")

    monkeypatch.setattr(torch.cuda, "graph", broken)
    model = tiny_model("llama").cuda()
    engine = Engine(model, num_blocks=160, block_size=4)
    for _ in range(2):
        assert answers(engine, HEADS) == [plain_answer(model, prompt, 6) for prompt in HEADS]
    said = ["no room for a graph" in record.message for record in caplog.records]
    assert 1 <= sum(said) <= 2  # one may be of the proof, which computes with a model of its own
    assert graphs(engine) is None
