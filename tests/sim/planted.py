"""Logs with planted causes of every kind over all forms of bodies, with the truth of each loss.

A draft is a request without a form: tools, paragraphs of a system prompt, messages. A plant changes drafts at a place
of its own. `truth` is the text behind a plant that earlier requests have.
"""

import base64
import copy
import itertools
import json
import random
import unicodedata
import uuid
import zlib
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import NamedTuple

WORDS = [
    "shelf",
    "order",
    "parcel",
    "window",
    "branch",
    "clerk",
    "garden",
    "river",
    "copper",
    "lantern",
    "harbour",
    "meadow",
    "ticket",
    "paper",
    "bottle",
    "engine",
    "corner",
    "letter",
    "market",
    "needle",
    "orchard",
    "pocket",
    "quarry",
    "ribbon",
    "saddle",
    "timber",
    "valley",
    "wagon",
    "yellow",
    "anchor",
    "basket",
    "candle",
    "denim",
    "ember",
    "feather",
    "granite",
    "hollow",
    "island",
    "jacket",
    "kettle",
    "ladder",
    "marble",
    "nickel",
    "oyster",
    "pepper",
    "quill",
    "rocket",
    "silver",
    "tunnel",
    "umbrella",
    "velvet",
    "walnut",
    "yarn",
    "zipper",
    "answers",
    "counts",
    "opens",
    "closes",
    "moves",
    "keeps",
    "sends",
    "finds",
    "names",
    "writes",
    "reads",
]
NAMES = [
    "Ann",
    "Bob",
    "Cleo",
    "Dan",
    "Eve",
    "Finn",
    "Gus",
    "Hana",
    "Ivo",
    "Jill",
    "Kai",
    "Lea",
    "Max",
    "Nora",
    "Olaf",
    "Pia",
    "Quinn",
    "Rosa",
    "Sam",
    "Tess",
]
FAMILIES = [
    "Smith",
    "Stone",
    "Marsh",
    "Wood",
    "Hill",
    "Lake",
    "Field",
    "Brook",
    "Ford",
    "Moor",
    "Dale",
    "Heath",
    "Reed",
    "Vale",
    "Cliff",
    "Grove",
]
CITIES = [
    "Berlin",
    "Lyon",
    "Porto",
    "Ghent",
    "Turin",
    "Malmo",
    "Gdansk",
    "Cork",
    "Graz",
    "Split",
    "Basel",
    "Leeds",
    "Oslo",
    "Nantes",
    "Bergen",
]
APIS = ("chat", "responses", "messages", "completions")


def sentence(rng, low=6, high=14):
    said = " ".join(rng.choices(WORDS, k=rng.randint(low, high)))
    return said[0].upper() + said[1:] + "."


def paragraph(rng, sentences=4):
    return " ".join(sentence(rng) for _ in range(sentences))


def tool(rng, name):
    fields = {
        word: {"type": "string", "description": sentence(rng)} for word in rng.sample(WORDS, 4)
    }
    schema = {"type": "object", "properties": fields, "required": list(fields)[:3]}
    return {"name": name, "description": paragraph(rng, 2), "parameters": schema}


class Draft:
    def __init__(self, tools, system, said, **fields):
        self.tools, self.system, self.said, self.fields = tools, system, said, fields


class Log(NamedTuple):
    """A log, and of each plant: its name, the begin of its path, and the characters that it loses in all.

    `slack` is what changed lines may have in common beside them: a part of a line whose form alone differs.
    """

    records: list
    plants: list
    slack: int = 0


def when(n, rng):
    return datetime(2026, 1, 1, 6, tzinfo=UTC) + timedelta(
        seconds=n * 4973 + rng.randrange(60), milliseconds=n
    )


