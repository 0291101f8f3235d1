"""Prompts of `quire bench serve`: random token ids, shared like those of chats, agents or documents.

The simulator's generators make the shapes of conversations; this module fills them with tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

import numpy as np

from quire_sim.distributions import Lognormal
from quire_sim.workload import Agent, Chat, Rag, Traffic, Workload
from quire_sim.workload.settings import TrafficKind

VOCABULARY = 256
"""Token ids are drawn below it."""
LONGEST = 7_000
"""Tokens of a prompt; what would be longer is not asked."""


class ServeRequest(NamedTuple):
    """A prompt; whose turn it is, which begins after the one before; seconds of arrival, one per second on average."""

    prompt: list[int]
    session: str
    time_s: float


class ServeLoad(NamedTuple):
    """Requests without turns: tokens of a prompt that it shares, of its own, and new ones."""

    num_requests: int
    num_prefixes: int
    shared: int
    own: int
    new: int

    def requests(self, seed: int) -> list[ServeRequest]:
        """Return the requests, other prompts for each seed; neighbours have different prefixes, arrivals are a Poisson process."""
        source = np.random.default_rng([seed, *self])  # no load begins as another
        heads = source.integers(0, VOCABULARY, (self.num_prefixes, self.shared)).tolist()
        tails = source.integers(0, VOCABULARY, (self.num_requests, self.own)).tolist()
        times = source.exponential(1.0, self.num_requests).cumsum().tolist()
        return [
            ServeRequest([*heads[i % self.num_prefixes], *tail], str(i), time_s)
            for i, (tail, time_s) in enumerate(zip(tails, times, strict=True))
        ]


class OneByOne(ServeLoad):
    """The same, asked one by one."""


class TrafficLoad(NamedTuple):
    """Requests of sessions, as the simulator makes them, with `new` generated tokens each.

    A later prompt has the answer that the simulator made up, not the one that was generated: so
    all systems get the same prompts.
    """

    kind: TrafficKind
    num_requests: int
    new: int

    def requests(self, seed: int) -> list[ServeRequest]:
        """Return the requests in order of arrival, other ones for each seed."""
        trace = Workload({"": Traffic(self.kind)}, 10 * self.num_requests, seed, block_size=1)
        fitting = (request for request in trace if request.prompt_tokens <= LONGEST)
        asked = list(islice(fitting, self.num_requests))
        source = np.random.default_rng([seed, self.num_requests])
        size = 1 + max(int(request.blocks.max()) for request in asked)
        tokens = source.integers(0, VOCABULARY, size)  # of each block, which is one token
        times = scaled([request.time_s for request in asked])
        return [
            ServeRequest(tokens[request.blocks].tolist(), request.session or "", time_s)
            for request, time_s in zip(asked, times, strict=True)
        ]


class ChatLoad(NamedTuple):
    """Chats that begin together, and ask again as soon as they are answered; tokens of their parts."""

    num_chats: int
    num_turns: int
    num_prefixes: int
    shared: int
    question: int
    new: int

    def requests(self, seed: int) -> list[ServeRequest]:
        """Return the requests turn by turn, other prompts for each seed; an answer in a later prompt is made up."""
        source = np.random.default_rng([seed, *self])
        heads = source.integers(0, VOCABULARY, (self.num_prefixes, self.shared)).tolist()
        turn = self.question + self.new
        said = source.integers(0, VOCABULARY, (self.num_chats, self.num_turns * turn)).tolist()
        return [
            ServeRequest(
                heads[i % self.num_prefixes] + said[i][: number * turn + self.question],
                str(i),
                float(number),
            )
            for number in range(self.num_turns)
            for i in range(self.num_chats)
        ]


AnyLoad: TypeAlias = ServeLoad | TrafficLoad | ChatLoad

LOADS: dict[str, dict[str, AnyLoad]] = {
    "quire-tiny": {
        "shared_32": ServeLoad(64, 2, 2048, 96, 32),
        "shared_128": ServeLoad(64, 2, 2048, 96, 128),
        "long_6k": ServeLoad(32, 1, 6000, 96, 128),
        "unshared_32": ServeLoad(32, 1, 0, 512, 32),
        "unshared_128": ServeLoad(64, 1, 0, 512, 128),
        "chat": TrafficLoad(
            Chat(
                systems=2,
                system=Lognormal(1000, 0.3),
                question=Lognormal(80, 0.5),
                answer=Lognormal(120, 0.5),
                think_s=Lognormal(2, 0.5),
            ),
            64,
            64,
        ),
        "agent": TrafficLoad(
            Agent(
                steps=8.0,
                agents=2,
                tools=Lognormal(2000, 0.2),
                task=Lognormal(150, 0.5),
                call=Lognormal(40, 0.5),
                result=Lognormal(200, 0.7),
                tool_s=Lognormal(1, 0.5),
            ),
            64,
            32,
        ),
        "rag": TrafficLoad(
            Rag(documents=20, document=Lognormal(500, 0.4), question=Lognormal(40, 0.5)), 64, 32
        ),
    },
    "llama-76m": {
        "shared_76m": ServeLoad(16, 2, 1024, 64, 32),
        "long_76m": ServeLoad(32, 1, 6000, 96, 128),
    },
}
"""By model: quire-tiny (3.8 M parameters), and a Llama of 76 M with random weights."""


MODEL_LOADS: dict[str, AnyLoad] = {
    "alone_1500": OneByOne(1, 1, 0, 1500, 48),
    "alone_3k": OneByOne(2, 1, 3000, 48, 48),
    "chat_12x4": ChatLoad(12, 4, 2, 1000, 80, 64),
    "unshared_24": ServeLoad(24, 1, 0, 512, 64),
    "shared_48": ServeLoad(48, 2, 1024, 96, 64),
}
"""Of a model of one's own. `alone_3k` is behind a prefix that a request before it has left in the cache."""


def scaled(times: Sequence[float]) -> list[float]:
    """Return times from 0 on, stretched to one per second on average."""
    first, last = times[0], times[-1]
    factor = len(times) / (last - first) if last > first else 0.0
    return [(time_s - first) * factor for time_s in times]


def waves(requests: Sequence[ServeRequest]) -> list[list[list[int]]]:
    """Return the prompts turn by turn: the first of all sessions, the second ones, and so on.

    Prompts of one turn can be sent at once.
    """
    turns: dict[str, int] = {}
    found: list[list[list[int]]] = []
    for request in requests:
        turn = turns[request.session] = turns.get(request.session, -1) + 1
        found += [[]] * (turn == len(found))
        found[turn] = [*found[turn], request.prompt]
    return found
