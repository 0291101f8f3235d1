"""The two cores behind one surface: a method per operation, plain data in, plain data out.

`Old` drives the core that is kept in `quire0`; `New` drives `quire.core`. Where the new core calls
something otherwise, `New` overrides that one method, and nothing else of the driver changes.

Sequences, pins, restores, holds and batches go by names that the driver gives: small integers.
"""

import importlib
from typing import ClassVar
from unittest import mock

import msgspec
import numpy as np

from quire import exchange, groups, ops
from quire.core import FullAttention
from quire.core.blocks import BlockPool
from quire.core.kernel import Watcher
from quire.core.sequence import Drafted
from quire.core.tokens import array_of
from quire.errors import ConfigError, QuireError
from quire.foresight import LiveCurve
from watching import take_evicted, watcher, watchers, what_if


class Heard(Watcher):
    """Tells an observer of the old kind what a watcher hears."""

    def __init__(self, told):
        self.told = told

    def begin(self, kernel):
        self.media = kernel.tree.media

    def opened(self, seq, key, missed):
        self.told.opened(seq, key, self.media)

    def closed(self, seq):
        self.told.closed(seq)


ARE_ALIKE = importlib.import_module("quire0.core.joining")._are_alike


class Told:
    """An observer that remembers what it was told."""

    def __init__(self):
        self.heard = []

    def opened(self, seq, key, media):
        self.heard.append(("opened", bytes(key), seq.prompt_len, seq.num_cached, len(media)))

    def closed(self, seq):
        self.heard.append(("closed", seq.state, seq.computed, seq.prompt_len))