TIMES = (
    lambda t: f"Current time: {t.isoformat()}",
    lambda t: t.strftime("Now: %Y-%m-%dT%H:%M:%SZ"),
    lambda t: f"Date: {format_datetime(t)}",
    lambda t: t.strftime("Today is %A, %B %d, %Y, %I:%M %p."),
    lambda t: t.strftime("Stand: %d.%m.%Y, %H:%M Uhr"),
    lambda t: t.strftime("As of %m/%d/%Y %H:%M:%S the shop is open."),
    lambda t: f"timestamp={int(t.timestamp())}",
    lambda t: f'{{"now_ms": {int(t.timestamp() * 1000)}}}',
    lambda t: f"The clock says {t.timestamp():.3f}.",
    lambda t: t.strftime("Generated at %Y%m%dT%H%M%SZ by the gateway."),
    lambda t: t.strftime("It is %d %b %Y %H:%M:%S GMT"),
    lambda t: t.strftime("[%H:%M:%S] session resumed"),
    lambda t: t.strftime("<current_date>%Y/%m/%d %H:%M</current_date>"),
)
ULID = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
NANO = "useandom-26T198340PX75pxJACKVERYMINDBUSHWOLF_GQZbfghjklqvwyzrict"
IDS = (
    lambda r: f"Request {uuid.UUID(int=r.getrandbits(128))}",
    lambda r: f"trace: req_{r.getrandbits(60):015x}",
    lambda r: f"session-{r.getrandbits(48):012x}",
    lambda r: f"Run id: {''.join(r.choices(ULID, k=26))}",
    lambda r: f"Correlation ID: {''.join(r.choices(NANO, k=21))}",
    lambda r: f"<trace id='{r.getrandbits(128):032x}'/>",
    lambda r: f"build {r.getrandbits(160):040x} of the template",
    lambda r: f"Conversation: conv_{''.join(r.choices(NANO[:30], k=12))}",
    lambda r: f"traceparent 00-{r.getrandbits(128):032x}-{r.getrandbits(64):016x}-01",
    lambda r: f"nonce={r.getrandbits(40):010x};",
)
COUNTERS = (
    lambda n: f"This is message number {n + 1}.",
    lambda n: f"Turn {n + 3} of this chat",
    lambda n: f"attempt #{n + 1}",
    lambda n: f"Messages so far: {n * 2}",
    lambda n: f"Budget left: {90000 - 37 * n:,} units",
    lambda n: f"progress {n / 7:.2f}% done",
)
USERS = (
    lambda r: f"User name: {r.choice(NAMES)} {r.choice(FAMILIES)} {r.choice(FAMILIES)}",
    lambda r: f"You are helping {r.choice(NAMES)} {r.choice(FAMILIES)}.",
    lambda r: (
        f"user: {r.choice(NAMES).lower()}.{r.choice(FAMILIES).lower()}{r.randrange(999)}@example.com"
    ),
    lambda r: f"Customer: {r.choice(NAMES)} {r.choice(FAMILIES)}, plan gold",
    lambda r: f"The user lives in {r.choice(CITIES)}, {r.choice(CITIES)} county.",
    lambda r: f"Location: {r.uniform(40, 60):.4f}, {r.uniform(5, 20):.4f}",
    lambda r: f'{{"account_name": "{r.choice(NAMES)} {r.choice(FAMILIES)}"}}',
    lambda r: f"Phone: +49 {r.randrange(100, 999)} {r.randrange(10**6, 10**7)}",
    lambda r: (
        f"Contact {r.choice(NAMES).lower()}{r.randrange(99)}@mail{r.randrange(99)}.org for questions."
    ),
)
HEADERS = (
    lambda r: (
        f"x-anthropic-billing-header: cc_version=2.1.{r.randrange(9)}; cc_entrypoint=cli; cch={r.getrandbits(20):05x};"
    ),
)


def line_plant(makers, number):
    def line(n, rng):
        maker = makers[number % len(makers)]
        if makers is TIMES:
            return maker(when(n, rng))
        return maker(n if makers is COUNTERS else rng)

    return line


LINES = {"time": TIMES, "identifier": IDS, "counter": COUNTERS, "user-data": USERS, "header-line": HEADERS}  # fmt: skip


def variant(kind, rng):
    """Return a function that gives a text in another form for each number below 64, for causes of form alone."""
    words = rng.sample(WORDS, 7)
    if kind == "whitespace":
        plain, other = rng.choice(((" ", "  "), (" ", "\t"), (" ", "\u00a0"), ("\n", " \n"), ("\n\n", "\n\n\n"), (" ", "\u200b ")))  # fmt: skip
    elif kind == "line-ends":
        plain, other = "\n", "\r\n"
    else:
        letters = rng.sample("éüñôçåïàö", 6)
        return lambda n: (
            "".join(
                f"{word}{unicodedata.normalize('NFD', letter) if n >> at & 1 else letter} "
                for at, (word, letter) in enumerate(zip(words, letters, strict=False))
            )
            + words[-1]
        )
    return lambda n: (
        "".join(word + (other if n >> at & 1 else plain) for at, word in enumerate(words[:-1]))
        + words[-1]
    )


