"""Every way into a cache or an engine, with everything that is no token ids: a clear error, and nothing changed."""

from itertools import product

import numpy as np
import pytest
import torch
from hf_help import make_cache, tiny_model

from quire import ops
from quire.core import CacheManager
from quire.engines.hf import SlotPrefixCache
from quire.engines.loop import Engine, SamplingParams
from quire.errors import ConfigError, TokensError

FORMS = {
    "generator": (lambda: (number for number in [3, 4, 5]), "generator"),
    "iterator": (lambda: iter([3, 4, 5]), "list_iterator"),
    "map": (lambda: map(int, ["3"]), "map"),
    "None": (lambda: None, "None"),
    "set": (lambda: {3, 4}, "set"),
    "dict": (lambda: {"a": 1}, "a"),
    "scalar": (lambda: np.int64(5), "int64"),
    "tensor": (lambda: torch.tensor(5), r"shape \[\]|Tensor"),
    "floats": (lambda: [3.0, 4.0], "float64"),
    "flags": (lambda: [True, False], "bool"),
    "nan": (lambda: [float("nan")], "float64"),
    "words": (lambda: [3, "a"], "str"),
    "holes": (lambda: [3, None], "NoneType|object"),
    "huge": (lambda: [2**70], "huge|1180591620717411303424"),
    "bytes": (lambda: b"abc", "bytes"),
    "nested": (lambda: [[[3]]], "shape|dimensions"),
}
PARAMS = SamplingParams(max_tokens=1)
DOORS = {
    "generate": lambda cache, ids: cache.generate(ids, max_new_tokens=1),
    "session": lambda cache, ids: cache.session(ids).__enter__(),
    "explain": lambda cache, ids: cache.explain(ids),
    "pin": lambda cache, ids: cache.pin(ids),
    "prefetch": lambda cache, ids: cache.prefetch(ids),
    "slots": lambda slots, ids: slots.generate(ids, max_new_tokens=1),
    "add_request": lambda engine, ids: engine.add_request(ids, PARAMS),
    "open": lambda manager, ids: manager.open(ids),
}


@pytest.fixture(scope="module")
def places():
    model = tiny_model("llama")
    cache = make_cache(model, block_size=4)
    of = {"slots": SlotPrefixCache(model, 2, 64), "open": CacheManager(20, block_size=4)}
    return {**dict.fromkeys(DOORS, cache), **of, "add_request": Engine(model, num_blocks=50)}


@pytest.mark.cases(29)
@pytest.mark.parametrize(("door", "form"), [*product(DOORS, FORMS)])
def test_an_argument_that_is_no_token_ids_is_refused_with_its_kind(places, door, form):
    make, named = FORMS[form]
    place = places[door]
    manager = getattr(place, "manager", place)
    before = ops.snapshot(manager) if isinstance(manager, CacheManager) else None
    with pytest.raises((TokensError, ConfigError), match=named) as refused:
        DOORS[door](place, make())
    assert "shape ()" not in str(refused.value)
    assert before is None or ops.snapshot(manager) == before


@pytest.mark.parametrize("of", ["generate", "slots"])
def test_no_cache_given_is_as_if_nothing_was_said(places, of):
    ids = torch.tensor([[3, 4, 5]])
    expected = tiny_model("llama").generate(ids, past_key_values=None, max_new_tokens=2)
    found = places[of].generate(ids, past_key_values=None, max_new_tokens=2)
    assert torch.equal(found, expected)
