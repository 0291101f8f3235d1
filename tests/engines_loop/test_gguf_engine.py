"""The engine over llama.cpp gives the tokens of the model that its GGUF file was made of."""

import pytest

pytest.importorskip("gguf")

import loop_help
import rules_help
from gguf_engine_help import GgufTraffic
from traffic_help import TIGHT

pytestmark = pytest.mark.system("llama.cpp")


@pytest.fixture(autouse=True)
def near(monkeypatch):
    """llama.cpp's exponential function is an approximation: logits of these loud weights are further off."""
    for helper in (loop_help, rules_help):
        monkeypatch.setattr(helper, "TIE", 5e-3)


@pytest.mark.parametrize(
    "kind", ["llama", *[pytest.param(each, marks=pytest.mark.ci) for each in ("lfm2", "mamba")]]
)
def test_random_traffic_gives_the_tokens_of_the_plain_model(kind):
    counts = GgufTraffic(1, kind).live(24, **TIGHT).live(8).counts
    assert counts["compared"] > 5
    assert counts["cached tokens"] > 0
    assert counts["ties"] <= 1
