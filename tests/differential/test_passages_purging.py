"""A purge leaves no passage of its tenant, in memory or in the tier of passages, and all of others'."""

import sys
from contextlib import closing
from pathlib import Path

import pytest
from passages_help import GATES, made, prompt

sys.path.append(str(Path(__file__).parents[1] / "tiers"))

from searching import found_in_files, found_in_memory

from quire import Scope
from quire.engines.hf import PrefixCache
from quire.engines.loop import Engine, SamplingParams
from quire.exchange.hashing import tenant_tag
from quire_passages import NoRows, Passages, Segments
from quire_passages.hf.warm import _encoded
from turns import by_turns

MINE, SALTED, OTHER = Scope(tenant="acme"), Scope(salt="user-1", tenant="acme"), Scope(salt="bolt")
SIZES = (16, 24, 40, 32, 9)
TEXTS = {MINE: prompt(1, SIZES), SALTED: prompt(2, SIZES), OTHER: prompt(3, SIZES)}
GREEDY = SamplingParams(temperature=0, max_tokens=2)
ROOMS = ("memory", "host", "disk", "files")
KEYS = {"open": "", "signed": f"{'4b' * 32}\n"}
KEYS["keyed"] = f"{KEYS['signed']}tenants {'77' * 32}\n"


@pytest.fixture(scope="module")
def model():
    return made("Llama", {})


class OfCache:
    """A `PrefixCache` with passages."""

    def __init__(self, model, passages):
        self.purged = PrefixCache(model, "16MiB", passages=passages)
        self.passages = self.purged.passages
        self.scope = self.purged.kept.identity.scope

    def ask(self, scope, segments):
        self.purged.generate(
            segments=segments, max_new_tokens=2, pad_token_id=0, store_until=0, scope=scope
        )
        return self.purged.last.passages


class OfEngine:
    """An `Engine` with passages."""

    def __init__(self, model, passages):
        self.purged = Engine(model, num_blocks=400, passages=passages)
        self.passages = self.purged._companions[-1].passages
        self.scope = self.purged.scope

    def ask(self, scope, segments):
        given = {"segments": [segments.head, *segments.passages, segments.question]}
        (output,) = self.purged.generate([given], GREEDY, store_until=0, scope=scope)
        return output.passages


HOLDERS = {"cache": OfCache, "engine": OfEngine}


def passages_of(room, folder, key="open"):
    warm = {"host": "host:8MiB", "disk": f"disk:{folder}/warm?capacity=8MiB"}
    warm["files"] = f"files:{folder}/warm"
    given = {"warm": warm.get(room)}
    if room != "memory" and key != "open":
        (folder / "key").write_text(KEYS[key])
        (folder / "key").chmod(0o600)
        given["warm_key"] = folder / "key"
    return Passages(
        "64MiB", NoRows(), None, capture="isolated", worth=10.0, min_tokens=2, gates=GATES, **given
    )


def turned(segments):
    return Segments(segments.head, segments.passages[::-1], segments.question)


def variants(holder, *scopes):
    """Return the captures that the store has of some tenants' prompts."""
    found = []
    for scope in scopes:
        head, store = TEXTS[scope].head.tobytes(), holder.passages.store
        for ids in TEXTS[scope].passage_texts:
            found += store.variants(holder.scope(scope), ids, head)
    return found


def needles_of(holder, captures):
    """Return bytes of captures as the tier of passages has them, and what stands for the tenant."""
    warm = holder.passages.warm
    return {_encoded(each.kv.layers[-1])[:64] for each in captures} | {warm.tag(MINE)}


def where(holder, folder, needles):
    found = found_in_files(folder / "warm", *needles)
    if holder.passages.warm.tier.name == "host":
        found += found_in_memory(holder.passages.warm.tier, *needles)
    return found


def reused(report):
    """Return the kinds of the captures that were placed; the first passage is captured with what stands before it."""
    return [each.kind for each in report.details[1:]]