class Old:
    """Today's core, as it was when the copy was made."""

    root = "quire0.core"

    def __init__(self, recipe, clock):
        self.clock = clock
        self.core = importlib.import_module(self.root)
        self.kept = self.module("kept")
        self.size = recipe["block_size"]
        self.seqs, self.pins, self.restores, self.holds, self.batches = {}, {}, {}, {}, {}
        self.drafts = {}
        self.told = Told() if "observer" in recipe["features"] else None
        self.manager = self.made(recipe, clock)

    @classmethod
    def module(cls, name):
        return importlib.import_module(f"{cls.root}.{name}")

    def made(self, recipe, clock):
        has = recipe["features"]
        return self.core.CacheManager(
            block_size=recipe["block_size"],
            groups=[
                self.core.LayerGroup(name, num_blocks, self.kind(kind))
                for name, kind, num_blocks in recipe["groups"]
            ],
            policy=recipe["policy"],
            sub_block="sub_block" in has,
            pin_budget=recipe["pin_budget"],
            events="events" in has,
            evictions="evictions" in has,
            debug="debug" in has,
            clock=clock if "clock" in has else None,
            curve="curve" in has,
            observer=self.told,
        )

    limits: ClassVar = {
        "events": {"MAX_EVENTS": 40},
        "hints": {"MAX_SESSIONS": 2, "MAX_NODES": 3},
        "joining": {"MAX_JOINED_BYTES": 64},
        "livecurve": {"MAX_NOTES": 40},
        "lost": {"MAX_RUNS": 5, "MAX_BLOCKS": 40},
        "media": {"MAX_MEDIA": 2},
        "policies.lru_shadow": {"MIN_SLOTS": 16},
        "policies.mind": {"MAX_GHOSTS": 5},
        "radix": {"MAX_ROOTS": 2},
        "requests": {"PACK_EVERY": 16},
    }
    """What is forgotten beyond a number, so small a number that it is forgotten all the time."""

    @classmethod
    def patches(cls, recipe):
        """Return the patches under which a recipe's managers are made and used."""
        extent, arena = recipe["rows"]
        limits = dict(cls.limits) if recipe["tight"] else {}
        limits[cls.rows] = {"MIN_EXTENT": extent, "MIN_ARENA": arena}
        patches = [mock.patch.multiple(cls.module(n), **values) for n, values in limits.items()]
        return [*patches, *cls.mended()]

    @classmethod
    def mended(cls):
        """Return the patches that give the old core what was changed on purpose since.

        Where storing ends is no seam any more: a request has one priority and retention. Runs join
        wherever their terms are alike.
        """

        of_ranges = cls.module("terms").terms_of

        def terms_of(*args):
            terms = of_ranges(*args)
            return msgspec.structs.replace(terms, steps=terms.steps[:1])

        return [
            mock.patch.object(cls.module("requests"), "terms_of", terms_of),
            mock.patch.object(cls.module("joining"), "_are_alike", alike_by_terms),
        ]

    rows: ClassVar = "rows"

    @property
    def pools(self):
        return self.manager.groups

    @property
    def copies(self):
        return self.manager.copies

    # -- what is passed in -----------------------------------------------------------------

    def kind(self, kind):
        name, *numbers = kind
        return getattr(self.core, name)(*numbers)

    def scope(self, scope):
        return self.core.Scope(**scope) if type(scope) is dict else scope

    def media(self, media):
        made = (tuple, list)
        return [self.core.MediaItem(*each) if type(each) in made else each for each in media]

    def hint(self, hint):
        return self.core.Hint(**hint) if type(hint) is dict else hint

    def options(self, options):
        """Return the options of an open; `store_until` is the first token that is not stored."""
        given = {name: options[name] for name in ("priority", "retain_s") if name in options}
        if "hint" in options:
            given["hint"] = self.hint(options["hint"])
        if "store_until" in options:
            given["ranges"] = [self.core.TokenRange(options["store_until"], store=False)]
        return given

    # -- what is there ---------------------------------------------------------------------

    def counts(self):
        """Return (free, active, cached, all) of every group, the copies planned, and the stats."""
        manager = self.manager
        groups = [(p.num_free, p.num_active, p.num_cached, p.num_blocks) for p in self.pools]
        return (
            groups,
            list(map(tuple, self.copies.peek())),
            msgspec.structs.asdict(manager.stats),
        )

    def view(self, name):
        """Return a sequence's state, lengths, and block table in each group."""
        seq = self.seqs[name]
        lengths = (seq.published, seq.computed, seq.capacity, seq.num_cached, seq.prompt_len)
        tables = []
        if seq.state == "open":
            tables = [seq.block_ids(g).tolist() for g in range(len(self.pools))]
        return (seq.state, *lengths), tables

    def state(self):
        """Return the whole state, as far as it is behaviour."""
        return behaviour(self.manager.snapshot(), self.clock())

    def check(self):
        self.manager.check()

    def drawn(self):
        """Return what people see: the picture of a dump, and the line of a repr."""
        return self.manager.dump(), repr(self.manager)

    def heard(self):
        """Return what the observer was told since the last time."""
        if self.told is None:
            return []
        heard, self.told.heard = self.told.heard, []
        return heard

    # -- lookups ---------------------------------------------------------------------------

    def probe(self, tokens, scope, media):
        hit = self.manager.probe(tokens, self.scope(scope), self.media(media))
        return hit.num_tokens, hit.num_blocks, hit.partial_tokens, hit.reason

    def explain(self, tokens, scope, media):
        explained = self.manager.explain(tokens, self.scope(scope), self.media(media))
        segments = [(each.start, each.stop, each.cached, each.why) for each in explained.segments]
        found_in = [(repr(scope), tokens) for scope, tokens in explained.found_in]
        return segments, found_in, str(explained)

    def fits(self, tokens, num_new, scope, media):
        fit = self.manager.fits(tokens, num_new, self.scope(scope), media=self.media(media))
        return bool(fit), fit.num_cached, fit.needed, fit.room

    def fits_sequence(self, name, num_new):
        fit = self.manager.fits(self.seqs[name], num_new)
        return bool(fit), fit.num_cached, fit.needed, fit.room

    def what_if(self):
        told = self.manager.what_if()
        return plain(told), str(told), told.points([0, 1, 7, 10**6]), told.hit_rate, told.ceiling

    def usage(self, group):
        return plain(self.manager.usage(group))

    def tables(self, names, group, pad):
        seqs = [self.seqs[name] for name in names]
        more = {} if pad is None else {"pad": pad}
        return [array.tolist() for array in self.manager.tables(seqs, group, **more)]

    # -- the life of a sequence ------------------------------------------------------------

    def open(self, name, tokens, scope, media, options):
        media, scope = self.media(media), self.scope(scope)
        self.seqs[name] = self.manager.open(tokens, scope, media=media, **self.options(options))

    def reserve(self, name, num_tokens):
        return self.manager.reserve(self.seqs[name], num_tokens)

    def commit(self, name, tokens):
        return self.manager.commit(self.seqs[name], tokens)

    def close(self, name):
        return self.manager.close(self.seqs[name])

    def fork(self, name, twin):
        self.seqs[twin] = self.manager.fork(self.seqs[name])

    def truncate(self, name, num_tokens):
        return self.manager.truncate(self.seqs[name], num_tokens)

    def suspend(self, name):
        return self.manager.suspend(self.seqs[name])

    def resume(self, name):
        return self.manager.resume(self.seqs[name])

    def stops(self, name):
        return self.manager.stops(self.seqs[name])

    def checkpoint(self, name):
        return self.manager.checkpoint(self.seqs[name])

    def draft(self, name, parents):
        return self.manager.draft(self.seqs[name], parents)

    def accept(self, name, path, tokens):
        return list(map(tuple, self.manager.accept(self.seqs[name], path, tokens)))

    # -- batches ---------------------------------------------------------------------------

    def batch(self, name, seqs):
        self.batches[name] = self.manager.batch([self.seqs[each] for each in seqs])
        return len(self.batches[name])

    def reserve_step(self, name):
        return self.manager.reserve_step(self.batches[name])

    def commit_step(self, name, tokens):
        return self.manager.commit_step(self.batches[name], tokens)

    def reserve_list(self, seqs):
        return self.manager.reserve_step([self.seqs[each] for each in seqs])

    def commit_list(self, seqs, tokens):
        return self.manager.commit_step([self.seqs[each] for each in seqs], tokens)

    # -- what is cached --------------------------------------------------------------------

    def pin(self, name, tokens, scope, media, ttl_s):
        media, scope = self.media(media), self.scope(scope)
        self.pins[name] = self.manager.pin(tokens, scope, media=media, ttl_s=ttl_s)
        return self.pins[name].num_tokens

    def pinned(self, name):
        return self.pins[name].tokens.tolist()

    def unpin(self, name):
        return self.pins[name].close()

    def evict(self, tokens, scope, media):
        return self.manager.evict(tokens, self.scope(scope), media=self.media(media))

    def reclaim(self, num_blocks, group):
        return self.manager.reclaim(num_blocks, group)

    def clear(self):
        return self.manager.clear()

    def end_session(self, session_id, scope):
        return self.manager.end_session(session_id, self.scope(scope))

    def reset(self):
        return self.manager.reset()

    def compact(self, group):
        return self.manager.compact(group)

    def resize(self, num_blocks):
        return self.manager.resize(num_blocks)

    # -- what leaves -----------------------------------------------------------------------

    def take_copies(self):
        return list(map(tuple, self.manager.take_copies()))

    def take_events(self):
        events = [(type(each).__name__, plain(each)) for each in self.manager.take_events()]
        return events, self.manager.num_dropped_events

    def take_evicted(self):
        return plain(self.manager.take_evicted())

    # -- tiers -----------------------------------------------------------------------------

    def residency(self, tokens, scope, media):
        here = self.manager.residency(tokens, self.scope(scope), tuple(self.media(media)))
        return plain_residency(here)

    def required(self, group, end):
        return list(self.manager.required(group, end))

    def restore(self, name, prompt, end, brought):
        tokens, scope, media = prompt
        made = self.manager.restore(tokens, end, brought, self.scope(scope), self.media(media))
        self.restores[name] = made.__enter__()
        return {group: list(ids) for group, ids in sorted(made.blocks.items())}

    def restored(self, name):
        return self.restores[name].commit()

    def leave_restore(self, name):
        return self.restores[name].__exit__(None, None, None)

    def hold(self, name, seq):
        self.holds[name] = self.manager.hold(self.seqs[seq])

    def let_go(self, name):
        return self.holds[name]()

    def blocks_of(self, name):
        seq = self.seqs[name]
        # Asked of a sequence that is not open, the old core gave nothing.
        (getattr(self.manager, "_check_open", None) or self.manager.check_open)(seq)
        return plain(self.kept.blocks_of(self.manager, seq))

    def all_blocks(self):
        return sorted(map(tuple, map(msgspec.structs.astuple, self.kept.all_blocks(self.manager))))

    def prefixes(self):
        return [
            (each.tokens.tolist(), repr(each.scope), plain(each.media), each.ends)
            for each in self.kept.prefixes(self.manager)
        ]


