"""Methods of passage reuse, by row name: the placed capture, its rotation, the recomputed rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from quire_passages import (
    AllRows,
    CacheCraft,
    Epic,
    KVDeviation,
    NoRows,
    QuestionRows,
    RandomRows,
    Selector,
)
from quire_passages.bench.published import PublishedCacheCraft

Captured = Literal["alone", "related", "earlier", "earlier by mean"]
"""Where K and V of a passage are from: computed alone behind the head, or among others in an earlier prompt.

"related": behind those three of the pool that are most like it.
"by mean": attention is counted there as Cache-Craft was published."""


class Method(NamedTuple):
    """A way to reuse passages.

    `captured`    which captures it chooses from
    `reposition`  whether keys are rotated to where the passage stands
    """

    selector: Selector
    captured: Captured = "alone"
    reposition: bool = True


FULL = "full"
"""The name of the row that computes everything in one plain forward."""

EPIC_TOKENS = (2, 4, 8, 16)
RANDOM = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
DEVIATION = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
CHECKS = (1, 2, 3)
QUESTION = (0.15, 0.33)
ALPHAS = (0.25, 0.5, 1.0, 2.0)

METHODS: Mapping[str, Method] = {
    "naive": Method(NoRows(), reposition=False),
    "moved": Method(NoRows()),
    **{f"epic_{k}": Method(Epic(k)) for k in EPIC_TOKENS},
    **{f"random_{share:.0%}": Method(RandomRows(share)) for share in RANDOM},
    **{f"kv_deviation_{share:.0%}": Method(KVDeviation(share)) for share in DEVIATION},
    **{f"kv_deviation_15%_at_{at}": Method(KVDeviation(0.15, at)) for at in CHECKS},
    **{f"question_{share:.0%}": Method(QuestionRows(share)) for share in QUESTION},
    "earlier": Method(NoRows(), "earlier"),
    **{
        f"earlier_question_{share:.0%}": Method(QuestionRows(share), "earlier")
        for share in QUESTION
    },
    **{
        f"cache_craft_published_{alpha:g}": Method(PublishedCacheCraft(alpha), "earlier by mean")
        for alpha in ALPHAS
    },
    **{f"cache_craft_{alpha:g}": Method(CacheCraft(alpha), "earlier") for alpha in ALPHAS},
    "all": Method(AllRows()),
}
"""By the name of its row, in the order of the table.

naive                  keys as they were captured: what forgetting to rotate gives
moved                  rotated, nothing computed again: PromptCache, https://arxiv.org/abs/2311.04934, without its schema
epic_K                 the first K tokens of each passage: EPIC, https://arxiv.org/abs/2410.15332
random_SHARE           as many rows by chance
kv_deviation_SHARE     rows whose K and V are off most at a check layer: CacheBlend, https://arxiv.org/abs/2405.16444;
                       the layer that the gate picked, or `_at_` another one
question_SHARE         rows that the question attends to most; `earlier_`, over captures among others
earlier                captured among others, rotated, nothing computed again
cache_craft_published  Cache-Craft as its paper says, https://arxiv.org/abs/2502.15734, by its alpha
cache_craft            the same with quire's corrections
all                    every row of every passage again: equal to `full`, at its price
"""

QUICK = ("naive", "moved", "epic_8", "random_15%", "kv_deviation_15%", "cache_craft_0.5")


def family(name: str) -> str:
    """Return the name of a method without its budget: `epic_8` is of `epic`."""
    head, _, last = name.rpartition("_")
    return head if head and (last[0].isdigit()) else name
