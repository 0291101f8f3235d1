"""Passages in tiers of three kinds, whatever becomes of their records: full disks, damage, several engines on one directory."""

import contextlib
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from passages_help import GATES, made, prompt

sys.path.append(str(Path(__file__).parents[1] / "tiers"))

from file_systems import fill, mounted

from quire.engines.hf import PrefixCache
from quire.engines.loop import Engine, SamplingParams
from quire.errors import TierBusy
from quire.tiers.base import Outcome
from quire.tiers.format import new_buffer, record_bytes
from quire_passages import AllRows, Passages, Segments
from turns import drawn

POOL = prompt(seed=5, sizes=(16, 24, 40, 32, 28, 9))
KINDS = ("files", "disk", "host")
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def model():
    return made("Llama", {})


@pytest.fixture(scope="module")
def plain(model):
    """Return what the model says behind segments, computed once for each."""
    known = {}

    def answer(segments):
        if segments.text not in known:
            ids = torch.from_numpy(segments.tokens.astype(np.int64))[None]
            given = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
            output = model.generate(ids, max_new_tokens=4, do_sample=False, **given)
            known[segments.text] = output[0, ids.shape[1] :].tolist()
        return known[segments.text]

    return answer


def spec_of(kind, folder):
    return {
        "files": f"files:{folder}/warm",
        "disk": f"disk:{folder}/warm?capacity=8MiB",
        "host": "host:8MiB",
    }[kind]


def passages_of(spec, **given):
    free = {"target": None, "worth": 10.0, "min_tokens": 2, "gates": GATES}
    return Passages("64MiB", AllRows(), **free, warm=spec, **given)


def of(order):
    return Segments(POOL.head, tuple(POOL.passages[at] for at in order), POOL.question)


