"""The engine on a CUDA device: the tokens of the plain model, whatever runs beside a request."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

sys.path.append(str(Path(__file__).parents[1] / "engines_loop"))

from loop_help import GREEDY, nothing_held, plain_answer, tiny_model, trained_model  # noqa: E402
from traffic_help import Traffic  # noqa: E402

from quire.engines.loop import Engine, SamplingParams  # noqa: E402
from quire.tiers.host.tier import Host  # noqa: E402
from quire.tiers.stack.settings import StackSettings  # noqa: E402
from quire.tiers.stack.stack import TierStack  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

# Grouped heads, latent attention, soft caps, windows beside full layers, windows alone, sinks.
FAMILIES = ("llama", "deepseek_v3", "gemma2", "gemma3_text", "mistral+window", "gpt_oss")
# A pool that a few requests fill: they are preempted; and steps that cut prompts into pieces.
TIGHT = {
    "num_blocks": 26,
    "block_size": 4,
    "max_running": 6,
    "max_step_tokens": 23,
    "max_prefill_tokens": 9,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_random_traffic_gives_the_tokens_of_the_plain_model(family):
    counts = Traffic(tiny_model(family).cuda(), seed=1).lives(2, 20, **TIGHT).counts
    assert counts["compared"] > 10
    assert counts["cached tokens"] > 0
    assert counts["ties"] <= 2


def test_the_trained_model_gives_its_own_tokens():
    assert Traffic(trained_model().cuda(), seed=3).live(8).counts["ties"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision_many_requests_get_what_one_alone_gets(dtype):
    """As far as their tokens are likely: the likeliest of the plain model is told apart by rounding alone."""
    model = trained_model().to("cuda", dtype)
    engine = Engine(model, num_blocks=200)
    shared = [*range(3, 90)]
    prompts = [[*shared, 100 + n, 7 + n, 30 + 3 * n] for n in range(12)]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    together = engine.generate(prompts, params)
    with torch.inference_mode():
        for prompt, output in zip(prompts, together, strict=True):
            logits = model(torch.tensor([prompt], device="cuda")).logits[0, -1].float()
            plain = logits.log_softmax(-1)
            ((told),) = output.outputs[0].logprobs
            for token, found in told.items():
                assert abs(plain[token].item() - found.logprob) < 0.15
    assert engine.stats().cached_tokens > 0
    nothing_held(engine)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_blocks_evicted_from_the_device_come_back_from_tiers(family):
    model, came = tiny_model(family).cuda(), 0
    prompts = [tuple(3 + (7 * n + i * (n + 3)) % 90 for i in range(64)) for n in range(6)]
    # What is there is brought back, also where a tiny model computes it sooner.
    with TierStack([Host("64MiB")], StackSettings(gate=False, busy_share=1.0)) as tiers:
        engine = Engine(model, num_blocks=26, block_size=4, tiers=tiers)
        for prompt in prompts * 2:
            (output,) = engine.generate(prompt, GREEDY)
            assert tuple(output.outputs[0].token_ids) == plain_answer(model, prompt, 8)
            came += output.num_cached_tokens
        nothing_held(engine)
        engine.close()
    assert came > 5 * 40
