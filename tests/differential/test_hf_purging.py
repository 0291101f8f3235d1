"""A purge of a `PrefixCache` leaves no byte of its tenant in pools, tiers and passages, and all of others'."""

import sys
from pathlib import Path

import pytest
import torch
from hf_help import make_cache, tiny_model

sys.path.insert(0, str(Path(__file__).parents[1] / "tiers"))

from searching import found_in_files, found_in_memory, found_in_pools

from quire import Scope, ops
from quire.errors import CacheBusy, ScopeError
from quire.exchange.hashing import tenant_tag
from quire.tensors.pool import KVPool
from quire.tiers import Disk, Files, Host
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stack import TierStack
from turns import few

MINE, SALTED, OTHER = Scope(tenant="acme"), Scope(salt="user-1", tenant="acme"), Scope(salt="bolt")
FAMILIES = "llama", "gemma2", "qwen3_next", "bamba", "lfm3"
"""Full attention, windows, and states of several kinds."""


def ids_of(first, num_tokens=41):
    """A prompt; those of the other tenant (1 and 4) have no token in common with any of the first one's."""
    tokens = [4 + 2 * ((first * 31 + at * 7) % 45) - first % 3 % 2 for at in range(num_tokens)]
    return torch.tensor([tokens])


def needles_of(cache, *scopes):
    """Return bytes of the K, V and states that the pools have cached of some scopes."""
    found = {tenant_tag(MINE)}
    manager = cache.manager
    for scope in scopes:
        root = manager.kernel.tree.roots.get(cache.kept.identity.scope(scope))
        nodes = [] if root is None else [*root.children.values()]
        for node in nodes:
            nodes.extend(node.children.values())
            for group, pool in enumerate(cache.kept.pools):
                sparse = next((g for g in manager.kernel.tree.sparse if g.index == group), None)
                ids = node.blocks[group] if sparse is None else [b for _, b in sparse.held(node)]
                for block in ids:
                    for held in pool._by_block():
                        rows = held[block][-1, 1] if isinstance(pool, KVPool) else held[block]
                        data = rows.detach().contiguous().numpy().tobytes()[:64]
                        if len(data) >= 16 and any(data):
                            found.add(data)
    return found


def where(cache, stack, tmp_path, needles):
    below = f"{tmp_path}/"
    places = found_in_pools(cache.kept.pools, *needles)
    places += found_in_memory(stack.tiers[0], *needles) + found_in_files(tmp_path, *needles)
    return {each.partition(below)[2].split("/")[0] or each.split(":")[0] for each in places}


@pytest.fixture
def tiers(tmp_path):
    made = [Host("2MiB"), Disk(tmp_path / "disk", "2MiB"), Files(tmp_path / "files")]
    with TierStack(made, StackSettings(gate=False, busy_share=1.0)) as stack:
        yield stack


@pytest.mark.cases(2)
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("family", few(FAMILIES, "llama", "gemma2", "bamba"))
def test_no_byte_of_a_tenant_is_left_whatever_its_layers_keep(family, debug, tmp_path, tiers):
    model = tiny_model(family)
    cache = make_cache(model, num_blocks=40, block_size=4, tiers=tiers, debug=debug)
    needles = set()
    for number in range(7):
        scope = (MINE, OTHER, SALTED)[number % 3]
        cache.generate(ids_of(number), max_new_tokens=3, do_sample=False, scope=scope)
        cache.manager  # what goes down is copied  # noqa: B018
        needles |= needles_of(cache, MINE, SALTED)
    tiers.drain(10)
    pinned = cache.pin(ids_of(6), MINE)
    before = where(cache, tiers, tmp_path, needles)
    assert {"arena", "disk", "files"} < before
    assert any(each.startswith("pool") for each in before)
    told = cache.purge("acme")
    assert told.is_complete, told.reason
    assert (told.pins, told.requests, told.held) == (1, 0, 0)
    assert all(count > 0 for count in told.blocks.values())
    assert all(each.count > 0 for each in told.tiers.values())
    assert where(cache, tiers, tmp_path, needles) == set()
    assert not pinned.is_held
    ops.check(cache.manager)
    out = cache.generate(ids_of(4), max_new_tokens=3, do_sample=False, scope=OTHER)
    assert cache.last.cached_tokens > 20
    assert torch.equal(out, model.generate(ids_of(4), max_new_tokens=3, do_sample=False))
    cache.generate(ids_of(0), max_new_tokens=3, do_sample=False, scope=MINE)
    assert cache.last.cached_tokens == 0
    cache.generate(ids_of(0), max_new_tokens=3, do_sample=False, scope=MINE)
    assert cache.last.cached_tokens > 20
    cache.close()


def test_a_tenant_with_an_open_session_is_refused_and_nothing_has_changed(tiers):
    model = tiny_model("llama")
    cache = make_cache(model, block_size=4, tiers=tiers)
    cache.generate(ids_of(0), max_new_tokens=3, do_sample=False, scope=MINE)
    cache.generate(ids_of(1), max_new_tokens=3, do_sample=False, scope=OTHER)
    with cache.session(ids_of(2), scope=SALTED) as past, torch.no_grad():
        model(ids_of(2), past_key_values=past, use_cache=True)
        before = ops.snapshot(cache.manager)
        with pytest.raises(CacheBusy, match=r"1 rows of sessions or calls of this tenant"):
            cache.purge("acme")
        assert ops.snapshot(cache.manager) == before
        assert cache.purge("bolt").is_complete  # others may be purged meanwhile
    assert cache.purge("acme").is_complete
    assert cache.explain(ids_of(0), MINE).hit.num_tokens == 0
    with pytest.raises(ScopeError):
        cache.purge(1.5)
    cache.close()


def test_the_session_of_another_goes_on_over_a_purge():
    model = tiny_model("llama")
    cache = make_cache(model, block_size=4)
    cache.generate(ids_of(1), max_new_tokens=3, do_sample=False, scope=OTHER)
    cache.generate(ids_of(0), max_new_tokens=3, do_sample=False, scope=MINE)
    plain = model.generate(ids_of(1), max_new_tokens=12, do_sample=False)
    with cache.session(ids_of(1), scope=OTHER) as past:
        assert past.get_seq_length() == 40
        assert cache.purge("acme").blocks["full"] > 0
        out = model.generate(ids_of(1), past_key_values=past, max_new_tokens=12, do_sample=False)
    assert torch.equal(out, plain)
    cache.generate(ids_of(1), max_new_tokens=12, do_sample=False, scope=OTHER)
    assert cache.last.cached_tokens == 40


def test_a_call_of_the_tenant_that_purges_from_within_is_refused():
    cache = make_cache(tiny_model("llama"), block_size=4)
    raised = []

    def purges(ids, scores):
        with pytest.raises(CacheBusy) as error:
            cache.purge("acme")
        raised.append(error)
        return scores

    cache.generate(
        ids_of(0), max_new_tokens=2, do_sample=False, scope=MINE, logits_processor=[purges]
    )
    assert raised
