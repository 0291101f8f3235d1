"""The sequences of a replica that decode: arrays, so that a step costs the same for one and 256."""

from __future__ import annotations

import numpy as np

from quire_sim.hardware.roofline import Contexts
from quire_sim.serving.requests import LiveRequest


class Decoding:
    """Requests that get one token each step, and where each of them stands.

    `steps` counts the decode steps of the replica. Nothing is written per sequence and step:
    what grows by one a step is kept as a difference to `steps`.

    `base`   tokens with KV, less `steps`
    `last`   the value of `steps` at which the request has its last token
    `room`   tokens that fit in its blocks
    """

    def __init__(self, max_sequences: int, block_size: int) -> None:
        self.steps = 0
        self.requests: list[LiveRequest] = []
        self._block_size = block_size
        self._base = np.zeros(max_sequences, np.int64)
        self._last = np.zeros(max_sequences, np.int64)
        self._room = np.zeros(max_sequences, np.int64)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def contexts(self) -> Contexts:
        """Tokens with KV, per request, before the next step."""
        return self._base[: len(self.requests)] + self.steps

    @property
    def steps_left(self) -> int:
        """Steps until the next request is finished."""
        return int(self._last[: len(self.requests)].min()) - self.steps

    def add(self, request: LiveRequest) -> None:
        """Let a request decode whose prefill gave a token: `computed` tokens have KV."""
        slot = request.slot = len(self.requests)
        self.requests.append(request)
        self._base[slot] = request.computed - self.steps
        self._last[slot] = self.steps + request.trace.output_tokens - request.generated
        self._room[slot] = request.num_blocks * self._block_size

    def remove(self, request: LiveRequest) -> None:
        """Take a request out; its counts are up to date from then on."""
        slot = request.slot
        request.computed = int(self._base[slot]) + self.steps
        left = int(self._last[slot]) - self.steps
        request.generated = request.trace.output_tokens - left
        request.slot = -1
        last = self.requests.pop()
        if last is not request:
            self.requests[slot] = last
            last.slot = slot
            end = len(self.requests)
            for column in (self._base, self._last, self._room):
                column[slot] = column[end]

    def finished(self) -> list[LiveRequest]:
        """Return the requests that have their last token, in order of admission."""
        done = np.flatnonzero(self._last[: len(self.requests)] == self.steps)
        return sorted((self.requests[slot] for slot in done.tolist()), key=lambda r: r.order)

    def blocks_short(self, num_steps: int) -> int:
        """Return the blocks that are missing for the next `num_steps` steps of all."""
        return int(self._short(num_steps).sum())

    def extend(self, num_steps: int) -> list[tuple[LiveRequest, int]]:
        """Note room for the next `num_steps` steps; return who needs how many blocks for that."""
        short = self._short(num_steps)
        slots = np.flatnonzero(short)
        if not len(slots):
            return []
        self._room[slots] += short[slots] * self._block_size
        chosen = [(self.requests[slot], int(short[slot])) for slot in slots.tolist()]
        chosen.sort(key=lambda pair: pair[0].order)
        for request, num_blocks in chosen:
            request.num_blocks += num_blocks
        return chosen

    def _short(self, num_steps: int) -> Contexts:
        n = len(self.requests)
        over = self._base[:n] + (self.steps + num_steps) - self._room[:n]
        return np.maximum(-(-over // self._block_size), 0)