class New(Old):
    """The core that is worked on: `Old` with what it calls otherwise."""

    root = "quire.core"

    moved: ClassVar = {
        "hints": "quire.core.owners",
        "kept": "quire.exchange.kept",
        "radix": "quire.core.tree",
        "events": "quire.exchange.events",
        "livecurve": "quire.foresight.curve",
        "lost": "quire.foresight.trail",
        "policies.lru_shadow": "quire.foresight.lru_shadow",
        "policies.mind": "quire.foresight.mind",
        "requests": "quire.foresight.curve",
    }

    def made(self, recipe, clock):
        has = recipe["features"]
        wanted = {name: name in has for name in ("events", "evictions", "curve")}
        return self.core.CacheManager(
            block_size=recipe["block_size"],
            groups=[
                self.core.LayerGroup(name, num_blocks, self.kind(kind))
                for name, kind, num_blocks in recipe["groups"]
            ],
            policy=recipe["policy"],
            sub_block="sub_block" in has,
            pin_budget=recipe["pin_budget"],
            pool=ops.CheckedPool if "debug" in has else BlockPool,
            clock=clock if "clock" in has else None,
            watchers=watchers(**wanted, observer=self.told and Heard(self.told)),
        )

    def take_events(self):
        log = watcher(self.manager, exchange.EventLog)
        events = (
            [(type(each).__name__, plain(each)) for each in log.take()] if log is not None else []
        )
        return events, log.num_dropped if log is not None else 0

    def take_evicted(self):
        return plain(take_evicted(self.manager))

    def what_if(self):
        if watcher(self.manager, LiveCurve) is None:
            raise ConfigError("what_if needs notes of the requests: CacheManager(..., curve=True)")
        told = what_if(self.manager)
        return plain(told), str(told), told.points([0, 1, 7, 10**6]), told.hit_rate, told.ceiling

    limits: ClassVar = {**Old.limits, "hints": {"MAX_SESSIONS": 2}}

    def kind(self, kind):
        name, *numbers = kind
        return getattr(groups, name, FullAttention)(*numbers)

    @classmethod
    def mended(cls):
        """Return the patches that let go of expired pins before a call is refused, as the old core does."""
        checks = {
            "quire.core.room": "let_go_expired",
            "quire.exchange.restore": "room_beside",
            "quire.ops.memory": "check_pins",
            "quire.ops.pins": "_check_budget",
        }
        return [letting_go_first(importlib.import_module(at), name) for at, name in checks.items()]

    @classmethod
    def module(cls, name):
        return importlib.import_module(cls.moved.get(name, f"{cls.root}.{name}"))

    def options(self, options):
        given = super().options({name: options[name] for name in options if name != "store_until"})
        if "store_until" in options:
            given["store_until"] = options["store_until"]
        return given

    @property
    def pools(self):
        return self.manager.pools

    @property
    def copies(self):
        return self.manager.kernel.copies

    def state(self):
        return behaviour(ops.snapshot(self.manager), self.clock())

    def check(self):
        ops.check(self.manager)

    def drawn(self):
        return ops.dump(self.manager), repr(self.manager)

    def explain(self, tokens, scope, media):
        explained = ops.explain(self.manager, tokens, self.scope(scope), self.media(media))
        segments = [(each.start, each.stop, each.cached, each.why) for each in explained.segments]
        found_in = [(repr(scope), tokens) for scope, tokens in explained.found_in]
        return segments, found_in, str(explained)

    def fits(self, tokens, num_new, scope, media):
        scope, media = self.scope(scope), self.media(media)
        fit = ops.fits(self.manager, tokens, num_new, scope, media=media)
        return bool(fit), fit.num_cached, fit.needed, fit.room

    def fits_sequence(self, name, num_new):
        fit = ops.fits(self.manager, self.seqs[name], num_new)
        return bool(fit), fit.num_cached, fit.needed, fit.room

    def usage(self, group):
        return plain(ops.usage(self.manager, group))

    def pinned(self, name):
        """The tokens that a pin references: a while longer than its time, as the old core said them."""
        pin = self.pins[name]
        path = pin.node.path() if pin in self.manager.kernel.holds else []
        return array_of(b"".join(node.key for node in path)).tolist()

    def pin(self, name, tokens, scope, media, ttl_s):
        media, scope = self.media(media), self.scope(scope)
        self.pins[name] = ops.pin(self.manager, tokens, scope, media=media, ttl_s=ttl_s)
        return self.pins[name].num_tokens

    def reclaim(self, num_blocks, group):
        return ops.reclaim(self.manager, num_blocks, group)

    def evict(self, tokens, scope, media):
        return ops.invalidate(self.manager, tokens, self.scope(scope), media=self.media(media))

    def clear(self):
        return ops.clear(self.manager)

    def truncate(self, name, num_tokens):
        return ops.truncate(self.manager, self.seqs[name], num_tokens)

    def compact(self, group):
        return ops.compact(self.manager, group)

    def resize(self, num_blocks):
        return ops.resize(self.manager, num_blocks)

    def stops(self, name):
        return groups.stops(self.manager, self.seqs[name])

    def checkpoint(self, name):
        return groups.checkpoint(self.manager, self.seqs[name])

    def draft(self, name, parents):
        self.drafts[name] = ops.draft(self.manager, self.seqs[name], parents)

    def accept(self, name, path, tokens):
        never = ops.Draft(self.manager, self.seqs[name], (), Drafted(0, 0))
        return list(map(tuple, self.drafts.get(name, never).accept(path, tokens)))

    def residency(self, tokens, scope, media):
        here = exchange.residency(self.manager, tokens, self.scope(scope), tuple(self.media(media)))
        return plain_residency(here)

    def required(self, group, end):
        return list(exchange.required_blocks(self.manager, group, end))

    def restore(self, name, prompt, end, brought):
        tokens, scope, media = prompt
        scope, media = self.scope(scope), self.media(media)
        made = exchange.restore(self.manager, tokens, end, brought, scope, media=media)
        self.restores[name] = made.__enter__()
        return {group: list(ids) for group, ids in sorted(made.blocks.items())}

    def hold(self, name, seq):
        self.holds[name] = exchange.hold(self.manager, self.seqs[seq])


