"""What memory is worth on a trace: hits, seconds of prefill, time to the first token."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from quire.errors import ConfigError
from quire.sim.hardware import ModelFacts, Roofline, Tier
from quire.sim.reuse import Counts, Reuses
from quire.sim.stacks import Steps, lru_steps

GIB = 1 << 30


class Worth(msgspec.Struct, frozen=True, kw_only=True):
    """A trace with so much memory below the device.

    `below`            bytes of each tier, by name; empty: the device alone
    `token_hit`        share of all prompt tokens found anywhere, `device_hit` in the device
    `prefill_gpu_s`    device seconds of all prefills, each alone
    `saved_gpu_s`      less than with the device alone
    `ttft_s`           mean time to the first token of a request that runs alone, fetches included
    `fetched`          share of the tokens found below the device that were worth fetching
    """

    below: dict[str, int]
    token_hit: float
    device_hit: float
    prefill_gpu_s: float
    saved_gpu_s: float
    ttft_s: float
    fetched: float

    @property
    def below_bytes(self) -> int:
        """Bytes of all tiers below the device."""
        return sum(self.below.values())


class Room(msgspec.Struct, frozen=True):
    """So many bytes of a tier."""

    tier: Tier
    num_bytes: int


class Workload:
    """A trace as hits by capacity: exact for LRU, request by request, in one pass over it."""

    def __init__(self, reuses: Reuses) -> None:
        if not reuses.num_requests:
            raise ConfigError("the trace has no requests; there is nothing to plan for")
        self._reuses = reuses
        self._steps: Steps = lru_steps(reuses)

    @property
    def block_size(self) -> int:
        """Tokens per block of the trace."""
        return self._reuses.block_size

    @property
    def num_requests(self) -> int:
        """Requests."""
        return self._reuses.num_requests

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return int(self._reuses.prompt_tokens.sum())

    @property
    def unique_tokens(self) -> int:
        """Tokens of all different blocks: a cache of this size never evicts."""
        return self._reuses.num_unique * self.block_size

    @property
    def mean_prompt(self) -> int:
        """Tokens of a mean prompt."""
        return max(1, round(self.prompt_tokens / self.num_requests))

    def share_above(self, num_tokens: int) -> float:
        """Return the share of prompts longer than this."""
        return float((self._reuses.prompt_tokens > num_tokens).mean())

    def cached_tokens(self, capacity_tokens: int) -> Counts:
        """Return what each prompt finds in an LRU cache of this capacity, int64 [requests].

        At least one token of a prompt is always computed.
        """
        steps, reuses = self._steps, self._reuses
        blocks = np.clip(capacity_tokens // self.block_size - steps.below, 0, steps.width)
        found = np.zeros(reuses.num_requests, np.int64)
        np.add.at(found, steps.request, blocks)
        return np.minimum(found * self.block_size, reuses.prompt_tokens - 1)

    def token_hit(self, capacity_tokens: int) -> float:
        """Return the share of all prompt tokens that an LRU cache of this capacity finds."""
        return float(self.cached_tokens(capacity_tokens).sum()) / max(1, self.prompt_tokens)

    def bytes_per_token(self, model: ModelFacts) -> float:
        """Return what a cached token of a mean prompt takes, windows and states included."""
        return model.kv.of(self.mean_prompt) / self.mean_prompt

    def worth(
        self, roofline: Roofline, device_bytes: int, hierarchies: Sequence[Sequence[Room]]
    ) -> list[Worth]:
        """Return what memory below the device is worth, for each hierarchy, fastest tier first.

        The tiers are exclusive: what falls out of one goes down to the next. The head of a prefix
        is used last, so the device has the head and the slowest tier the end. Each request fetches
        down to the tier that makes its first token come soonest, from all tiers at once, while it
        computes the rest.
        """
        per_token = self.bytes_per_token(roofline.model)
        prompts: list[int] = self._reuses.prompt_tokens.tolist()
        heads: list[int] = self.cached_tokens(int(device_bytes / per_token)).tolist()
        alone = [
            roofline.prefill_s(prompt - head, head)
            for prompt, head in zip(prompts, heads, strict=True)
        ]
        all_gpu_s = sum(alone) * roofline.num_gpus
        rows: list[Worth] = []
        for rooms in hierarchies:
            known: list[list[int]] = []
            capacity = device_bytes
            for room in rooms:
                capacity += room.num_bytes
                known.append(self.cached_tokens(int(capacity / per_token)).tolist())
            busy = waited = 0.0
            found = taken = 0
            for index, prompt in enumerate(prompts):
                head = heads[index]
                depths = [each[index] for each in known]
                tiers = [(depth, room.tier) for depth, room in zip(depths, rooms, strict=True)]
                best = _soonest(roofline, prompt, (alone[index], alone[index], head), tiers)
                waited += best[0]
                busy += best[1]
                taken += best[2] - head
                found += depths[-1] if depths else head
            below = found - sum(heads)
            rows.append(
                Worth(
                    below={room.tier.name: room.num_bytes for room in rooms},
                    token_hit=found / self.prompt_tokens,
                    device_hit=sum(heads) / self.prompt_tokens,
                    prefill_gpu_s=busy * roofline.num_gpus,
                    saved_gpu_s=all_gpu_s - busy * roofline.num_gpus,
                    ttft_s=waited / self.num_requests,
                    fetched=taken / below if below else 1.0,
                )
            )
        return rows


def _soonest(
    roofline: Roofline,
    prompt: int,
    best: tuple[float, float, int],
    tiers: Sequence[tuple[int, Tier]],
) -> tuple[float, float, int]:
    """Return time to the first token, computed seconds and cached tokens of the best depth.

    `best` is that of the device alone; each tier holds the prefix up to the tokens beside it.
    """
    above, fetches = best[2], 0.0
    for known, tier in tiers:
        if known > above:
            fetches = max(fetches, roofline.fetch_s(known - above, tier))
            computed = roofline.prefill_s(prompt - known, known)
            first = max(computed, fetches)
            if first < best[0]:
                best = (first, computed, known)
        above = known
    return best