def rendered(api, draft):
    """Return a draft as a body."""
    system = "\n".join(draft.system)
    if api == "completions":
        said = "".join(f"\n\n{role}: {text}" for role, text in draft.said)
        return {"model": "m", "prompt": system + said, **draft.fields}
    if api == "responses":
        tools = [{"type": "function", **each} for each in draft.tools]
        items = [{"role": role, "content": content} for role, content in draft.said]
        found = {"model": "m", "instructions": system, "input": items, **draft.fields}
    elif api == "messages":
        tools = [
            {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
            for each in draft.tools
        ]  # fmt: skip
        said = [{"role": role, "content": content} for role, content in draft.said]
        found = {
            "model": "claude-opus-5", "max_tokens": 9, "system": [{"type": "text", "text": system}], "messages": said,
            **draft.fields,
        }  # fmt: skip
    else:
        tools = [{"type": "function", "function": each} for each in draft.tools]
        said = [
            {"role": role, "content": content}
            for role, content in [("system", system), *draft.said]
        ]
        found = {"model": "m", "messages": said, **draft.fields}  # fmt: skip
    return {**found, "tools": tools} if tools else found


def place_of(api, level, number=0):
    if level == "tools":
        return "tools["
    if level == "message":
        return {"chat": f"messages[{number + 1}]", "responses": f"input[{number}]"}.get(api, f"messages[{number}]")  # fmt: skip
    return {"chat": "messages[0].content", "responses": "instructions", "messages": "system[0]", "completions": "prompt"}[api]  # fmt: skip


class Making:
    """One log in the making: its stable text, and drafts of single requests over it."""

    def __init__(self, api, seed, with_times):
        self.rng = rng = random.Random(seed)
        self.api, self.with_times = api, with_times
        self.system = [paragraph(rng, rng.randint(5, 9)) for _ in range(rng.randint(6, 9))]
        self.tools = [] if api == "completions" else [
            tool(rng, f"{word}_{n}") for n, word in enumerate(rng.sample(WORDS, rng.choice((3, 5, 8))))
        ]  # fmt: skip
        self.drafts = []

    def question(self):
        return ("user", sentence(self.rng, 8, 20))

    def single(self, system=None, tools=None, **fields):
        tools = copy.deepcopy(self.tools if tools is None else tools)
        draft = Draft(
            tools, list(self.system if system is None else system), [self.question()], **fields
        )
        self.drafts.append(draft)
        return draft

    def behind(self, place):
        """Return the characters of the system prompt from a paragraph on, with the line end before it."""
        mark = len("\n\nuser: ") if self.api == "completions" else 0
        return len("\n".join(self.system[place:])) + 1 + mark

    def log(self, *plants):
        records = []
        for n, draft in enumerate(self.drafts):
            body = rendered(self.api, draft)
            tenant = f"key-{n % 3}"
            moment = 1_780_000_000 + n * 7.5
            records.append({"time": moment, "tenant": tenant, "request": body} if self.with_times else body)  # fmt: skip
        return Log(records, list(plants))


def of_lines(kinds, api, seed, count=24, longer=0):
    """Return a log with a changing line for each kind, at places in order, each value but once.

    The system prompt has so many more paragraphs before them.
    """
    making = Making(api, seed, seed % 2)
    rng = making.rng
    making.system = [paragraph(rng, 9) for _ in range(longer)] + making.system
    places = sorted(rng.sample(range(longer, len(making.system) - 1), len(kinds)))
    if kinds[:1] == ["header-line"]:
        places[0] = 0
    makers = [
        line_plant(LINES[kind], seed + n * 3) if kind in LINES else _formed(variant(kind, rng))
        for n, kind in enumerate(kinds)
    ]
    seen, rows = [set() for _ in kinds], []
    for n in range(count):
        system, lines = list(making.system), []
        for place, maker, kind, values in reversed(
            [*zip(places, makers, kinds, seen, strict=True)]
        ):
            line = maker(n, rng)
            while kind in LINES and line in values:
                line = maker(n, rng)
            values.add(line)
            system.insert(place, line)
            lines.insert(0, line)
        rows.append(lines)
        making.single(system)
    lost = [_lost(making, rows, places, place) for place in range(len(kinds))]
    where = place_of(api, "system")
    log = making.log(*((kind, where, chars) for kind, chars in zip(kinds, lost, strict=True)))
    forms = [n for n, kind in enumerate(kinds) if kind not in LINES]
    return log._replace(slack=sum(len(row[n]) for row in rows for n in forms))


def _formed(form):
    return lambda n, _: form(n)


def _same_begin(one, other):
    pairs = zip(one, other, strict=False)
    return next((n for n, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(one), len(other)))  # fmt: skip


def _lost(making, rows, places, number):
    """Return what a plant loses once those before it are mended: by the values from it on, new or seen."""
    total = 0
    for n, row in enumerate(rows):
        later = [each[number:] for each in rows[:n]]
        if later and not any(each[0] == row[number] for each in later):
            total += making.behind(places[number]) + max(
                _equal(each, row[number:]) for each in later
            )
    return total


def _equal(earlier, row):
    """Return the characters behind the first difference of two rows that stand in both: the first line's end alone."""
    lines = zip(earlier[1:], row[1:], strict=True)
    return _same_end(earlier[0], row[0]) + sum(
        _same_begin(*pair) + _same_end(*pair) + 1 for pair in lines
    )


def _same_end(one, other):
    pairs = zip(one[::-1], other[::-1], strict=False)
    return next((n for n, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(one), len(other)))  # fmt: skip


def of_tools(kind, api, seed, count=24):
    """Return a log whose tools change: their order, their set, or the order of their keys."""
    making = Making(api, seed, seed % 2)
    rng, tools = making.rng, making.tools
    rest = len("\n".join(making.system))
    lost, seen = 0, []
    for _ in range(count):
        sent = copy.deepcopy(tools)
        if kind == "tool-order":
            rng.shuffle(sent)
        elif kind == "tool-set":
            sent = [each for each in sent if rng.random() < 0.8] or sent[:1]
        elif kind == "key-order":
            at = rng.randrange(len(sent))
            fields = list(sent[at]["parameters"]["properties"].items())
            rng.shuffle(fields)
            sent[at]["parameters"]["properties"] = dict(fields)
        else:
            at = rng.randrange(len(sent))
            rng.shuffle(sent[at]["parameters"]["required"])
        body = rendered(api, Draft(sent, [], []))
        texts = [json.dumps(each, separators=(",", ":"), ensure_ascii=False) for each in body.get("tools", [])]  # fmt: skip
        lost += _lost_tools(texts, seen, rest, kind)
        seen.append(texts)
        making.single(tools=sent)
    return making.log((kind.replace("list-order", "key-order"), "tools[", lost))


def _lost_tools(texts, seen, rest, kind):
    if not seen:
        return 0
    whole, hit = "".join(texts), 0
    for earlier in seen:
        n = next((n for n, pair in enumerate(zip(texts, earlier, strict=False)) if pair[0] != pair[1]), min(len(texts), len(earlier)))  # fmt: skip
        size = sum(map(len, texts[:n]))
        if n == len(texts) == len(earlier):
            size += rest
        elif n < min(len(texts), len(earlier)):
            size += next(k for k, pair in enumerate(zip(texts[n], earlier[n], strict=False)) if pair[0] != pair[1])  # fmt: skip
        hit = max(hit, size)
    if kind == "tool-set":
        best = max(sum(len(each) for each in texts if each in earlier) for earlier in seen)
        return max(best + rest - hit, 0)
    return len(whole) + rest - hit


def of_passages(api, seed, *, count=24, mark="\n\n", label="", level="system"):
    """Return a log with passages in a random order, in the system prompt or in the only message."""
    making = Making(api, seed, seed % 2)
    rng = making.rng
    parts = [paragraph(rng, 2) for _ in range(8)]
    lost, seen, head = 0, [], "Passages:" + mark
    for _ in range(count):
        rng.shuffle(parts)
        said = mark.join(f"{label.format(n + 1)}{each}" for n, each in enumerate(parts))
        tail = "\n" + making.system[-1]
        if level == "system":
            making.single(system=[head + said, making.system[-1]])
        else:
            draft = making.single()
            draft.said = [("user", head + said + tail + "\nQuestion: " + draft.said[0][1])]
        text = said + tail
        hit = max((next((k for k, pair in enumerate(zip(text, each, strict=False)) if pair[0] != pair[1]), len(text)) for each in seen), default=len(text))  # fmt: skip
        lost += len(text) - hit if seen else 0
        seen.append(text)
    where = (
        place_of(api, "system")
        if level == "system" or api == "completions"
        else place_of(api, "message", 0)
    )
    return making.log(("passage-order", where, lost))


def talks(kind, api, seed, conversations=4, turns=7):
    """Return conversations whose earlier turns change as a template or a client changes them."""
    making = Making(api, seed, seed % 2)
    rng = making.rng
    reminder = f"<system-reminder>{paragraph(rng, 2)}</system-reminder>"
    every = []
    for _ in range(conversations):
        said, drafts = [], []
        for _ in range(turns):
            said.append(("user", paragraph(rng, 2)))
            sent = list(said)
            if kind == "thinking":
                last = max((n for n, each in enumerate(sent) if each[0] == "assistant"), default=-1)
                sent = [
                    (role, text.split("</think>")[-1] if n != last else text)
                    for n, (role, text) in enumerate(sent)
                ]
            elif kind == "moved-block":
                role, text = sent[-1]
                sent[-1] = (role, f"{reminder}\n{text}" if seed % 2 else f"{text}\n{reminder}")
            elif kind == "history-cut":
                sent = sent[-5:]
            elif kind == "summary" and len(sent) > 5:
                sent = [("user", f"Summary of the conversation so far: {paragraph(rng, 2)}"), ("assistant", "Thanks, I have that."), *sent[-3:]]  # fmt: skip
            drafts.append(Draft(making.tools, making.system, sent))
            thought = f"<think>{paragraph(rng, 2)}</think>" if kind == "thinking" else ""
            said.append(("assistant", thought + paragraph(rng, 2)))
        every.append(drafts)
    for turn in range(turns):
        making.drafts += [drafts[turn] for drafts in every]
    return making.log((kind, "", None)) if kind else making.log()


def of_images(api, seed, count=12):
    """Return a log with one image in the first message, encoded anew each time, and text behind it."""
    making = Making(api, seed, seed % 2)
    text = paragraph(making.rng, 8)
    for n in range(count):
        raw = zlib.compress(b"\0" * 900, n % 9) + bytes([n])
        png = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (64).to_bytes(4, "big") * 2 + raw
        data = base64.b64encode(png).decode()
        if api == "messages":
            image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}  # fmt: skip
            said = [image, {"type": "text", "text": text}]
        elif api == "responses":
            image = {"type": "input_image", "image_url": "data:image/png;base64," + data}
            said = [image, {"type": "input_text", "text": text}]
        else:
            image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}}
            said = [image, {"type": "text", "text": text}]
        draft = making.single()
        draft.said = [("user", said), ("assistant", "A shelf."), making.question()]
    return making.log(("image", place_of(api, "message", 0), (count - 1) * (len(text) + 8)))