def letting_go_first(module, name):
    """Return a patch of a check, of a manager or its kernel, before which expired pins are let go."""
    check = getattr(module, name)

    def checked(manager, *args):
        getattr(manager, "kernel", manager).holds.let_go_expired()
        return check(manager, *args)

    return mock.patch.object(module, name, checked)


def alike_by_terms(tree, upper, lower, now):
    """Join runs of the oracle wherever their terms are alike, whatever held them before."""
    kept = upper.grown, upper.policy
    upper.grown, upper.policy = lower.grown, lower.policy
    try:
        return ARE_ALIKE(tree, upper, lower, now)
    finally:
        upper.grown, upper.policy = kept


def plain_residency(here):
    return {
        "matched": here.matched,
        "accepted": here.accepted,
        "held": [places.tolist() for places in here.held],
        "room": list(here.room),
        "digests": list(here.digests),
    }


def outcome(side, call, args):
    """Return what an operation gave: ("gave", plain data), or ("raised", class name, message)."""
    try:
        return "gave", getattr(side, call)(*args)
    except QuireError as error:
        message = str(error).replace("(manager, seq", "(seq")  # what was a method once
        return "raised", type(error).__name__, message
    except (TypeError, AttributeError, ValueError) as error:
        return "raised", f"bare {type(error).__name__}", ""


