"""Tiers below an engine: what they bring back is exact, and what they do not do delays or breaks nothing."""

import time

import pytest
from loop_help import GREEDY, nothing_held, plain_answer, tiny_model
from traffic_help import Traffic

from quire import ops
from quire.engines.loop import Engine, SamplingParams
from quire.errors import ConfigError
from quire.tiers import Disk, Host
from quire.tiers.faults import FaultPlan, Faulty
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stack import TierStack

PROMPT = tuple(range(10, 50))
SMALL = {
    "num_blocks": 26,
    "block_size": 4,
    "max_running": 6,
    "max_step_tokens": 23,
    "max_prefill_tokens": 9,
}
ALWAYS = {"gate": False, "busy_share": 1.0}
"""Bring back whatever is there, also where a tiny model computes it sooner."""


def host_stack(**settings):
    return TierStack([Host("64MiB")], StackSettings(**(ALWAYS | settings)))


def answer(engine, prompt=PROMPT, **options):
    (output,) = engine.generate(prompt, GREEDY, **options)
    return output.num_cached_tokens, tuple(output.outputs[0].token_ids)


@pytest.fixture
def directory(tmp_path):
    """Returns an engine over the same directory, each time a new one."""

    def open_engine(model):
        disk = Disk(tmp_path / "kv", "64MiB")
        return Engine(model, num_blocks=60, block_size=4, tiers=[disk], debug_nan=True)

    return open_engine


def test_an_engine_that_starts_anew_finds_what_the_last_one_computed(directory):
    model = tiny_model("llama")
    plain = plain_answer(model, PROMPT, 8)
    first = directory(model)
    assert answer(first) == (0, plain)
    first.close()
    second = directory(model)
    assert answer(second) == (len(PROMPT) - 4, plain)
    second.close()
    for engine in (first, second):
        nothing_held(engine)


def test_records_of_another_model_are_not_found(directory):
    first = directory(tiny_model("llama"))
    answer(first)
    first.close()
    other = tiny_model("llama", seed=5)
    second = directory(other)
    assert answer(second) == (0, plain_answer(other, PROMPT, 8))
    second.close()


def test_evicted_blocks_come_back_from_a_tier():
    model = tiny_model("llama")
    with host_stack() as stack:
        engine = Engine(model, num_blocks=30, block_size=4, tiers=stack, debug_nan=True)
        answer(engine)
        for start in range(4, 40, 6):
            answer(engine, range(start, start + 48))
        assert answer(engine) == (len(PROMPT) - 4, plain_answer(model, PROMPT, 8))


def test_a_request_says_how_many_tokens_each_tier_brought_it_and_for_how_long_it_waited(directory):
    model = tiny_model("llama")
    first = directory(model)
    (output,) = first.generate([PROMPT], GREEDY)
    assert output.metrics.loaded_tokens == {}
    first.close()
    second = directory(model)
    (output,) = second.generate([PROMPT], GREEDY)
    times = output.metrics
    assert times.loaded_tokens == {"disk": len(PROMPT) - 4}
    assert 0 < times.load_s <= times.first_token_ts - times.scheduled_ts
    assert output.num_cached_tokens == len(PROMPT) - 4
    second.close()


LONG = pytest.mark.long


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("family", "write"),
    [
        ("llama", "through"),
        ("gemma3_text", "back"),
        ("deepseek_v3", "through"),
        pytest.param("llama", "back", marks=LONG),
        pytest.param("gemma3_text", "through", marks=LONG),
        pytest.param("deepseek_v3", "back", marks=LONG),
    ],
)
def test_random_traffic_in_a_small_pool_gives_the_tokens_of_the_plain_model(family, write):
    with host_stack(write=write) as stack:
        counts = Traffic(tiny_model(family), seed=8).live(16, tiers=stack, **SMALL).counts
        assert counts["ties"] <= 1
        assert counts["preemptions"] > 0
        assert stack.stats().loads["hit"] > 0
        stack.check()