def of_fields(kind, api, seed, count=12):
    """Return a log whose model or a parameter differs in each request."""
    making = Making(api, seed, seed % 2)
    for n in range(count):
        field = {"model": {"model": f"m-{n}"}, "cache-salt": {"cache_salt": f"s{n}"}}
        schema = {"type": "json_schema", "json_schema": {"name": f"s{n}", "schema": {}}}
        name = {"messages": "output_format", "responses": "text"}.get(api, "response_format")
        making.single(**field.get(kind, {name: schema}))
    tools = rendered(api, making.drafts[0]).get("tools", [])
    whole = sum(len(json.dumps(each, separators=(",", ":"))) for each in tools)
    lost = (count - 1) * (whole + len("\n".join(making.system)))
    return making.log((kind, "", lost))


LINE_KINDS = ("time", "identifier", "counter", "user-data", "header-line", "whitespace", "line-ends", "unicode")  # fmt: skip
TOOL_KINDS = ("tool-order", "tool-set", "key-order", "list-order")
FIELD_KINDS = ("model", "cache-salt", "parameters")
TALK_KINDS = ("thinking", "moved-block", "history-cut", "summary")
PASSAGES = (
    ("\n\n", ""),
    ("\n", "- "),
    ("\n---\n", ""),
    ("\n\n", "[{}] "),
    ("\n\n", "Document {}:\n"),
)


