"""Plain decoders in few passes: which models are, and what each pass computes."""

import copy
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from loop_help import GREEDY, nothing_held, plain_answer, ties, tiny_model

sys.path.append(str(Path(__file__).parents[1] / "kernels_cpu"))

from attention_help import TOLERANCES

from quire.engines.loop import Engine
from quire.engines.models.inventory import Inventory
from quire.engines.packed.decoder import is_plain
from quire.engines.packed.model import PackedModel
from quire.engines.packed.proof import proven
from quire.kernels.attention import Packed
from quire.tensors.pool import KVPool


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_rows_without_logits_stop_after_the_last_layers_keys_and_values(dtype, name):
    model = tiny_model(name, dtype=dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # biases too, which begin at 0
            parameter.add_(0.02 * torch.randn_like(parameter))
    packed = proven(model, 4)
    assert packed.plain
    table, ids = np.arange(5, dtype=np.int32)[None], torch.arange(3, 20)
    plans, found = packed.plans(), []
    for rows in (None, [16], [], [15, 16]):
        pools = [KVPool(group.memory, 5, packed.device) for group in packed.layout.groups]
        for pool in pools:
            pool.k.zero_(), pool.v.zero_()
        plans[0].update(Packed(table, np.zeros(1, np.int64), np.full(1, 17)))
        asked = None if rows is None else torch.tensor(rows, dtype=torch.int64)
        logits = packed.forward(ids, torch.arange(17), asked, plans, pools)
        found.append((logits if rows is not None else logits[[15, 16]], pools[0].k, pools[0].v))
    whole, limit = found[0], TOLERANCES[dtype]
    for (logits, *kept), rows in zip(found[1:], ([1], [], [0, 1]), strict=True):
        torch.testing.assert_close(logits, whole[0][rows], rtol=limit, atol=limit)
        for pool, right in zip(kept, whole[1:], strict=True):
            torch.testing.assert_close(pool, right, rtol=limit, atol=limit)


def test_the_passes_of_a_step_are_used_again_only_where_nothing_they_read_is_another():
    model = copy.deepcopy(tiny_model("llama"))
    packed, table = proven(model, 4), np.arange(24, dtype=np.int32).reshape(3, 8)
    pools = [KVPool(group.memory, 24, packed.device) for group in packed.layout.groups]
    for pool in pools:
        pool.k.normal_(), pool.v.normal_()
    other = [KVPool(group.memory, 24, packed.device) for group in packed.layout.groups]
    for mine, pool in zip(other, pools, strict=True):
        mine.k.copy_(-pool.k), mine.v.copy_(pool.v)
    plans, lengths = packed.plans(), np.ones(3, np.int64)
    up = model.model.layers[0].mlp.up_proj

    def logits(of, plans, held, at):
        plans[0].update(Packed(table, np.array([at, 9, at + 5]), lengths))
        positions = torch.tensor([at, 9, at + 5])
        return of.forward(torch.arange(3) + at, positions, None, plans, held)

    def scaled():
        up.weight = torch.nn.Parameter(up.weight.detach() * 2)

    def doubled():
        with torch.no_grad():
            up.weight.mul_(0.5)

    def epsilon():
        model.model.layers[1].input_layernorm.variance_epsilon = 0.1

    def wider():
        model.double(), model.float()

    changes = [None, None, scaled, doubled, None, lambda: torch.set_num_threads(1), epsilon, wider]
    before = torch.get_num_threads()
    for at, (change, held) in enumerate(zip(changes, 4 * [pools] + 4 * [other], strict=True)):
        if change is not None:
            change()
        anew = PackedModel(model, 4, plain=True)
        right = logits(anew, anew.plans(), [_copied(pool) for pool in held], at)
        torch.testing.assert_close(logits(packed, plans, held, at), right, rtol=1e-5, atol=1e-5)
    torch.set_num_threads(before)


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_steps_of_any_rows_are_computed_by_the_same_passes(dtype):
    model, rng = tiny_model("mistral+window", dtype=dtype), np.random.default_rng(5)
    packed, limit = proven(model, 4), TOLERANCES[dtype]
    pools = [KVPool(group.memory, 30, packed.device) for group in packed.layout.groups]
    for pool in pools:
        pool.k.normal_(), pool.v.normal_()
    plans = packed.plans()
    for num_requests, longest in [(1, 3), (3, 16), (2, 1), (3, 1), (1, 17), (3, 9), (1, 1), (2, 8)]:
        if num_requests == 2:
            before = weakref.ref(pools[0].k)
            pools[0].resize(pools[0].num_blocks + 1)
            assert before() is None  # its memory is free
        lengths = rng.integers(1, longest + 1, num_requests)
        starts, ends = rng.integers(0, 20, num_requests), lengths.cumsum()
        tables = rng.permutation(30).astype(np.int32).reshape(3, 10)[:num_requests]
        step = Packed(tables, starts, lengths)
        places = torch.from_numpy(np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1]))
        asked = torch.from_numpy(ends[rng.random(num_requests) < 0.7] - 1)
        found = []
        for of, how, held in (
            (packed, plans, pools),
            (PackedModel(model, 4), packed.plans(), [_copied(pool) for pool in pools]),
        ):
            for plan in how:
                plan.update(step)
            logits = of.forward(places % 50, places, asked, how, held)
            found.append((logits, *(each.clone() for pool in held for each in (pool.k, pool.v))))
        for mine, right in zip(*found, strict=True):
            torch.testing.assert_close(mine, right, rtol=limit, atol=limit, equal_nan=True)


