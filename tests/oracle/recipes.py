"""Recipes: the managers that are driven, and how, each drawn from a seed and a number."""

from random import Random

FEATURES = (
    "media", "scopes", "priority", "retain", "store_until", "hints", "lost", "explain", "observer",
    "pins", "drafts", "forks", "suspend", "truncate", "steps", "checkpoint", "compact", "resize",
    "restore", "hold", "kept", "fits", "usage", "drawn", "bad", "reset", "evict", "long", "order", "messages",
    "events", "evictions", "curve", "debug", "clock", "sub_block", "what_if", "crowd",
)  # fmt: skip
"""What a world may use. `lost`: the reasons of misses are compared; `messages`: those of errors; `order`: that of
sparse groups; `long`: prompts of hundreds of blocks; `crowd`: dozens of sequences."""

CHANGED = ("hints",)
"""Left out, since it changed on purpose: an owner says when nobody comes back, by session, not each node by itself."""

SOMETIMES = {
    "observer": 0.3, "events": 0.5, "evictions": 0.5, "curve": 0.5, "debug": 0.3, "clock": 0.6,
    "sub_block": 0.7, "media": 0.5, "hints": 0.6, "reset": 0.4, "long": 0.08, "crowd": 0.05,
    "priority": 0.5, "retain": 0.6, "store_until": 0.6, "pins": 0.8, "resize": 0.6, "compact": 0.6,
}  # fmt: skip

POLICIES = ("lru",)
"""The others differ on purpose: `fifo` and `lfu` in what a run that grew counts as and which runs are joined,
`learned` in how it knows turns again."""

MIXES = (
    ("full",), ("full",), ("full",), ("full", "sliding"), ("full", "sinks"), ("full", "chunked"),
    ("full", "recurrent"), ("sliding",), ("sinks",), ("chunked",), ("recurrent",),
    ("full", "sliding", "recurrent"), ("sliding", "sliding"), ("recurrent", "chunked", "full"),
    ("sinks", "full", "full"), ("full", "full"),
)  # fmt: skip


def recipe_of(seed, number, without=()):
    """Return a world's recipe, as plain data; features named in `without` are left out of it."""
    random = Random(f"{seed}/{number}")
    without = (*without, *CHANGED)
    features = [
        name
        for name in FEATURES
        if random.random() < SOMETIMES.get(name, 0.9) and name not in without
    ]
    features += [n for n in ("lost", "messages", "order") if n not in {*features, *without}]
    block_size = random.choice((1, 2, 3, 4, 4, 5, 6, 7, 8, 16))
    long = "long" in features
    room = random.choice((120, 300)) if long else random.choice((8, 14, 24, 40))
    if "crowd" in features:
        room = 150
    policy = random.choice([policy for policy in POLICIES if policy not in without])
    return {
        "seed": seed,
        "number": number,
        "features": features,
        "block_size": block_size,
        "groups": _groups(random, block_size, room),
        "policy": policy,
        "pin_budget": random.choice((0.0, 0.25, 0.5, 1.0)),
        "rows": random.choice(((1, 4), (2, 32), (64, 1 << 16))),
        "tight": random.random() < 0.4,
        "max_open": 90 if "crowd" in features else random.choice((2, 4, 8, 12)),
        "max_tokens": (4 if "crowd" in features else random.choice((room // 2, room // 2, room)))
        * block_size,
        "symbols": random.choice((1, 2, 3, 50)),
        "steps": random.choice((150, 300, 500)),
        "rare": [name for name in sorted(RARE) if random.random() < 0.3],
    }


RARE = ("fork", "pin", "suspend", "truncate", "draft", "restore", "evict", "bad", "open", "step")
"""Calls that a world makes seldom, where its recipe names them: so that others follow each other."""


def _groups(random, block_size, room):
    groups = []
    for name in random.choice(MIXES):
        span = random.randint(1, 3 * block_size + 4)
        interval = random.choice((None, random.randint(1, 4 * block_size)))
        fewer = random.randint(max(room // 3, 4), room)
        kind, num_blocks = {
            "full": (("FullAttention",), random.randint(max(room // 2, 4), room)),
            "sliding": (("SlidingWindow", span, 0, interval), fewer),
            "sinks": (("SlidingWindow", span, random.randint(1, span), interval), fewer),
            "chunked": (("ChunkedAttention", span), fewer),
            "recurrent": (("Recurrent", interval), random.randint(2, max(room // 3, 4))),
        }[name]
        groups.append((f"{name}{len(groups)}", kind, num_blocks))
    return groups