@pytest.mark.cases(2)
@pytest.mark.parametrize("made_by", HOLDERS)
@pytest.mark.parametrize(("room", "key"), by_turns(ROOMS, KEYS, default=ROOMS))
def test_passages_of_a_tenant_are_gone_and_those_of_others_stay(
    model, tmp_path, made_by, room, key
):
    holder = HOLDERS[made_by](model, passages_of(room, tmp_path, key))
    store = holder.passages.store
    with closing(holder.purged):
        for scope, segments in TEXTS.items():
            assert holder.ask(scope, segments).exactness == "exact"
        own = variants(holder, MINE, SALTED)
        held = [each for capture in own for layer in capture.kv.layers for each in layer]
        assert len(own) == 6
        assert all(each.any() for each in held)
        needles = set() if room == "memory" else needles_of(holder, own)
        assert room == "memory" or len(where(holder, tmp_path, needles)) >= 6
        told = holder.purged.purge("acme")
        assert told.is_complete, told.reason
        assert told.passages == 6
        counts = {name: each.count for name, each in told.tiers.items()}
        assert counts == ({} if room == "memory" else {"passages": 6})
        assert not any(each.any() for each in held)
        assert room == "memory" or where(holder, tmp_path, needles) == []
        assert (store.stats.variants, store.stats.dropped) == (3, 6)
        store.check()
        for _ in range(1 if room == "memory" else 2):
            assert reused(holder.ask(OTHER, turned(TEXTS[OTHER]))) == ["isolated"] * 2
            store.clear()  # the second time from the tier
        for scope in (MINE, SALTED):
            report = holder.ask(scope, turned(TEXTS[scope]))
            assert (report.exactness, reused(report)) == ("exact", [None] * 2)
        assert reused(holder.ask(MINE, TEXTS[MINE])) == ["isolated"] * 2  # it may store again


@pytest.mark.parametrize("made_by", HOLDERS)
def test_a_tier_of_passages_gives_and_takes_nothing_of_a_tenant_that_is_being_purged(
    model, tmp_path, made_by
):
    holder = HOLDERS[made_by](model, passages_of("files", tmp_path))
    with closing(holder.purged):
        for scope, segments in TEXTS.items():
            holder.ask(scope, segments)
        warm, captures = holder.passages.warm, {each: variants(holder, each) for each in TEXTS}
        purge, seen = warm.tier.purge, []

        def meanwhile(*given):
            for scope, segments in TEXTS.items():
                bound = holder.scope(scope)
                found, _ = warm.fetch(bound, segments.passage_texts, segments.head.tobytes())
                seen.append((len(found), warm.put(bound, captures[scope])))
            return purge(*given)

        warm.tier.purge = meanwhile
        assert holder.purged.purge("acme").tiers["passages"].count == 6
        assert seen == [(0, 0), (0, 0), (3, 3)]
        for scope, segments in TEXTS.items():
            found, _ = warm.fetch(
                holder.scope(scope), segments.passage_texts, segments.head.tobytes()
            )
            assert len(found) == (3 if scope is OTHER else 0)


def test_passages_that_wait_to_be_captured_are_forgotten_and_so_is_the_head_before_them(
    model, tmp_path
):
    holder = OfEngine(model, passages_of("files", tmp_path))
    engine = holder.purged
    with closing(engine):
        for scope, segments in TEXTS.items():
            given = {"segments": [segments.head, *segments.passages, segments.question]}
            engine.add_request(given, GREEDY, store_until=0, scope=scope)
        while not variants(holder, MINE):
            engine.step()
        assert len(variants(holder, MINE)) == 1
        head = [each for layer in engine._companions[-1]._head[2].layers for each in layer]
        assert all(each.any() for each in head)
        told = engine.purge("acme")
        assert (told.passages, told.tiers["passages"].count) == (1, 1)
        assert not any(each.any() for each in head)
        while engine.has_unfinished() or engine._companions[-1].is_pending:
            engine.step()
        assert [len(variants(holder, each)) for each in TEXTS] == [0, 0, 3]
        assert found_in_files(tmp_path / "warm", tenant_tag(MINE)) == []
