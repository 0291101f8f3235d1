"""Sampling parameters are checked when they are made, with the value and the limit."""

import msgspec
import pytest

from quire.chat import StructuredOutputs
from quire.engines.loop.params import SamplingParams
from quire.errors import ConfigError

WRONG = {
    "n": [0, -1, 1.5, "2", None, True, 16385],
    "best_of": [0, 16385],
    "max_tokens": [0, -3, "many", 2**31],
    "min_tokens": [-1, None, 0.5],
    "temperature": [-0.1, float("nan"), float("inf"), "hot", None, True],
    "top_p": [0, 1.01, -1, float("nan")],
    "top_k": [-2, 1.5],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, -1, 1e-7, float("inf")],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1, float("nan")],
    "logit_bias": [[1, 2], {-1: 0.0}, {"a": 1}, {3: 101}, {3: float("nan")}, {3: "much"}],
    "seed": [0.5, "x", 2**64],
    "stop": ["", ["a", ""], [1], 3],
    "stop_token_ids": [7, [-1], ["a"]],
    "logprobs": [-1, True],
    "allowed_token_ids": [[], [-1], 3, ["a"]],
    "bad_words": ["a", [""], [1], ["a"] * 257],
    "structured_outputs": [
        3,
        {},
        {"json": 3},
        {"json": [1]},
        {"regex": 3},
        {"choice": []},
        {"choice": [1]},
        {"grammar": ""},
        {"json": {}, "regex": "a"},
        {"json_object": False},
        {"structural_tag": "x"},
    ],
    "ignore_eos": [1, "yes"],
    "speculation": [-1, 65],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, each) for name in WRONG for each in WRONG[name]]
)
def test_a_value_that_cannot_be_is_refused_by_name_with_the_value(name, value):
    with pytest.raises(ConfigError) as told:
        SamplingParams(**{name: value})
    assert str(told.value).startswith(f"{name} is {value!r}: ")


@pytest.mark.parametrize(
    "together",
    [
        {"min_tokens": 5, "max_tokens": 4},
        {"structured_outputs": {"regex": "a"}, "min_tokens": 1},
        {"structured_outputs": {"json": {}}, "ignore_eos": True},
        {"structured_outputs": {"regex": "a"}, "bad_words": ["a"]},
        {"structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]},
        {"stop": "a", "detokenize": False},
    ],
)
def test_values_that_contradict_each_other_are_refused(together):
    with pytest.raises(ConfigError) as told:
        SamplingParams(**together)
    assert all(name in str(told.value) for name in together)


def test_names_are_checked_and_values_stay():
    with pytest.raises(TypeError):
        SamplingParams(best=1)
    params = SamplingParams(stop=("a", "b"), structured_outputs={"json": {}}, top_p=1, seed=-5)
    assert params.stop == ["a", "b"]
    assert params.structured_outputs == StructuredOutputs(json={})
    with pytest.raises(AttributeError):
        params.top_p = 0.5
    assert SamplingParams(stop="end").stop == ["end"]
    again = msgspec.structs.replace(params, n=3)
    assert (again.n, again.stop) == (3, ["a", "b"])
    assert SamplingParams(top_k=-1).top_k == 0
