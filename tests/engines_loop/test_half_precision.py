"""In bfloat16 the engine is as near to the model in float32 as plain bfloat16 forwards are.

Stated for the relative L2 distance of logits from those of the same weights in float32, over tokens of which the
middle one is taken, since rounding sends single tokens to other experts: at most 1.25 times that of plain
forwards and 0.002 more. All tokens together are at most 1.5 times as far as plain ones, and 0.005 more.
"""

import copy
from random import Random

import pytest
import torch
from loop_help import VOCAB, nothing_held
from test_engine_families import FAMILIES, MORE, model_of

from quire.engines.loop import Engine, SamplingParams

SHORT = ("gpt_oss", "deepseek_v3")
TIGHT = {
    "num_blocks": 24,
    "block_size": 4,
    "max_running": 4,
    "max_step_tokens": 23,
    "max_prefill_tokens": 9,
}


def watched(model):
    """Return an engine, and a list that it fills with the tokens and the logits of each row that it samples."""
    engine, seen = Engine(model, **TIGHT), []
    compute = engine._forward.logits

    def logits(step, *sight):
        rows = compute(step, *sight)
        jobs = [step.jobs[i].tokens.tolist() for i in step.samples]
        seen.extend(zip(jobs, rows.float(), strict=True))
        return rows

    engine._forward.logits = logits
    return engine, seen


def prompts():
    random = Random(0)
    text = [random.randrange(3, VOCAB) for _ in range(30)]
    ends = ((0, 5), (30, 1), (30, 9), (17, 3), (8, 21), (30, 12), (0, 44), (16, 2))
    return [text[:kept] + [random.randrange(3, VOCAB) for _ in range(n)] for kept, n in ends]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=[] if each in SHORT else pytest.mark.long)
        for each in (*FAMILIES, *MORE)
    ],
)
def test_bfloat16_is_as_near_to_float32_as_plain_forwards_are(family):
    model = model_of(family, dtype=torch.bfloat16)
    exact = copy.deepcopy(model).float()
    engine, seen = watched(model)
    engine.generate(prompts(), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    nothing_held(engine)
    with torch.inference_mode():
        rows = [
            (got, *(each(torch.tensor([tokens])).logits[0, -1].float() for each in (model, exact)))
            for tokens, got in seen
        ]
    packed, plain, right = map(torch.stack, zip(*rows, strict=True))

    def far(logits, dim=None):
        return (logits - right).norm(dim=dim) / right.norm(dim=dim)

    assert far(packed, 1).median() <= 1.25 * far(plain, 1).median() + 0.002
    assert far(packed) <= 1.5 * far(plain) + 0.005
    assert len(seen) >= 64
