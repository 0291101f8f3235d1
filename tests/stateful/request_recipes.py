"""Strategies of the machine of requests: groups, prompts with pictures, options, drafts."""

from hypothesis import strategies as st

from quire.core import FullAttention, Hint, MediaItem, Scope
from quire.groups import ChunkedAttention, Recurrent, SlidingWindow

SCOPES = (None, Scope(salt="x"), Scope(salt="y"), Scope(salt="x", tenant="y"))
PICTURES = ((b"a" * 32, 2), (b"b" * 32, 4))
"""Each picture always has the same length, and placeholders 0: what the digest names is the whole picture."""

SESSIONS = ("one", "two", "three")

index = st.integers(0, 7)
symbol = st.integers(0, 2)
runs = st.lists(st.tuples(symbol, st.integers(1, 16)), max_size=3)
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
    (full,),
    (full,),
    (full,),
    (full, full),
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
        sizes = {Recurrent: (2, 7), FullAttention: (4, 40)}.get(type(kind), (6, 20))
        groups.append((kind, draw(st.integers(*sizes))))
    return tuple(groups)


@st.composite
def prompts(draw):
    """A recipe: which earlier prompt, how much of it, what follows, which picture where, and the scope."""
    earlier = draw(st.sampled_from([None, *range(8)]))
    picture = draw(st.sampled_from([0, 0, 0, 0, 1, 2]))
    scope = draw(st.sampled_from([0, 0, 0, 0, 1, 2]))
    return earlier, draw(st.integers(0, 60)), draw(runs), picture, draw(small), scope


def build(recipe, earlier_prompts, longest):
    """Return tokens, scope and media of a recipe."""
    earlier, cut, tail, picture, place, number = recipe
    tokens, scope, media = [], None, ()
    if earlier is not None and earlier_prompts:
        tokens, scope, media = earlier_prompts[::-1][earlier % len(earlier_prompts)]
        tokens = tokens[:cut]  # which may be fewer: of a prompt that is computed in part
    kept = len(tokens)
    scope = SCOPES[number] if number else scope
    tokens = (tokens + [s for s, length in tail for _ in range(length)])[:longest] or [0]
    media = tuple(item for item in media if item.start + item.length <= min(kept, len(tokens)))
    if picture:
        digest, length = PICTURES[picture - 1]
        begin = max((item.start + item.length for item in media), default=0) + place
        if begin + length <= len(tokens):
            tokens = [*tokens[:begin], *[0] * length, *tokens[begin + length :]]
            media += (MediaItem(digest, begin, length),)
    return tokens, scope, media


@st.composite
def open_options(draw):
    """Priority, retention, hint, and from where on nothing is stored."""
    options = {}
    if draw(st.integers(0, 3)) == 0:
        options = {"priority": draw(st.integers(-1, 2)), "retain_s": draw(st.none() | some)}
    if draw(st.integers(0, 5)) == 0:
        options["store_until"] = draw(st.integers(0, 30))
    if draw(st.integers(0, 2)) == 0:
        name = draw(st.sampled_from([None, *SESSIONS]))
        reuse = draw(st.sampled_from(["unknown", "never", *["session"] * bool(name)]))
        ttl_s, returns_in_s = draw(st.none() | some), draw(st.none() | some)
        options["hint"] = Hint(reuse, ttl_s, name, returns_in_s, draw(st.sampled_from([1, 2.0, 9])))
    return options
