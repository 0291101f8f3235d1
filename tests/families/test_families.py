"""A sample of `make test-families`: the same verdicts as the kept ones, other classes each day."""

import datetime as dt
import json
import os
import random
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))

from classes import registered, tiny  # noqa: E402
from judge import judge  # noqa: E402

from quire.engines.hf import PrefixCache  # noqa: E402
from quire.engines.hf.pools import HfStore  # noqa: E402
from turns import few  # noqa: E402

pytestmark = pytest.mark.slow
KEPT = json.loads((Path(__file__).parents[2] / "docs" / "families.json").read_text())
VERDICTS = {verdict["name"]: verdict for verdict in KEPT["classes"]}
SEED = int(os.environ.get("QUIRE_FAMILIES_SEED", dt.datetime.now(dt.UTC).toordinal()))
SAME_TRANSFORMERS = KEPT["transformers"] == transformers.__version__
DELICATE = ["gemma3_text", "gpt_oss", "llama4_text", "falcon_h1"]


def _samples():
    """Return a few classes, and for the long run as many again and all that are delicate."""
    draw = random.Random(SEED)
    delicate, others = (
        draw.sample(DELICATE, 4),
        draw.sample(sorted(set(VERDICTS) - set(DELICATE)), 6),
    )
    more = [*delicate[1:], *others[2:]]
    return [
        *delicate[:1],
        *others[:2],
        *(pytest.param(each, marks=pytest.mark.long) for each in more),
    ]


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", _samples())
def test_a_class_is_sorted_as_it_was(name):
    verdict, kept = judge(name), VERDICTS[name]
    again = f"QUIRE_FAMILIES_SEED={SEED} draws this sample; all classes: make test-families"
    assert verdict.state != "wrong", f"{name}: {verdict.reason}; {again}"
    if SAME_TRANSFORMERS:
        assert verdict.state == kept["state"], f"{verdict.reason}; {again}"


@pytest.mark.skipif(
    not SAME_TRANSFORMERS, reason=f"sorted with transformers {KEPT['transformers']}"
)
def test_every_class_that_transformers_registers_is_sorted():
    assert list(VERDICTS) == registered(), "run: make test-families"


def test_no_model_class_gives_wrong_tokens():
    assert [name for name, verdict in VERDICTS.items() if verdict["state"] == "wrong"] == []


@pytest.mark.ci
@pytest.mark.parametrize("name", few(["llama", "falcon_h1"], "llama"))
def test_kv_of_another_prefix_is_noticed(name, monkeypatch):
    load = HfStore.load

    def load_wrongly(self, seq, upto, targets, *rest, **named):
        result = load(self, seq, upto, targets, *rest, **named)
        for layers in targets:
            for kv in layers:
                for states in kv:
                    states.neg_()
        return result

    PrefixCache(tiny(name), "64MiB", block_size=4)  # tries its kind of model, as it is, once
    monkeypatch.setattr(HfStore, "load", load_wrongly)
    verdict = judge(name)
    assert verdict.state == "wrong", verdict.reason
