"""A side stream that is as late, or as early, as a device may be."""

import torch
from hf_help import make_cache, random_ids

from quire.tensors.transfers import Lane, Transfers
from quire.tiers.stack import TierStack


class LateLane(Lane):
    """Steps are done when something waits for them, in order, and no moment before."""

    def __init__(self):
        self.waiting = []
        self.num_sent = 0
        self.num_done = 0
        self.most_behind = 0

    def begin(self):
        pass

    def run(self, step):
        self.num_sent += 1
        self.waiting.append(step)
        self.most_behind = max(self.most_behind, len(self.waiting))
        return self.num_sent

    def wait(self, mark):
        while self.num_done < mark:
            self.waiting[0]()
            del self.waiting[0]
            self.num_done += 1


class EarlyLane(LateLane):
    """Steps are done as soon as they are sent."""

    def run(self, step):
        step()
        self.num_sent += 1
        self.num_done += 1
        return self.num_sent


LANES = {"late": LateLane, "early": EarlyLane}


def lend(monkeypatch, kind="late"):
    """Give caches made from now on such a lane, and buffers that are overwritten when given back."""
    monkeypatch.setattr(
        "quire.engines.hf.storage.transfers_to", lambda _device: Transfers(LANES[kind]())
    )
    give_back = TierStack.give_back

    def overwritten(self, buffers):
        for buffer in buffers:
            buffer[:] = b"\xff" * buffer.nbytes
        give_back(self, buffers)

    monkeypatch.setattr(TierStack, "give_back", overwritten)


def lane_of(cache):
    """The lane of a cache that was made after `lend`."""
    return cache.kept.store.transfers._lane


def prompt(seed, num_tokens=90):
    return random_ids(torch.Generator().manual_seed(seed), num_tokens)


def tier_tokens(cache):
    return sum(cache.last.tier_tokens.values())


def warm_cache(model, tiers, *texts, **options):
    """A cache with empty pools above tiers that hold these texts."""
    first = make_cache(model, tiers=tiers)
    for text in texts:
        first.generate(text, max_new_tokens=2)
    return make_cache(model, tiers=tiers, **options)


def settled(cache):
    """Nothing is on its way any more, and every buffer has gone back."""
    transfers = cache.kept.store.transfers
    return transfers.is_idle and not transfers._then and not lane_of(cache).waiting