def alone(api, seed):
    """Yield logs with one cause each, of every kind that a form of bodies has."""
    for kind in LINE_KINDS:
        yield of_lines([kind], api, seed)
    mark, label = PASSAGES[seed % len(PASSAGES)]
    yield of_passages(api, seed, mark=mark, label=label)
    yield of_passages(api, seed, mark=mark, label=label, level="user")
    for kind in FIELD_KINDS:
        yield of_fields(kind, api, seed)
    if api != "completions":
        for kind in TOOL_KINDS:
            yield of_tools(kind, api, seed)
        for kind in TALK_KINDS:
            yield talks(kind, api, seed)
        yield of_images(api, seed)


def pairs(api, seed):
    """Yield logs with two causes of lines, in both orders."""
    for first, then in itertools.permutations([each for each in LINE_KINDS if each != "header-line"], 2):  # fmt: skip
        yield of_lines([first, then], api, seed)
    yield of_lines(["header-line", "time", "user-data"], api, seed)
    yield of_lines(["time", "identifier", "user-data", "counter"], api, seed)


def clean(api, seed):
    """Return a log in which nothing is lost: single requests and conversations over the same tools and system."""
    log = talks("", api, seed)
    making = Making(api, seed, seed % 2)
    for _ in range(12):
        making.single()
    return Log(log.records + making.log().records, [])
