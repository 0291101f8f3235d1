"""The relocation gate on models of every rotary kind: who passes, who is refused, and that it tells the truth."""

import numpy as np
import pytest
import torch
from passages_help import MOVED, REFUSED, made, passage_model_of

from quire.errors import NotRelocatable
from quire.tensors.kinds import layer_kinds
from quire.tensors.rotary import rotate_into
from quire_passages.hf import PassageModel
from quire_passages.hf.runs import Runs
from turns import few

OF_A_KIND = (
    "llama",
    "llama llama3",
    "llama yarn",
    "phi3 longrope below its threshold",
    "phi",
    "mistral with windows",
    "gptneox",
    "glm",
    "gemma3",
    "deepseek v3",
    "gpt-oss",
)
"""A model with each kind of rotation and mask; the long run has the others too."""


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", few(MOVED, *OF_A_KIND))
def test_keys_rotated_by_any_shift_are_those_of_the_other_position(name):
    model = made(*MOVED[name])
    found = passage_model_of(name).relocation
    assert found.error <= 1e-4
    assert found.drops_rows is None
    assert found.shows is None
    assert found.check_layer == 2  # of 3
    runs = Runs(model, layer_kinds(model.config))
    ids = np.random.default_rng(5).integers(3, 128, 19)
    here, shifts = runs.kv(ids, 7), (1, 64, min(found.positions, 512) - 7 - 19)
    for shift in shifts:
        there = runs.kv(ids, 7 + shift)
        for rotation, layer, wanted in zip(found.rotations, here.layers, there.layers, strict=True):
            for in_values, (each, expected) in enumerate(zip(layer, wanted, strict=True)):
                got = each
                if rotation is not None and rotation.in_values is bool(in_values):
                    got = torch.empty_like(each)
                    rotate_into(got, each, rotation, shift)
                assert (got - expected).abs().max() <= 1e-4


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "width", "offset", "pairs", "in_values"),
    [
        ("llama", 16, 0, "half", False),
        ("phi", 8, 0, "half", False),
        ("gptneox", 4, 0, "half", False),
        ("glm", 8, 0, "interleaved", False),
        ("cohere", 16, 0, "interleaved", False),
        ("deepseek v3", 8, 0, "half", True),
    ],
)
def test_layout_width_and_place_are_inferred(name, width, offset, pairs, in_values):
    found = passage_model_of(name).relocation
    for rotation in found.rotations:
        assert rotation.width == width
        assert rotation.offset == offset
        assert rotation.pairs == pairs
        assert rotation.in_values is in_values


def test_layers_without_positions_are_not_turned():
    found = passage_model_of("smollm3").relocation
    assert [rotation is None for rotation in found.rotations] == [False, True, False]


def test_a_model_with_two_frequencies_has_both():
    model = made(*MOVED["gemma3"], rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
    })  # fmt: skip
    found = PassageModel(model).relocation.rotations
    assert np.array_equal(found[0].frequencies, found[1].frequencies)
    assert not np.array_equal(found[0].frequencies, found[2].frequencies)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt2", "layer 0, .*no rotary frequencies"),
        ("opt", "layer 0, .*no rotary frequencies"),
        ("mamba", "layer 0 is recurrent"),
        ("qwen3 next", "layer 0 is recurrent"),
    ],
)
def test_a_model_that_cannot_be_moved_is_refused_by_layer(name, words):
    with pytest.raises(NotRelocatable, match=words):
        PassageModel(made(*REFUSED[name]))


def test_dynamic_scaling_is_refused_beyond_its_maximum():
    model = made(*MOVED["llama dynamic below its maximum"])
    with pytest.raises(NotRelocatable, match=r"layer 0, .* are [\d.]+ from .*below position 512"):
        PassageModel(model, positions=1024)
    assert PassageModel(model, positions=512).relocation.positions == 512


def test_longrope_is_vouched_for_below_its_threshold_alone():
    model = made(*MOVED["phi3 longrope below its threshold"])
    before = {name: each.clone() for name, each in model.named_buffers()}
    found = PassageModel(model).relocation
    assert found.positions == 256
    assert "layer 0" in found.beyond
    assert all(torch.equal(each, before[name]) for name, each in model.named_buffers())
    with pytest.raises(NotRelocatable, match="below position 256"):
        PassageModel(model, positions=512)


def test_a_window_of_keys_that_turns_the_wrong_way_is_refused(monkeypatch):
    model = made("Llama", {})
    whole = model.model.rotary_emb.forward

    def bent(x, position_ids):
        return whole(x, position_ids=position_ids + position_ids**2 // 50)

    monkeypatch.setattr(model.model.rotary_emb, "forward", bent)
    with pytest.raises(NotRelocatable, match="layer 0"):
        PassageModel(model)


@pytest.mark.ci
def test_half_precision_passes_within_its_rounding():
    for dtype in (torch.bfloat16, torch.float16):
        found = PassageModel(made("Llama", {}).to(dtype)).relocation
        assert found.error <= 0.03