def plain(value):
    """Return structs and arrays as tuples and lists."""
    if isinstance(value, msgspec.Struct):
        return tuple(plain(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def behaviour(snapshot, now):
    """Return what of a snapshot later calls depend on, and what callers see; retention that has ended is none."""
    roots = {
        root["scope"]: list(root["children"]) for root in snapshot["roots"] if root["children"]
    }
    leaves, waiting = [], [node for children in roots.values() for node in children]
    for node in waiting:
        waiting.extend(node["children"])
        if not node["children"] and node["eviction_order"] is not None:
            leaves.append((node["eviction_order"], node["end"], node["tokens"]))
    return {
        "groups": snapshot["groups"],
        "roots": {scope: _nodes(roots[scope], now) for scope in sorted(roots)},
        "eviction order": [(end, tokens) for _, end, tokens in sorted(leaves)],
        "sparse order": snapshot["sparse_order"],
        "sequences": [
            {name: seq[name] for name in SEQUENCE if name in seq} for seq in snapshot["sequences"]
        ],
        "copies": snapshot["copies"],
        "pins": (snapshot["num_pins"], snapshot["pinned_blocks"]),
        "media": snapshot["num_media"],
    }


SEQUENCE = (
    "state", "scope", "published", "computed", "capacity", "num_cached", "prompt_len", "priority",
    "tables", "tokens", "keep_for",
)  # fmt: skip
NODE = ("tokens", "blocks", "end", "locks", "pins", "priority", "keep_until")
PART = ("group", "guards", "guarded", "num_held", "snapshots")


def _nodes(nodes, now):
    found = []
    for node in sorted(nodes, key=lambda each: each["tokens"]):
        data = {name: node[name] for name in NODE}
        data["keep_until"] *= node["keep_until"] > now
        data["parts"] = [{n: part[n] for n in PART if n in part} for part in node["parts"]]
        data["children"] = _nodes(node["children"], now)
        found.append(data)
    return found