@pytest.mark.parametrize("kind", ["default", "linear", "yarn"])
def test_positions_turn_by_the_angles_that_they_have_in_their_step(kind):
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4}
    changes = {"rope_parameters": rope, "max_position_embeddings": 16}
    model = tiny_model.__wrapped__("llama", **changes)
    table, one = np.arange(10, dtype=np.int32)[None], np.ones(1, np.int64)
    ways = [PackedModel(model, 4, plain=True), PackedModel(model, 4)]
    pools = [KVPool(group.memory, 10, ways[0].device) for group in ways[0].layout.groups]
    for pool in pools:
        pool.k.normal_(), pool.v.normal_()
    for position in (3, 4, 30, 39, 3):
        found, at = [], torch.tensor([position])
        for way in ways:
            plans = way.plans()
            plans[0].update(Packed(table, one * position, one))
            found.append(way.forward(at + 1, at, None, plans, pools))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def _copied(pool):
    new = KVPool(pool.layout, pool.num_blocks, pool.device)
    new.k.copy_(pool.k), new.v.copy_(pool.v)
    return new


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", ["llama", "mistral", "mistral+window", "qwen2"])
def test_plain_decoders_are_known_by_their_parts_and_their_logits(family):
    assert proven(tiny_model(family), 4).plain


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "olmo2", "gpt2", "mixtral"])
def test_others_are_computed_by_themselves(family):
    assert not proven(tiny_model(family), 4).plain


def test_parts_that_fit_together_in_another_way_are_seen_by_their_logits():
    model = tiny_model("granite", residual_multiplier=0.9)  # else it is a llama
    assert is_plain(model)
    assert not proven(model, 4).plain


def test_a_changed_model_is_computed_by_its_own_forward():
    model, prompt = copy.deepcopy(tiny_model("llama")), list(range(3, 30))
    engine, seen = Engine(model, num_blocks=40), []
    mlp = model.model.layers[1].mlp
    answers = [engine.generate(prompt, GREEDY)[0].outputs[0].token_ids]
    hook = mlp.register_forward_hook(lambda *_: seen.append(1))
    answers.append(engine.generate(prompt, GREEDY)[0].outputs[0].token_ids)
    assert seen
    hook.remove()
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(-3)
    changed = engine.generate(prompt, GREEDY)[0].outputs[0].token_ids
    nothing_held(engine)
    assert answers[0] == answers[1]
    assert changed != answers[0]
    plain_answer.__globals__["_generated"].cache_clear()
    assert ties(model, prompt, changed, 8) <= 1


def test_a_weight_read_as_another_type_where_it_lies_is_noticed():
    model = copy.deepcopy(tiny_model("llama", dtype=torch.bfloat16))
    sight, weight = Inventory(model), model.model.layers[1].mlp.up_proj.weight
    assert sight.holds(sampled=False)
    weight.data = weight.data.view(torch.float16)
    assert not sight.holds(sampled=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.model.layers[0].mlp, "forward", torch.nn.Identity()),
        lambda model: model.model.layers[0].self_attn.add_module("more", torch.nn.Identity()),
        lambda model: setattr(model.model.layers[1].mlp, "act_fn", torch.nn.GELU()),
        lambda model: model.model.layers[1].mlp.up_proj.double(),
        lambda model: model.lm_head.register_forward_pre_hook(print),
        lambda model: model.model.rotary_emb.register_forward_hook(print),
        lambda model: model.model.layers[0].self_attn.q_proj.__setattr__("__class__", Mine),
    ],
    ids=["forward", "child", "activation", "type", "hook", "turned", "class"],
)
def test_a_changed_model_is_not_plain(change):
    model = copy.deepcopy(tiny_model("llama"))
    assert is_plain(model)
    change(model)
    assert not is_plain(model)


class Mine(torch.nn.Linear):
    """A layer of somebody's own."""


def test_a_model_under_global_hooks_or_autocast_is_not_plain():
    model = tiny_model("llama")
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_plain(model)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not is_plain(model)
    hook.remove()
    assert is_plain(model)
