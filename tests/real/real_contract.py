"""The contract of any model with real weights: prompts beyond a window of 512, in memory too small for them."""

from real_help import asked, cache_of, lent, plain, shared_head, text

from quire import ops
from quire.engines.loop import Engine, SamplingParams
from quire.tiers import Disk, Host
from quire.tiers.stack import StackSettings, TierStack

OPEN = StackSettings(gate=False)
"""Loads all that the tiers have, however fast the model computes it."""


class Borders:
    """Hits of the model that goes by `name`, at any token."""

    name: str

    def test_a_prompt_is_found_at_every_border_inside_and_beyond_512_tokens(self):
        ids, other = text(self.name, 600), text(self.name, 60, 5000)
        cache = cache_of(self.name, 80)
        stored = [ids + asked(cache, self.name, ids, 2)]
        assert cache.last.cached_tokens == 0
        for at, cut in enumerate((590, 528, 512, 511, 48)):
            prompt = ids[:cut] + other[at:][:21]
            found = shared_head(prompt, stored)
            assert found >= cut
            stored.append(prompt + asked(cache, self.name, prompt, 2))
            assert cache.last.cached_tokens == found, cut  # the part of a block is copied


class Evictions:
    """Pools of the model that goes by `name`, too small for its prompts, above tiers."""

    name: str

    def test_evicted_blocks_come_back_from_memory_and_after_a_restart_from_disk(self, tmp_path):
        head = text(self.name, 560)
        prompts = [head + text(self.name, 40 + 40 * n, 4000 + 300 * n) for n in range(3)]
        with TierStack([Host("512MiB"), Disk(tmp_path, "512MiB")], OPEN) as tiers:
            cache = cache_of(self.name, 45, tiers=tiers)
            for prompt in prompts:
                asked(cache, self.name, prompt, 2)
            assert cache.stats.evicted_blocks > 0
            asked(cache, self.name, prompts[0], 2)
            assert cache.last.cached_tokens >= (len(prompts[0]) - 1) // 16 * 16
            assert cache.last.tier_tokens["host"] >= 16
            assert tiers.drain(60)
        with TierStack([Disk(tmp_path, "512MiB")], OPEN) as tiers:
            cache = cache_of(self.name, 59, tiers=tiers)
            asked(cache, self.name, prompts[2], 2)
            assert cache.last.cached_tokens >= (len(prompts[2]) - 1) // 16 * 16
            assert cache.last.tier_tokens["disk"] >= 560


class Preemptions:
    """An engine of the model that goes by `name`, with too little memory for its requests.

    `num_shared`: how many tokens these begin with alike, in whole blocks
    """

    name: str
    num_shared = 560

    def test_an_engine_that_preempts_says_what_the_plain_model_says(self):
        head = text(self.name, self.num_shared)
        prompts = [
            head[: len(head) - less] + text(self.name, 30 + n, 4000 + 90 * n)
            for n, less in enumerate((0, 30, 0, 44))
        ]
        engine = Engine(
            lent(self.name)[0],
            num_blocks=self.num_shared // 16 + 5,
            block_size=16,
            max_step_tokens=192,
            debug_nan=True,
        )
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        outputs = engine.generate(prompts, params)
        for prompt, output in zip(prompts, outputs, strict=True):
            plain(self.name).agrees(prompt, output.outputs[0].token_ids)
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.cached_tokens >= 3 * (self.num_shared - 60)
        ops.check(engine.manager)
        engine.close()