class Warm:
    """A cache over a tier, and what is known of its passages: those in its store, and those in the tier."""

    def __init__(self, model, kind, folder):
        self.model, self.kind, self.folder = model, kind, folder
        self.held, self.stored = {}, {}
        self.open()

    def open(self):
        passages = passages_of(spec_of(self.kind, self.folder))
        self.cache = PrefixCache(self.model, "16MiB", passages=passages)

    @property
    def warm(self):
        return self.cache.passages._warm

    def close(self):
        self.cache.close()

    def reopen(self):
        self.close()
        self.open()
        self.held = {}
        if self.kind == "host":  # it goes with its cache
            self.stored = {}

    def forget(self):
        self.cache.passages.store.clear()
        self.held = {}

    def damage(self, at, how):
        """Flip a bit of a passage's record where it lies, or have it end in the middle."""
        if self.stored.get(at) != "good":
            return
        ids = POOL.passage_texts[at]
        bound = self.cache.kept.identity.scope()
        key = self.warm._key(bound, ids, POOL.head.tobytes())
        if self.kind == "host":
            shelf, place = self.warm.tier._arena.find(key)
            spoil(shelf.view(place), how)
        else:
            record = new_buffer(record_bytes(self.warm._payload_bytes(len(ids) // 4)))
            assert self.warm.tier.get([key], [record]) == [Outcome.HIT]
            spoil_file(self.folder / "warm", bytes(record), how)
        self.stored[at] = "damaged"

    def ask(self, order):
        """Ask with passages in an order; return the answer, after a check of what is said of each."""
        found = [at for at in order if at not in self.held and at in self.stored]
        lost = {at for at in found if self.stored[at] == "damaged"}
        self.held |= {at: "rounded" for at in found if at not in lost}
        before = dict(self.held)
        segments = of(order)
        output = self.cache.generate(
            segments=segments, max_new_tokens=4, do_sample=False, pad_token_id=0, store_until=0
        )
        for at in order:
            if at not in self.held:
                self.held[at], self.stored[at] = "exact", "good"
        self.check(order, before, lost)
        return output[0, segments.tokens.size :].tolist()

    def check(self, order, before, lost):
        report, store = self.cache.last.passages, self.cache.passages.store
        store.check()
        self.warm.tier.check()
        placed = [at in before and (n > 0 or before[at] == "exact") for n, at in enumerate(order)]
        assert [each.kind == "isolated" for each in report.details] == placed
        assert (report.exactness == "approximate") == any(placed[1:])
        assert report.captured == len({at for at in order if at not in before})
        if any(placed):
            for n, (each, at) in enumerate(zip(report.details, order, strict=True)):
                assert ("of no use" in (each.reason or "")) == (n > 0 and at in lost)
        else:
            assert "no passage behind the exact prefix is in the store" in report.fallback
            assert ("of no use" in report.fallback) == bool(lost)
        for at, kind in self.held.items():
            bound = self.cache.kept.identity.scope()
            (variant,) = store.variants(bound, POOL.passage_texts[at], POOL.head.tobytes())
            assert variant.rounded == (kind == "rounded")


def spoil(record, how):
    if how == "flipped":
        record[len(record) // 3] ^= 4
    else:
        record[len(record) // 2 :] = 0


def spoil_file(folder, record, how):
    for file in folder.rglob("*.quire"):
        data = bytearray(file.read_bytes())
        if (start := data.find(record)) >= 0:
            if how == "cut" and len(data) == len(record):
                del data[len(record) // 2 :]
            else:
                spoil(np.frombuffer(data, np.uint8)[start : start + len(record)], how)
            with file.open("r+b") as out:
                out.write(data)
                out.truncate(len(data))
            return
    raise AssertionError("no file holds this record")


ORDERS = st.lists(st.integers(0, 3), min_size=1, max_size=4)
STEPS = st.lists(
    st.tuples(st.just("ask"), ORDERS)
    | st.tuples(st.sampled_from(["forget", "reopen"]))
    | st.tuples(st.just("damage"), st.integers(0, 3), st.sampled_from(["flipped", "cut"])),
    min_size=2,
    max_size=7,
)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS)
@drawn(3, 30, steps=STEPS)
def test_answers_and_reports_are_right_whatever_becomes_of_records(
    model, plain, tmp_path_factory, kind, steps
):
    world = Warm(model, kind, tmp_path_factory.mktemp("warm"))
    with contextlib.closing(world):
        for name, *given_ in [("ask", [0, 1, 2]), *steps, ("ask", [3, 1, 0])]:
            answer = getattr(world, name)(*given_)
            if name == "ask":
                assert answer == plain(of(*given_))


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["flipped", "cut"])
def test_a_damaged_record_is_computed_with_its_reason_and_stored_anew(
    model, plain, tmp_path, kind, how
):
    world = Warm(model, kind, tmp_path)
    with contextlib.closing(world):
        world.ask([0, 1, 2])
        world.forget()
        world.damage(1, how)
        assert world.ask([2, 1, 0]) == plain(of([2, 1, 0]))
        assert "of no use" in world.cache.last.passages.details[1].reason
        world.forget()
        world.ask([2, 1, 0])
        assert world.cache.last.passages.details[1].kind == "isolated"


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_slab_that_was_cut_between_two_processes_costs_what_it_held(model, plain, tmp_path, how):
    world = Warm(model, "disk", tmp_path)
    with contextlib.closing(world):
        world.ask([0, 1, 2, 3])
        world.close()
        for slab in (tmp_path / "warm").glob("slab-*"):
            data = slab.read_bytes()
            slab.write_bytes(data[:100]) if how == "cut" else slab.unlink()
        world.open()
        answer = world.cache.generate(
            segments=of([1, 0]), max_new_tokens=4, do_sample=False, pad_token_id=0, store_until=0
        )
        assert answer[0, of([1, 0]).tokens.size :].tolist() == plain(of([1, 0]))
        assert world.cache.last.passages.exactness == "exact"
        world.cache.passages.store.clear()
        world.cache.generate(
            segments=of([1, 0]), max_new_tokens=4, do_sample=False, pad_token_id=0, store_until=0
        )
        assert world.cache.last.passages.exactness == "approximate"


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["files", "disk"])
def test_on_a_full_file_system_requests_are_computed_and_told_why(model, plain, tmp_path, kind):
    with mounted(tmp_path, "tmpfs") as system:
        spec = spec_of(kind, system)
        with closing(Engine(model, num_blocks=400, passages=passages_of(spec))) as engine:
            ask(engine, [0, 1])
            fill(system)
            passages, told = engine._companions[-1].passages, []
            for order in ([2, 0, 3], [3, 2, 1], [0, 3, 1]):
                passages.store.clear()
                report, answer = ask(engine, order)
                assert answer == plain(of(order))
                told += [each.reason for each in report.details if each.kind is None]
                passages.store.check()
                passages._warm.tier.check()
            assert f"tier {kind} has not taken it: full" in told
            assert report.details[2].kind == "isolated"  # stored while there was room
            assert not list(system.rglob("unfinished/*"))
            (system / "other").unlink()
            passages.store.clear()
            ask(engine, [3, 2])
        with closing(Engine(model, num_blocks=400, passages=passages_of(spec))) as engine:
            report, answer = ask(engine, [0, 2, 1, 3])
            assert [each.kind for each in report.details] == [None, *["isolated"] * 3]
            assert answer == plain(of([0, 2, 1, 3]))


def test_a_tier_too_small_for_a_passage_says_so(model, plain):
    with PrefixCache(model, "16MiB", passages=passages_of("host:2KiB")) as cache:
        for _ in range(2):
            cache.passages.store.clear()
            cache.generate(segments=of([0, 1]), max_new_tokens=1, pad_token_id=0, store_until=0)
        assert "has not taken it: full" in cache.last.passages.fallback


def test_two_engines_find_each_others_passages_in_one_directory_of_files(model, plain, tmp_path):
    spec = spec_of("files", tmp_path)
    engines = [Engine(model, num_blocks=400, passages=passages_of(spec)) for _ in range(2)]
    ask(engines[0], [0, 1])
    ask(engines[1], [2, 3])
    for engine in engines:
        report, answer = ask(engine, [3, 1, 0, 2])
        assert [each.kind for each in report.details[1:]] == ["isolated"] * 3
        assert answer == plain(of([3, 1, 0, 2]))
    assert len(list((tmp_path / "warm").rglob("*.quire"))) == 4
    for engine in engines:
        engine.close()


def test_a_directory_of_a_disk_tier_is_one_engines_at_a_time(model, plain, tmp_path, monkeypatch):
    spec = spec_of("disk", tmp_path)

    def made_engine():
        return Engine(model, num_blocks=400, passages=passages_of(spec))

    with closing(made_engine()) as first:
        ask(first, [0, 1])
        with pytest.raises(TierBusy, match="warm"):
            made_engine()
        report, _ = ask(first, [1, 0])
        assert report.exactness == "approximate"
    with monkeypatch.context() as broken:
        broken.setattr("quire.engines.loop.engine.Scheduler", None)
        with pytest.raises(TypeError):
            made_engine()  # gives the directory back
    with closing(made_engine()) as second:
        report, answer = ask(second, [1, 0])
        assert report.exactness == "approximate"
        assert answer == plain(of([1, 0]))


def ask(engine, order):
    """Ask an engine with passages in an order; return its report and tokens."""
    each = of(order)
    given = {"segments": [each.head, *each.passages, each.question]}
    (output,) = engine.generate([given], GREEDY, store_until=0)
    return output.passages, list(output.outputs[0].token_ids)
