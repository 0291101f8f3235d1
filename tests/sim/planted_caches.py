"""Logs in which a cache loses tokens: by time, place, room or breakpoints, with the truth of each loss.

A scene takes requests over one beginning and has them sent so that a cache does not find it. `shared` is what an
earlier prompt begins with, in characters.
"""

import json
from typing import NamedTuple

import planted

from quire_sim.caches import CacheOptions

EPHEMERAL = {"type": "ephemeral"}
SERVERS = {
    "evicted": "sglang",
    "ttl": "openai",
    "minimum": "openai",
    "at-once": "openai",
    "other-replica": "vllm",
    "no-breakpoint": "anthropic",
    "behind-breakpoint": "anthropic",
    "look-back": "anthropic",
    "parameters": "anthropic",
}
"""Causes of caches, each with a server that has it."""

OF_ALL = ("evicted", "ttl", "at-once", "other-replica", "no-breakpoint")
"""Causes that stand before a difference of words, whatever it is."""


class Scene(NamedTuple):
    """Records for a server, and what each plant loses in characters: its cause and the sum, the first one's with all."""

    records: list
    server: str
    options: CacheOptions
    plants: list


def text_of(body):
    """Return a body's prompt as caches read it."""
    tools = [json.dumps(each, separators=(",", ":")) for each in body.get("tools", [])]
    system = body.get("system") or body.get("instructions") or ""
    said = body.get("messages") or body.get("input") or body.get("prompt")
    told = [each["content"] for each in said] if isinstance(said, list) else [said]
    parts = [*tools, system, *told]
    return "".join("".join(t["text"] for t in each) if isinstance(each, list) else each for each in parts)  # fmt: skip


def shared_of(bodies):
    """Yield what each prompt begins with that an earlier one has."""
    texts = [text_of(each) for each in bodies]
    for number, text in enumerate(texts):
        yield max((planted._same_begin(text, each) for each in texts[:number]), default=0)


def bodies_of(log):
    return [each.get("request", each) for each in log.records]


def large(api, seed, kinds=(), count=12):
    """Return requests over a beginning of some 3,000 tokens with lines that change, and what each line loses."""
    log = planted.of_lines(list(kinds), api, seed, count, longer=9)
    return bodies_of(log), [(kind, lost) for kind, _, lost in log.plants]


def scene(cause, seed, kinds=(), *, has=True):
    """Return requests with changing lines, sent so that a cache loses for a cause; without it unless it `has`."""
    server = SERVERS[cause]
    api = {"anthropic": "messages", "openai": ("chat", "responses")[seed % 2]}.get(server, "chat")
    if cause == "minimum":
        bodies, lines = small(api, seed, has=has), []
    else:
        bodies, lines = large(api, seed, kinds)
    bodies, sent, options = SENT[cause](bodies, seed, has)
    if server == "openai":
        bodies = [each | {"model": "gpt-5"} for each in bodies]
    is_other = [each.get("metadata") == "other" for each in bodies]
    own = [each for each, other in zip(bodies, is_other, strict=True) if not other]
    if cause == "parameters":  # those before the messages are found
        own = [each | {"tools": [], "system": ""} for each in own]
    shared = sum(shared_of(own))
    of_lines = lines[0][1] if lines else 0
    plants = [(cause, shared + of_lines)] * has + lines
    records = [fields | {"request": body} for fields, body in zip(sent, bodies, strict=True)]
    return Scene(records, server, options, plants)


def _every(seconds, count, **more):
    return [{"time": 1_780_000_000 + n * seconds, "duration_s": 1.0, **more} for n in range(count)]


def _apart(bodies, seed, has):
    """Twenty minutes between requests, or one."""
    return bodies, _every(1200 if has else 60, len(bodies)), CacheOptions()


def _at_once(bodies, seed, has):
    return bodies, _every(0.01 if has else 5, len(bodies)), CacheOptions()


def _replicas(bodies, seed, has):
    """Each request at another replica, or all at one; by the names of different logs."""
    name = ("server", "deployment", "model_id", "api_base")[seed % 4]
    sent = _every(5, len(bodies))
    for number, each in enumerate(sent):
        each[name] = f"http://host-{number if has else 0}:8000"
    return bodies, sent, CacheOptions()


def _evicting(bodies, seed, has):
    """A prompt of others after each request, in a cache with room for one prompt, or for all."""
    most = max(len(text_of(each)) for each in bodies)
    both = []
    for number, each in enumerate(bodies):
        making = planted.Making("completions", 1000 * seed + number + 500, False)
        text = " ".join(planted.paragraph(making.rng, 4) for _ in range(400))
        both += [each, {"model": "m", "prompt": text[:most], "metadata": "other"}]
    room = round(most / 4 * (1.15 if has else 50))
    return both, _every(5, len(both)), CacheOptions(capacity_tokens=room)


def small(api, seed, *, has):
    """Requests over a beginning below the minimum, or above it."""
    making = planted.Making(api, seed, False)
    text = planted.paragraph(making.rng, 120)
    making.tools, making.system = [], [text[: 3500 if has else None]]
    for _ in range(12):
        making.single()
    return bodies_of(making.log())


def _plain(bodies, seed, has):
    return bodies, _every(5, len(bodies)), CacheOptions()


def _without_points(bodies, seed, has):
    if not has:
        bodies = [_marked_system(each) for each in bodies]
    return _plain(bodies, seed, has)


def _marked_system(body):
    return body | {"system": [each | {"cache_control": EPHEMERAL} for each in body["system"]]}


def _behind(bodies, seed, has):
    """A breakpoint behind the question, and none before; or one behind the system prompt as well."""
    marked = []
    for body in bodies:
        (said,) = body["messages"]
        text = {"type": "text", "text": said["content"], "cache_control": EPHEMERAL}
        found = body | {"messages": [{"role": "user", "content": [text]}]}
        marked.append(found if has else _marked_system(found))
    return _plain(marked, seed, has)


def _growing(bodies, seed, has):
    """A conversation that grows by 30 messages a turn, or by six, with a breakpoint behind its last one."""
    rng = planted.random.Random(seed)
    said, grown = [], []
    for body in bodies[:6]:
        for _ in range(15 if has else 3):
            said += [planted.paragraph(rng, 16), planted.paragraph(rng, 16)]
        said.append(planted.sentence(rng))
        roles = ("user", "assistant")
        messages = [
            {"role": roles[n % 2], "content": [{"type": "text", "text": text}]}
            for n, text in enumerate(said)
        ]
        messages[-1]["content"][0]["cache_control"] = EPHEMERAL
        grown.append(body | {"messages": messages, "system": bodies[0]["system"]})
        said.append(planted.sentence(rng))
    return _plain(grown, seed, has)


def _choices(bodies, seed, has):
    """Tools, system and a long first message that are marked, and a choice of a tool that changes."""
    long = planted.paragraph(planted.random.Random(seed), 90)
    marked = []
    for number, body in enumerate(bodies):
        first = {"type": "text", "text": long, "cache_control": EPHEMERAL}
        said = [{"role": "user", "content": [first, {"type": "text", "text": f"Why {number}?"}]}]
        choice = {"type": "tool", "name": f"t{number if has else 0}"}
        marked.append(_marked_system(body) | {"messages": said, "tool_choice": choice})
    return _plain(marked, seed, has)


SENT = {
    "evicted": _evicting,
    "ttl": _apart,
    "minimum": _plain,
    "at-once": _at_once,
    "other-replica": _replicas,
    "no-breakpoint": _without_points,
    "behind-breakpoint": _behind,
    "look-back": _growing,
    "parameters": _choices,
}
