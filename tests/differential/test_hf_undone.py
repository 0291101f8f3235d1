"""A model that is changed and changed back within one call: what the other model computed is never kept."""

import pytest
import torch
from hf_help import check_stored, make_cache, own, same
from transformers import LogitsProcessorList, StoppingCriteriaList

from turns import by_turns


def hook(model):
    handle = model.model.layers[0].register_forward_hook(lambda _, __, out: out * 1.5)
    return handle.remove


def setting(model):
    norm = model.model.layers[1].input_layernorm
    before, norm.variance_epsilon = norm.variance_epsilon, 5.0
    return lambda: setattr(norm, "variance_epsilon", before)


def forward(model):
    layer = model.model.layers[1].mlp
    plain = layer.forward
    layer.forward = lambda hidden: plain(hidden) * 2
    return lambda: delattr(layer, "forward")


def weight(model):
    projection = model.model.layers[1].self_attn.k_proj
    before, projection.weight = projection.weight, torch.nn.Parameter(projection.weight + 0.5)
    return lambda: setattr(projection, "weight", before)


def in_place(model):
    norm = model.model.layers[0].input_layernorm.weight
    with torch.no_grad():
        norm.add_(1)

    def undo():
        with torch.no_grad():
            norm.sub_(1)

    return undo


def adapter(model):
    model.set_adapter("b")
    return lambda: model.set_adapter("a")


CHANGES = [hook, setting, forward, weight, in_place, adapter]


@pytest.fixture
def model(request):
    model = own("llama")
    if request.node.callspec.params["change"] is adapter:
        peft = pytest.importorskip("peft")
        for name in "ab":
            targets = ["q_proj", "k_proj", "v_proj"]
            model.add_adapter(
                peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False), name
            )
        model.set_adapter("a")
    return model


@pytest.mark.cases(2)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_session_keeps_nothing_of_what_another_model_computed(model, ids, change):
    cache = make_cache(model, block_size=4)
    with cache.session(ids) as past, torch.no_grad():
        model(ids[:, :20], past_key_values=past)
        undo = change(model)
        model(ids[:, 20:30], past_key_values=past)
        undo()
        model(ids[:, 30:], past_key_values=past)
    assert cache.last.unknown_tokens == 21
    assert cache.last.unknown_reason == "the model was another than when the call began"
    assert check_stored(model, cache, ids[0]) <= 20
    same(model, cache, ids)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("change", "by"), by_turns(CHANGES, ["stopping_criteria", "logits_processor", "streamer"])
)
def test_generate_keeps_nothing_of_what_another_model_computed(model, ids, change, by):
    cache, undo, calls = make_cache(model, block_size=4), [], []

    def between():
        calls.append(1)
        if len(calls) == 3:
            undo.append(change(model))
        if len(calls) == 8:
            undo.pop()()

    class Criterion:
        def __call__(self, ids, *_, **__):
            between()
            return torch.zeros(len(ids), dtype=torch.bool)

    class Processor:
        def __call__(self, _, scores):
            between()
            return scores

    class Streamer:
        def put(self, _):
            between()

        def end(self):
            pass

    given = {
        "stopping_criteria": StoppingCriteriaList([Criterion()]),
        "logits_processor": LogitsProcessorList([Processor()]),
        "streamer": Streamer(),
    }[by]
    text = cache.generate(ids, max_new_tokens=12, min_new_tokens=12, **{by: given})
    assert len(calls) >= 12
    assert check_stored(model, cache, text[0]) <= 44
    same(model, cache, text)
