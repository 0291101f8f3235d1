"""Passages in a tier, and the gate's findings on disk: what outlives a cache, and what damage to it does."""

import json

import numpy as np
import pytest
import torch
from passages_help import GATES, MOVED, REFUSED, made, prompt

from quire.core import Scope
from quire.engines.hf import PrefixCache
from quire.errors import NotRelocatable
from quire_passages import AllRows, NoRows, Passages, Segments
from quire_passages.hf import remembered as remembered_module

SIZES = (16, 24, 40, 32, 9)


@pytest.fixture(scope="module")
def model():
    return made("Llama", {})


@pytest.fixture
def segments():
    return prompt(sizes=SIZES)


def cache_of(model, folder, **given):
    free = {"target": None, "worth": 10.0, "min_tokens": 2, "gates": GATES}
    passages = Passages("64MiB", NoRows(), **free, warm=f"files:{folder}", **given)
    return PrefixCache(model, "16MiB", passages=passages)


def asked(cache, segments, **given):
    with cache:
        output = cache.generate(
            segments=segments, max_new_tokens=4, do_sample=False, pad_token_id=0, **given
        )
        return output[0, segments.tokens.size :].tolist(), cache.last.passages


def plain(model, segments):
    ids = torch.from_numpy(segments.tokens.astype(np.int64))[None]
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    return output[0, ids.shape[1] :].tolist()


def turned(segments):
    return Segments(segments.head, segments.passages[::-1], segments.question)


def test_captures_of_a_scope_without_names_are_not_those_of_all(model, segments, tmp_path):
    """A cache that shares captures finds none of one that shares none, and the other way round."""
    for shares in (False, True):
        here = tmp_path / str(shares)
        asked(cache_of(model, here, share_isolated=shares), segments)
        for other in (not shares, shares):
            _, report = asked(cache_of(model, here, share_isolated=other), segments, store_until=0)
            assert (report.fallback is None) is (other is shares)


def records(folder):
    return sorted(folder.rglob("*.quire"))


def test_passages_are_found_by_the_next_cache_and_are_exact_nowhere(model, segments, tmp_path):
    asked(cache_of(model, tmp_path), segments)
    assert len(records(tmp_path)) == len(segments.passages)
    answer, report = asked(cache_of(model, tmp_path), segments, selector=AllRows())
    assert report.exactness == "approximate"
    assert report.exact_tokens == 0  # though all of them stand where they were captured
    assert [each.kind for each in report.details] == [None, *["isolated"] * 2]
    assert answer == plain(model, segments)
    assert report.captured == 0


def test_what_comes_back_is_off_by_half_a_code(model, segments, tmp_path):
    first, second = cache_of(model, tmp_path), cache_of(model, tmp_path)
    asked(first, segments)
    asked(second, turned(segments))
    head = segments.head.tobytes()
    for ids in segments.passage_texts[:2]:
        (exact,), (rounded,) = (
            each.passages.store.variants(each.kept.identity.scope(), ids, head)
            for each in (first, second)
        )
        assert not exact.rounded
        assert rounded.rounded
        for layer, got in zip(exact.kv.layers, rounded.kv.layers, strict=True):
            for each, other, dim in zip(layer, got, (1, 2), strict=True):
                code = (each.amax(dim, keepdim=True) - each.amin(dim, keepdim=True)) / 255
                assert ((each - other).abs() <= 0.51 * code + 1e-6).all()


@pytest.mark.cases(1)
@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_record_is_computed_and_the_report_says_why(model, segments, tmp_path, damage):
    asked(cache_of(model, tmp_path), segments)
    for file in records(tmp_path):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    cache = cache_of(model, tmp_path)
    answer, report = asked(cache, turned(segments))
    assert report.exactness == "exact"
    assert answer == plain(model, turned(segments))
    assert "no passage behind the exact prefix is in the store" in report.fallback
    assert "of no use" in report.fallback
    _, report = asked(cache_of(model, tmp_path), turned(segments))  # stored anew by the one before
    assert report.exactness == "approximate"


def test_one_damaged_record_of_several_is_named_by_its_passage(model, segments, tmp_path):
    first = cache_of(model, tmp_path, capture="none")
    first.passages.capture(segments.passages[:1], segments.head)
    (file,) = records(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    first.passages.capture(segments.passages[1:], segments.head)
    first.close()
    _, report = asked(cache_of(model, tmp_path), turned(segments))
    assert report.exactness == "approximate"
    assert "of no use" in report.details[-1].reason
    assert report.details[-1].recomputed == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Scope(salt="a"), Scope(salt="b")),
        (Scope(salt="1"), Scope(salt=1)),
        (Scope(salt="a"), Scope(tenant="a")),
    ],
)
def test_scopes_find_each_others_records_only_where_they_share(
    one, other, model, segments, tmp_path
):
    for shares in (False, True):
        folder = tmp_path / str(shares)
        given = {"share_isolated": shares}
        asked(cache_of(model, folder, **given), segments, scope=one)
        _, report = asked(cache_of(model, folder, **given), segments, scope=other)
        assert (report.exactness == "approximate") is shares


def test_another_model_finds_nothing(model, segments, tmp_path):
    asked(cache_of(model, tmp_path), segments)
    other = made("Llama", {})
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 3] += 1e-3
    _, report = asked(cache_of(other, tmp_path), segments)
    assert report.exactness == "exact"


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["llama", "smollm3", "deepseek v3"])
def test_the_gate_is_tried_once_for_all_processes(name, tmp_path, monkeypatch):
    model = made(*MOVED[name])

    def found():
        passages = Passages("1MiB", gates=tmp_path)
        return PrefixCache(model, "16MiB", passages=passages).passages.relocation()

    first = found()
    monkeypatch.setattr(remembered_module, "relocation_of", None)
    again = found()
    assert again.positions == first.positions
    for one, two in zip(first.rotations, again.rotations, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            assert one.frequencies.tobytes() == two.frequencies.tobytes()
            assert (one.in_values, one.offset, one.pairs) == (two.in_values, two.offset, two.pairs)


def test_a_refusal_is_remembered_with_its_reason(tmp_path, monkeypatch):
    model = made(*REFUSED["gpt2"])

    def refused():
        passages = Passages("1MiB", gates=tmp_path)
        with pytest.raises(NotRelocatable) as caught:
            PrefixCache(model, "16MiB", passages=passages).passages.relocation()
        return str(caught.value)

    first = refused()
    monkeypatch.setattr(remembered_module, "relocation_of", None)
    assert refused() == first


@pytest.mark.cases(1)
@pytest.mark.parametrize("damage", ["cut", "another depth"])
def test_findings_that_cannot_be_are_found_anew(model, tmp_path, damage):
    def found():
        passages = Passages("1MiB", gates=tmp_path)
        return PrefixCache(model, "16MiB", passages=passages).passages.relocation()

    first = found()
    (file,) = tmp_path.iterdir()
    told = json.loads(file.read_text())
    if damage == "cut":
        file.write_text(file.read_text()[:-9])
    else:
        file.write_text(json.dumps({**told, "rotations": told["rotations"][:1]}))
    assert found().positions == first.positions
    assert json.loads(file.read_text()) == told
