"""What the machine of layer groups draws: groups, prompts, options, drafts."""

from hypothesis import strategies as st

from quire.core import (
    ChunkedAttention,
    FullAttention,
    Hint,
    Recurrent,
    Scope,
    SlidingWindow,
)

SCOPES = (None, Scope(salt="x"))
MAX_TOKENS = 36

index = st.integers(0, 7)
symbol = st.integers(0, 1)
runs = st.lists(st.tuples(symbol, st.integers(1, 12)), max_size=3)
filler = st.lists(symbol, min_size=1, max_size=3)
small = st.integers(0, 12)
some = st.integers(1, 12)
span = st.integers(1, 9)

full = st.just(FullAttention())
sliding = st.builds(SlidingWindow, span, interval=st.none() | span)
sinks = st.builds(
    lambda window, sinks, interval: SlidingWindow(window, min(window, sinks), interval),
    span, st.integers(1, 4), st.none() | span,
)  # fmt: skip
chunked = st.builds(ChunkedAttention, span)
recurrent = st.builds(Recurrent, st.none() | span)
MIXES = [
    (full, sliding),
    (full, chunked),
    (full, recurrent),
    (sliding,),
    (full, sinks),
    (sliding, sliding),
    (full, sliding, recurrent),
    (recurrent,),
    (chunked, sinks),
    (recurrent, chunked, full),
]


@st.composite
def layer_groups(draw):
    """Groups of different kinds with pools so small that evictions happen all the time."""
    groups = []
    for kinds in draw(st.sampled_from(MIXES)):
        kind = draw(kinds)
        sizes = {Recurrent: (2, 7), FullAttention: (10, 36)}.get(type(kind), (6, 20))
        groups.append((kind, draw(st.integers(*sizes))))
    return tuple(groups)


@st.composite
def prompts(draw):
    """A recipe: which earlier prompt, how much of it, what follows, and the scope."""
    earlier = draw(st.sampled_from([None, *range(8)]))
    return earlier, draw(st.integers(0, 40)), draw(runs), draw(st.sampled_from([0, 0, 0, 1]))


@st.composite
def open_options(draw):
    """How a request is kept, and how much of it."""
    options = {}
    if draw(st.integers(0, 3)) == 0:
        options = {"priority": draw(st.integers(-1, 2)), "retain_s": draw(st.none() | some)}
    if draw(st.integers(0, 3)) == 0:
        options["store_until"] = draw(st.integers(0, 40))
    if draw(st.integers(0, 3)) == 0:
        reuse = draw(st.sampled_from(["unknown", "never", "session"]))
        name = draw(st.sampled_from(["one", "two"]))
        options["hint"] = Hint(reuse, ttl_s=draw(st.none() | some), session_id=name)
    return options


parents = st.lists(st.integers(0, 20), min_size=1, max_size=6).map(
    lambda draws: [draw % (i + 1) - 1 for i, draw in enumerate(draws)]
)
trees = parents | st.integers(1, 5).map(lambda k: list(range(-1, k - 1)))
