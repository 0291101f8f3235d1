"""An exception in the middle of a call of a cache: the next call is exact, or says what to do, and then is."""

from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from hf_help import group_names, make_cache, random_ids, same, tiny_model

import quire
from cuts import LineCut
from quire import ops
from quire.engines.hf import SlotPrefixCache
from quire.errors import Interrupted
from quire.slots import check
from quire.tiers import Host, StackSettings, TierStack
from turns import by_turns, few

pytestmark = pytest.mark.slow
HERE = Path(quire.__file__).parent
WATCHED = (
    str(HERE / "core"),
    str(HERE / "tensors"),
    str(HERE / "engines" / "tiered"),
    *(str(HERE / "engines" / "hf" / name) for name in ("pools.py", "request.py", "static.py")),
)
ERRORS = [KeyboardInterrupt, ZeroDivisionError]
PLACES, LONG = 3, 60
"""So many lines of a call are tried by default, and in the long run."""

SMALL = {"full": 40, "sliding": 14, "chunked": 12, "recurrent": 5}


def text(seed, num_tokens):
    return random_ids(torch.Generator().manual_seed(seed), num_tokens)


def talk(cache, ids):
    cache.generate(input_ids=ids, max_new_tokens=2, do_sample=False)


def served(family, has_tiers):
    """Return a cache that has evicted, and a prompt that it has in part."""
    model = tiny_model(family)
    num_blocks = {name: SMALL[name] for name in group_names(model)}
    tiers = TierStack([Host("1MiB")], StackSettings(gate=False)) if has_tiers else None
    cache = make_cache(model, block_size=4, num_blocks=num_blocks, tiers=tiers)
    ids = text(0, 40)
    for tail in range(3):
        talk(cache, torch.cat([ids[:, :22], text(10 + tail, 14)], dim=1))
    return model, cache, torch.cat([ids[:, :30], text(20, 8)], dim=1)


@pytest.mark.cases(1)
@pytest.mark.parametrize("places", [PLACES, pytest.param(LONG, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("family", "has_tiers", "error"),
    by_turns(["llama", "gemma3_text", "qwen3_next"], [True, False], ERRORS),
)
def test_after_an_exception_a_cache_is_exact_or_says_what_to_do(family, has_tiers, error, places):
    _, cache, prompt = served(family, has_tiers)
    whole = LineCut(WATCHED)
    assert not whole.run(lambda: talk(cache, prompt))
    for at in Random(family).sample(range(1, whole.count + 1), places):
        model, cache, prompt = served(family, has_tiers)
        assert LineCut(WATCHED, at, error).run(partial(talk, cache, prompt)), (
            f"line {at} of {whole.count} hides {error}"
        )
        try:
            same(model, cache, prompt, max_new_tokens=2)
        except Interrupted as why:
            assert "clear()" in str(why)  # noqa: PT017
            cache.clear()
            same(model, cache, prompt, max_new_tokens=2)
        ops.check(cache.manager)
        assert not cache.manager.sequences, f"line {at}: blocks are held by nobody"
        same(model, cache, prompt, max_new_tokens=2)
        assert cache.last.cached_tokens > 0
        cache.close()


@pytest.mark.ci
@pytest.mark.parametrize("step", few([1, 4], 4))
def test_after_ctrl_c_slots_are_exact_or_say_what_to_do(step):
    """By default on each fourth line of the slots."""
    model = tiny_model("llama")
    ids = text(0, 40)

    def used():
        cache = SlotPrefixCache(model, 2, 64, poison=9e3)
        for tail in range(3):
            prompt = torch.cat([ids[:, :20], text(10 + tail, 6)], dim=1)
            cache.generate(prompt, max_new_tokens=1)
        return cache, torch.cat([ids[:, :24], text(20, 6)], dim=1)

    def answer(cache, prompt):
        return cache.generate(prompt, max_new_tokens=2)

    cache, prompt = used()
    whole = LineCut(WATCHED)
    whole.run(lambda: answer(cache, prompt))
    (in_slots,) = (lines for name, lines in whole.lines.items() if name.endswith("static.py"))
    wanted = model.generate(prompt, max_new_tokens=2, do_sample=False)
    places = {*Random(1).sample(range(1, whole.count + 1), PLACES), *in_slots[::step]}
    for at in sorted(places):
        cache, prompt = used()
        LineCut(WATCHED, at).run(partial(answer, cache, prompt))
        try:
            output = answer(cache, prompt)
        except Interrupted:
            cache.slots.reset()
            output = answer(cache, prompt)
        assert output.tolist() == wanted.tolist()
        check(cache.slots)
        assert cache.slots.num_busy == 0