def test_a_preempted_request_goes_on_from_a_tier():
    model = tiny_model("llama")
    params = SamplingParams(temperature=0, max_tokens=26, ignore_eos=True)
    prompts = [tuple(range(start, start + 30)) for start in (3, 50)]

    def recomputed(tiers):
        engine = Engine(model, num_blocks=18, block_size=4, max_running=8, tiers=tiers)
        outputs = engine.generate(prompts, params)
        assert engine.stats().preemptions > 0
        engine.close()
        return engine.manager.stats.recomputed_tokens, [each.outputs for each in outputs]

    with host_stack() as stack:
        without, plain = recomputed(None)
        with_tier, told = recomputed(stack)
        assert told == plain
        assert without > 12
        assert with_tier < 4
        assert stack.stats().loads["hit"] > 0


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "plan",
    [FaultPlan(hangs=1.0, hang_s=30.0), FaultPlan(errors=1.0), FaultPlan(full=1.0)],
    ids=["hangs", "fails", "full"],
)
def test_a_tier_in_trouble_delays_no_one_beyond_its_patience_and_changes_no_token(plan):
    settings = StackSettings(lookup_timeout_s=0.1, load_timeout_s=0.3, close_timeout_s=0.2)
    model = tiny_model("llama")
    stack = TierStack([Faulty(Host("64MiB"), plan)], settings)
    engine = Engine(model, num_blocks=60, block_size=4, tiers=stack)
    longest = 0.0
    for i in range(12):
        prompt = (i + 3, *PROMPT)
        engine.add_request(prompt, GREEDY, request_id=str(i))
        while engine.has_unfinished():
            begun = time.monotonic()
            outputs = engine.step()
            longest = max(longest, time.monotonic() - begun)
        assert tuple(outputs[0].outputs[0].token_ids) == plain_answer(model, prompt, 8)
    assert longest < 10.0
    engine.close()
    nothing_held(engine)
    stack.close()


def test_a_small_tier_keeps_what_it_has_room_for(tmp_path):
    model = tiny_model("llama")
    tiers = [Host("16KiB")]
    engine = Engine(model, num_blocks=60, block_size=4, tiers=tiers)
    for start in (3, 20, 40):
        prompt = tuple(range(start, start + 40))
        assert answer(engine, prompt)[1] == plain_answer(model, prompt, 8)
    engine.close()
    nothing_held(engine)


def test_tiers_that_were_opened_for_an_engine_that_cannot_be_made_are_closed(directory, tmp_path):
    disk = f"disk:{tmp_path / 'kv'}?capacity=64MiB"
    with pytest.raises(ConfigError, match="policy"):
        Engine(tiny_model("llama"), num_blocks=9, policy="none such", tiers=[disk])
    directory(tiny_model("llama")).close()


@pytest.mark.cases(2)
@pytest.mark.parametrize("hook", ["_contains", "_get", "_put", "_delete"])
@pytest.mark.parametrize("error", [ValueError("a bug"), MemoryError(), StopIteration()])
def test_whatever_a_tier_raises_no_request_fails(hook, error):
    def broken(*_, **__):
        raise error

    model, tier = tiny_model("llama"), Host("64MiB")
    setattr(tier, hook, broken)
    with TierStack([tier], StackSettings(**ALWAYS)) as stack:
        engine = Engine(model, num_blocks=30, block_size=4, tiers=stack, debug_nan=True)
        for start in (10, 4, 20, 10):
            prompt = tuple(range(start, start + 40))
            assert answer(engine, prompt)[1] == plain_answer(model, prompt, 8)
        engine.close()
        nothing_held(engine)
        if hook in ("_contains", "_put"):
            assert tier.stats().outcomes["error"] > 0
            assert type(error).__name__ in tier.last_failure


def test_an_urgent_request_from_a_tier_gets_the_blocks_of_one_that_yields_and_is_being_copied():
    """A prefix that comes back takes all free blocks: the next one is held by a background thread."""
    model, urgent = tiny_model("llama"), tuple(range(20, 93))
    stack = host_stack()
    engine = Engine(model, num_blocks=24, block_size=4, max_running=1, tiers=stack)
    plain = answer(engine, urgent)[1]
    while not engine.is_settled:  # what the answer left is copied out in the background
        time.sleep(0.001)
    ops.invalidate(engine.manager, list(urgent), engine.scope())
    engine.add_request(PROMPT[:25], GREEDY)
    engine.step()
    asked = engine.add_request(urgent, GREEDY, priority=5)
    told = {}
    while engine.has_unfinished():
        told |= {each.request_id: each for each in engine.step() if each.finished}
    assert [each.error for each in told.values()] == [None, None]
    assert told[asked].metrics.loaded_tokens == {"host": 72}
    assert tuple(told[asked].outputs[0].token_ids) == plain
    assert engine.stats().preemptions == 1
    engine.close()
    nothing_held(engine)
    stack.close()
