"""Blocks from tiers are written on a stream of their own, while the layers before them compute."""

import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

sys.path.append(str(Path(__file__).parents[1] / "differential"))

from hf_help import left_padded, random_ids, tiny_config  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.utils import output_capturing  # noqa: E402

from quire.engines.hf import PrefixCache  # noqa: E402
from quire.tensors.transfers import CudaLane, Transfers, transfers_to  # noqa: E402
from quire.tiers.host import Host  # noqa: E402
from quire.tiers.stack import StackSettings, TierStack  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

SLEEP_CYCLES = 20_000_000
"""About 10 ms: longer than a tiny model's whole forward."""


class SlowLane(CudaLane):
    """A side stream that sleeps before each step: what does not wait for it reads too early."""

    def run(self, step):
        def slow():
            torch.cuda._sleep(SLEEP_CYCLES)
            step()

        return super().run(slow)


class TimedLane(CudaLane):
    """A side stream that notes when each step has ended."""

    ended = ()

    def run(self, step):
        mark = super().run(step)
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._side)
        self.ended = (*self.ended, event)
        return mark


def lend(monkeypatch, make):
    """Have caches of models on the device transfer so; a twin that a model is tried on is on the host."""

    def transfers(device):
        return make(device) if device.type == "cuda" else transfers_to(device)

    monkeypatch.setattr("quire.engines.hf.storage.transfers_to", transfers)


def cuda_model(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)
    return model.eval().to("cuda")


def prompt(seed, num_tokens=90):
    return random_ids(torch.Generator().manual_seed(seed), num_tokens)


def generated(model, ids, mask=None, **arguments):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(
        ids.to("cuda"),
        attention_mask=mask.to("cuda"),
        **{"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **arguments},
    )


@pytest.fixture
def host():
    with TierStack([Host("1GiB")], StackSettings(gate=False)) as tiers:
        yield tiers


FAMILIES = ["llama", "gemma3_text", "mistral+window", "deepseek_v3", "qwen3_next", "falcon_h1"]


@pytest.mark.parametrize("lane", [CudaLane, SlowLane])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_and_batches_from_tiers_give_the_tokens_of_the_plain_model(
    family, lane, host, monkeypatch
):
    lend(monkeypatch, lambda device: Transfers(lane(device)))
    model = cuda_model(family)
    texts = [prompt(seed, n)[0] for seed, n in ((1, 90), (2, 70), (3, 33))]
    first = PrefixCache(model, "4MiB", tiers=host, debug=True)
    for text in texts:
        generated(first, text[None])
    ids, mask = left_padded(texts)
    for each, its_mask, arguments in (
        (texts[0][None], None, {}),
        (texts[0][None], None, {"num_beams": 3}),
        (ids, mask, {}),
    ):
        cache = PrefixCache(model, "4MiB", tiers=host, debug=True)
        for _ in range(2):  # from the tier, then from the pools that it was written to
            got = generated(cache, each, its_mask, **arguments)
            assert torch.equal(got, generated(model, each, its_mask, **arguments))
            assert cache.kept.store.transfers.is_idle
    assert not cache.last.tier_tokens


@pytest.mark.parametrize("tier_dtype", ["int8", "fp8"])
def test_records_in_fewer_bits_are_unpacked_beside_the_forward_as_at_once(
    tier_dtype, host, monkeypatch
):
    model, outputs = cuda_model("llama"), []
    generated(PrefixCache(model, "4MiB", tiers=host, tier_dtype=tier_dtype), prompt(1))
    for make in (lambda _: Transfers(), lambda device: Transfers(SlowLane(device))):
        lend(monkeypatch, make)
        cache = PrefixCache(model, "4MiB", tiers=host, tier_dtype=tier_dtype, debug=True)
        outputs.append(generated(cache, prompt(1)))
        assert sum(cache.last.tier_tokens.values()) == 80
    assert torch.equal(*outputs)


@pytest.fixture(scope="module")
def larger():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(device="cuda", dtype=torch.bfloat16).eval()


def test_the_first_layer_has_computed_before_the_last_one_has_come(
    larger, host, monkeypatch, record_property
):
    generator = torch.Generator().manual_seed(0)
    head = torch.randint(3, 1000, (1, 4096), generator=generator)
    marks = [torch.cuda.Event(enable_timing=True)]

    def look(*_):
        marks[-1].record()

    # Any other hook would make another model of it, which finds no records of this one.
    look.__module__ = output_capturing.__name__
    larger.model.layers[0].register_forward_hook(look)
    generated(PrefixCache(larger, "1GiB", tiers=host), torch.cat([head, head[:, :8]], dim=1))
    assert host.drain(20)
    lanes = []

    def timed(device):
        lanes.append(TimedLane(device))
        return Transfers(lanes[-1])

    for name, make in (("at once", lambda _: Transfers()), ("beside", timed)):
        lend(monkeypatch, make)
        for _ in range(3):  # the first ones pin memory
            tail = torch.randint(3, 1000, (1, 900), generator=generator)
            cache = PrefixCache(larger, "1GiB", tiers=host)
            marks.append(torch.cuda.Event(enable_timing=True))
            torch.cuda.synchronize()
            begun = time.perf_counter()
            generated(cache, torch.cat([head, tail], dim=1), max_new_tokens=1)
            torch.cuda.synchronize()
            record_property(f"{name}, seconds", time.perf_counter() - begun)
            assert sum(cache.last.tier_tokens.values()) == 4096
    last = lanes[-1].ended[-1]
    ahead_ms = marks[-1].elapsed_time(last)
    record_property("layer 0 computed before the last layer came, ms", ahead_ms)
    assert ahead_ms > 0
