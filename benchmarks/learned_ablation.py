"""The worth of each part of the policy `learned`: the policy without it, on the public traces.

Every row is the shipped policy with one thing changed, through the real cache manager; the
figures are token hits in % of all prompt tokens. See docs/decisions/learned-policy.md.

    python benchmarks/learned_ablation.py TRACE [TRACE ...] [--shares 5,10] [--variants lru,shipped]
        [--second-half]

A trace is a file, `mooncake_conversation.jsonl.gz` for one. Shares are per cent of all its blocks;
with `--second-half` only the last half of its rows is replayed, from a cold start. A variant and a share of
the conversation trace take 2 to 5 s of CPU.
"""

import argparse

import numpy as np

from quire.foresight import Learned
from quire.foresight.learned_state import Mind
from quire.foresight.queues import Queues
from quire.foresight.reentry import NUM_CLASSES, WIDTHS, Reentry
from quire_sim.replay import replay
from quire_sim.trace import open_trace


class Rows:
    """A trace, or the last half of one, read once."""

    def __init__(self, path, *, second_half):
        trace = open_trace(path)
        self.source, self.format, self.block_size = trace.source, trace.format, trace.block_size
        self.requests = list(trace)
        self.num_blocks = 1 + max(int(each.blocks.max(initial=-1)) for each in self.requests)
        if second_half:
            self.requests = self.requests[len(self.requests) // 2 :]

    def __iter__(self):
        return iter(self.requests)


# -- minds -------------------------------------------------------------------------------------


class NoGhosts(Mind):
    """Nothing is known again after its blocks were evicted."""

    def remember(self, record):
        self.model.forget(record, self.now)


class NoTrim(Mind):
    """Answers are kept on equal terms."""

    trims = False


class Bold(Mind):
    """Acts from the first request on."""

    def __init__(self):
        super().__init__(apprentice=0)


class NoGuard(Bold):
    """Never becomes LRU."""

    def judge(self, found, lru_found, asked, capacity):
        pass


class AlwaysLru(Mind):
    """The order of LRU, by the policy's own queues."""

    def __init__(self):
        super().__init__()
        self.is_lru = True

    def judge(self, found, lru_found, asked, capacity):
        pass


def with_model(model, mind=Mind):
    """Return a maker of minds that learn with another model."""

    def make():
        made = mind()
        made.model = model()
        return made

    return make


# -- models ------------------------------------------------------------------------------------


class OctaveClasses(Reentry):
    """Half as many classes."""

    def watch(self, record, features):
        super().watch(record, features)
        record.kind -= record.kind % 2


def with_cells(*kept):
    """Return the policy whose model has some of its four features: turn, new, turn and new, output."""

    class Fewer(Reentry):
        def watch(self, record, features):
            super().watch(record, tuple(features[i] for i in kept))

    return with_mind(with_model(Fewer))


def refreshed_every(num_requests):
    """Return a model that computes its ranks more often, or less."""

    class Refreshed(Reentry):
        def refresh(self):
            super().refresh()
            self._wait = num_requests

    return Refreshed


def reuse_within(seconds):
    """Return a model whose rank is the chance of a return within so many seconds."""

    class Within(Reentry):
        def ranked(self):
            weights = np.array([2.0 ** ((k - NUM_CLASSES // 2) / 2) for k in range(NUM_CLASSES)])
            width = np.array(WIDTHS)
            rate = self._hazard / (1 / weights[:, None] + self._so_far)
            ends = np.cumsum(width)
            middle = ends - width / 2
            total = np.zeros((NUM_CLASSES, len(width)))
            for at in range(len(width)):
                inside = np.clip(middle[at] + seconds - (ends - width), 0, width)
                inside[:at] = 0
                inside[at] = min(width[at] / 2, seconds)
                total[:, at] = (rate * inside).sum(axis=1)
            return (1 - np.exp(-total)).tolist()

    return Within


class RateNow(Reentry):
    """The rank is the rate of return now, whatever comes later."""

    def ranked(self):
        weights = np.array([2.0 ** ((k - NUM_CLASSES // 2) / 2) for k in range(NUM_CLASSES)])
        return (self._hazard / (1 / weights[:, None] + self._so_far)).tolist()


class Upside(Reentry):
    """An adversary: what is most likely to be come back to goes first."""

    def ranked(self):
        return [[-rank for rank in ranks] for ranks in super().ranked()]


# -- policies ----------------------------------------------------------------------------------


class OneQueueForSuperseded(Learned):
    """The policy in which records that a later turn continues stay in their class."""

    def _queues(self, tick, capacity):
        return _InTheirClasses(tick, capacity, self.mind)


class _InTheirClasses(Queues):
    def _queue(self, entry):
        record = entry.note
        gone_on_from, record.superseded = record.superseded, False
        queue = super()._queue(entry)
        record.superseded = gone_on_from
        return queue


class NothingShared(Learned):
    """The policy in which shared runs are ranked like the last request's own blocks."""

    def _share(self, walk, before, num_lost):
        pass


def with_mind(mind):
    """Return a maker of policies that think otherwise."""
    return lambda: Learned(mind)


TURN, NEW, PAIR, OUTPUT = range(4)

VARIANTS = {
    "lru": lambda: "lru",
    "shipped": Learned,
    "nothing shared": NothingShared,
    "no ghosts": with_mind(NoGhosts),
    "no trim": with_mind(NoTrim),
    "bold": with_mind(Bold),
    "no guard": with_mind(NoGuard),
    "superseded in their classes": OneQueueForSuperseded,
    "no features": with_cells(),
    "turn": with_cells(TURN),
    "new": with_cells(NEW),
    "turn + new": with_cells(TURN, NEW),
    "turn + new + output": with_cells(TURN, NEW, OUTPUT),
    "turn + new + turn x new": with_cells(TURN, NEW, PAIR),
    "turn x new": with_cells(PAIR),
    "classes of an octave": with_mind(with_model(OctaveClasses)),
    "refresh 16": with_mind(with_model(refreshed_every(16))),
    "refresh 32": with_mind(with_model(refreshed_every(32))),
    "refresh 128": with_mind(with_model(refreshed_every(128))),
    "reuse within 120 s": with_mind(with_model(reuse_within(120))),
    "rate of return now": with_mind(with_model(RateNow)),
    "LRU by its queues": with_mind(AlwaysLru),
    "inverted": with_mind(with_model(Upside)),
    "inverted and no guard": with_mind(with_model(Upside, NoGuard)),
}


def fitted(trace, capacity):
    """Return the policy as it is after the whole trace: its curves know the future, on average."""
    first = Learned()
    replay(trace, capacity, first)
    return with_mind(with_model(lambda: _Fitted(first.mind.model), Bold))


class _Fitted(Reentry):
    """A model that begins with what another has learned, and waits for none of its records."""

    def __init__(self, learned):
        super().__init__()
        self._returns, self._exposure = list(learned._returns), learned._exposure.copy()
        self._cell_returns = list(learned._cell_returns)
        self._cell_returned = learned._cell_returned.copy()
        self._cell_expected, self._weights = learned._cell_expected.copy(), learned._weights
        self.refresh()


def main():
    """Print one row per variant."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--shares", default="1,5,10,25,50")
    parser.add_argument("--variants", default=",".join([*VARIANTS, "fitted"]))
    parser.add_argument("--second-half", action="store_true")
    options = parser.parse_args()
    shares = [float(share) for share in options.shares.split(",")]
    for path in options.traces:
        trace = Rows(path, second_half=options.second_half)
        print(f"{trace.source}: token hit in %")
        print("| variant |", " | ".join(f"{share:g} %" for share in shares), "|")
        print("|---|" + "---|" * len(shares))
        for name in options.variants.split(","):
            print(f"| {name} |", end="", flush=True)
            for share in shares:
                capacity = int(trace.num_blocks * share / 100)
                policy = VARIANTS[name] if name != "fitted" else fitted(trace, capacity)
                result = replay(trace, capacity, policy())
                print(f" {100 * result.token_hit:.2f} |", end="", flush=True)
            print()


if __name__ == "__main__":
    main()
