"""The driver: which calls are made next, on a manager that is always short of room."""

import numpy as np
from bad_calls import bad_anywhere, bad_on_any

SCOPES = (None, {"salt": "x"}, {"lora": "a", "salt": "x"})
DIGESTS = (b"first".ljust(32), b"second".ljust(32), b"third".ljust(32))
SESSIONS = ("one", "two", "three")
MAX_HISTORY = 24
MAX_DEAD = 4
CROWD = 90

WEIGHTS = {
    "open": 12, "prefill": 14, "reserve": 4, "commit": 7, "generate": 8, "step": 9, "batch": 2,
    "close": 8, "fork": 4, "truncate": 4, "suspend": 2, "resume": 4, "probe": 3,
    "explain": 1.5, "fits": 4, "pin": 4, "unpin": 2, "evict": 1.5, "reclaim": 2, "clear": 0.3,
    "end_session": 1, "compact": 1.2, "resize": 1, "drawn": 0.3, "restore": 3, "restored": 3, "hold": 1.5,
    "let_go": 1.5, "draft": 3, "accept": 4, "checkpoint": 2, "take_copies": 4, "take_events": 1,
    "take_evicted": 2, "wait": 3, "what_if": 0.4, "usage": 0.6, "tables": 1, "kept": 0.6,
    "residency": 1, "bad": 5, "reset": 0.15,
}  # fmt: skip

NEEDS = {
    "fork": "forks", "suspend": "suspend", "resume": "suspend", "draft": "drafts", "pin": "pins",
    "truncate": "truncate", "step": "steps", "batch": "steps", "hold": "hold", "unpin": "pins",
    "restored": "restore", "clear": "evict", "reclaim": "evict", "end_session": "hints",
    "wait": "clock", "accept": "drafts", "let_go": "hold", "take_events": "events",
    "take_evicted": "evictions",
}  # fmt: skip
"""The feature without which a call is not made; most are called as it is."""


class Live:
    """A sequence: the tokens that are known of it, whether computed or not, and its drafts."""

    def __init__(self, tokens, scope, media):
        self.tokens, self.scope, self.media = tokens, scope, media
        self.parents = None


class Driver:
    """Draws calls and their arguments. What is drawn depends on what the old side says alone."""

    def __init__(self, recipe, random):
        self.random = random
        self.size = recipe["block_size"]
        self.live, self.dead, self.batches = {}, [], {}
        self.left = {"unpin": [], "restored": [], "leave_restore": [], "let_go": []}
        self.pins, self.restores, self.holds = [], [], []
        self.history = []
        self.last_name = 0
        without = recipe.get("without", ())
        weights = {
            name: weight / (5 if name in recipe["rare"] else 1)
            for name, weight in WEIGHTS.items()
            if (NEEDS.get(name, name) in self.has or NEEDS.get(name, name) not in FEATURED)
            and name not in without
        }
        self.acts = [getattr(self, f"act_{name}") for name in weights]
        self.weights = np.cumsum([*weights.values()]).tolist()

    def act(self):
        """Do one thing: one call, or a few that belong together."""
        if "crowd" in self.has and self.last_name < CROWD:
            self.act_open()
            return
        if not self.live:
            self.act_open()
            return
        (act,) = self.random.choices(self.acts, cum_weights=self.weights)
        act()

    # -- what is drawn ---------------------------------------------------------------------

    def name(self):
        self.last_name += 1
        return self.last_name

    def near_boundary(self, limit):
        """Return a length up to a limit, mostly beside the end of a block."""
        blocks = self.random.randint(0, limit // self.size)
        off = self.random.choice((-1, 0, 0, 0, 1, self.random.randrange(self.size)))
        return min(max(blocks * self.size + off, 0), limit)

    def some_tokens(self, count):
        symbols = self.recipe["symbols"]
        if self.random.random() < 0.3:
            return [self.random.randrange(symbols)] * count
        return self.random.choices(range(symbols), k=count)

    def prompt(self):
        """Return (tokens, scope, media): mostly the head of an earlier prompt, and something new."""
        random = self.random
        limit = self.recipe["max_tokens"]
        tokens, scope, media = [], None, []
        if self.history and random.random() < 0.85:
            tokens, scope, media = random.choice(self.history)
            if random.random() < 0.6:
                tokens = tokens[: self.near_boundary(len(tokens))]
        if "scopes" in self.has and random.random() < 0.2:
            scope = random.choice(SCOPES)
        more = self.near_boundary(random.choice((self.size, 3 * self.size, limit // 2, limit)))
        if random.random() < 0.25 and tokens:
            more = random.choice((0, 1))
        tokens = (tokens + self.some_tokens(more))[: limit + self.size] or [0]
        media = [each for each in media if each[1] + each[2] <= len(tokens)]
        if "media" in self.has and random.random() < 0.25:
            media, tokens = self.with_media(media, tokens)
        self.remember(tokens, scope, media)
        return tokens, scope, media

    def with_media(self, media, tokens):
        start = sum(media[-1][1:]) if media else 0
        if start >= len(tokens):
            return media, tokens
        start = self.random.randrange(start, len(tokens))
        length = self.random.randint(1, min(2 * self.size + 1, len(tokens) - start))
        tokens = [*tokens[:start], *[0] * length, *tokens[start + length :]]
        return [*media, (self.random.choice(DIGESTS), start, length)], tokens

    def remember(self, tokens, scope, media):
        if len(self.history) >= MAX_HISTORY:
            self.history[self.random.randrange(MAX_HISTORY)] = (tokens, scope, media)
        else:
            self.history.append((tokens, scope, media))

    def array(self, tokens):
        return np.array(tokens, np.int32) if self.random.random() < 0.9 else list(tokens)

    def asked(self):
        """Return a prompt as lookups take it."""
        tokens, scope, media = self.prompt()
        return self.array(tokens), scope, media

    def options(self):
        random, options = self.random, {}
        if "priority" in self.has and random.random() < 0.3:
            options["priority"] = random.randint(-2, 2)
        if "retain" in self.has and "clock" in self.has and random.random() < 0.25:
            options["retain_s"] = random.choice((1, 5, 20.5))
        if "store_until" in self.has and random.random() < 0.15:
            options["store_until"] = self.near_boundary(self.recipe["max_tokens"])
        if "hints" in self.has and random.random() < 0.4:
            hint = {"reuse": random.choice(("unknown", "session", "never"))}
            if hint["reuse"] == "session" or random.random() < 0.5:
                hint["session_id"] = random.choice(SESSIONS)
            if "clock" in self.has and random.random() < 0.3:
                hint["ttl_s"] = random.choice((1, 4, 15))
            options["hint"] = hint
        return options

    def lengths(self, name):
        """Return (state, published, computed, capacity) of a sequence."""
        return self.old.view(name)[0][:4]

    def pick(self, state="open"):
        """Return the name of a sequence in a state, or None."""
        names = [name for name in self.live if self.old.seqs[name].state == state]
        return self.random.choice(names) if names else None

    def next_tokens(self, name, count):
        """Return the tokens that follow what is computed: known ones, then others."""
        computed = self.lengths(name)[2]
        known = self.live[name].tokens[computed : computed + count]
        return known + self.some_tokens(count - len(known))

    def computed(self, name, tokens):
        """Note that these tokens were committed; those before them are as they were."""
        live, end = self.live[name], self.lengths(name)[2]
        live.tokens = live.tokens[: end - len(tokens)] + tokens + live.tokens[end:]

    # -- requests --------------------------------------------------------------------------

    def act_open(self):
        tokens, scope, media = self.prompt()
        if len(self.live) >= self.recipe["max_open"]:
            self.act_close()
        name = self.name()
        if self.random.random() < 0.2:
            self.both("fits", self.array(tokens), None, scope, media)
        opened, _ = self.both(
            "open", name, self.array(tokens), scope, media, self.options(), touched=(name,)
        )
        if opened:
            self.live[name] = Live(tokens, scope, media)
            if self.random.random() < 0.7:
                self.prefill(name)

    def act_prefill(self):
        name = self.pick()
        if name is not None:
            self.prefill(name)

    def prefill(self, name):
        """Compute what is known of a sequence, ending where its states are kept, or not."""
        most = 6
        while most:
            most -= 1
            computed, known = self.lengths(name)[2], len(self.live[name].tokens)
            wanted = known - computed
            if wanted <= 0:
                return
            stops = self.both("stops", name)[1] if self.random.random() < 0.7 else []
            if stops:
                wanted = stops[0] - computed
            elif self.random.random() < 0.3:
                wanted = self.random.randint(1, wanted)
            if not self.put(name, wanted):
                return

    def put(self, name, count):
        """Reserve and commit so many tokens; return whether both were done."""
        if not self.both("reserve", name, count, touched=(name,))[0]:
            return False
        return self.write(name, count)

    def write(self, name, count):
        tokens = self.next_tokens(name, count)
        if self.random.random() < 0.95:
            self.both("take_copies")
        if tokens and "bad" in self.has and self.random.random() < 0.02:
            at = self.random.randrange(count)
            wrong = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
            if self.both("commit", name, wrong)[0]:
                self.computed(name, wrong)
            count = self.lengths(name)[3] - self.lengths(name)[2]
            tokens = self.next_tokens(name, count)
        done, _ = self.both("commit", name, self.array(tokens), touched=(name,))
        if done:
            self.computed(name, tokens)
        return done

    def act_reserve(self):
        name = self.pick()
        if name is not None:
            count = self.random.randint(1, 2 * self.size + 2)
            if "fits" in self.has and self.random.random() < 0.3:
                self.both("fits_sequence", name, count)
            self.both("reserve", name, count, touched=(name,))

    def act_commit(self):
        name = self.pick()
        if name is not None:
            _, _, computed, capacity = self.lengths(name)
            self.write(name, self.random.randint(0, capacity - computed))

    def act_generate(self):
        name = self.pick()
        if name is not None:
            _, _, computed, _ = self.lengths(name)
            ahead = max(len(self.live[name].tokens) - computed, 0)
            self.put(name, ahead + self.random.randint(1, self.size + 2))

    def act_close(self):
        name = self.random.choice([*self.live])
        live = self.live[name]
        computed = self.lengths(name)[2]
        done, _ = self.both("close", name)
        if done:
            del self.live[name]
            self.dead = [*self.dead, name][-MAX_DEAD:]
            if self.random.random() < 0.5:
                tokens = live.tokens[: computed or None] or [0]
                self.remember(
                    tokens, live.scope, [m for m in live.media if sum(m[1:]) <= len(tokens)]
                )

    def act_fork(self):
        name = self.pick()
        if name is None or len(self.live) >= self.recipe["max_open"]:
            return
        twin = self.name()
        done, _ = self.both("fork", name, twin, touched=(name, twin))
        if done:
            live = self.live[name]
            self.live[twin] = Live(live.tokens, live.scope, live.media)

    def act_truncate(self):
        name = self.pick()
        if name is not None:
            _, _, computed, _ = self.lengths(name)
            length = self.near_boundary(computed + 1)
            if self.random.random() < 0.4:
                length = max(computed - self.random.randint(0, self.size), 0)
            self.both("truncate", name, length, touched=[*self.live])

    def act_suspend(self):
        name = self.pick()
        if name is not None:
            done, _ = self.both("suspend", name, touched=[*self.live])
            if done:
                self.live[name].parents = None

    def act_resume(self):
        name = self.pick("suspended")
        if name is not None:
            if "fits" in self.has and self.random.random() < 0.3:
                self.both("fits_sequence", name, None)
            self.both("resume", name, touched=(name,))
            if self.random.random() < 0.7 and self.lengths(name)[0] == "open":
                self.prefill(name)

    def act_checkpoint(self):
        name = self.pick()
        if name is not None:
            _, _, computed, _ = self.lengths(name)
            if computed % self.size and self.random.random() < 0.8:
                self.put(name, self.size - computed % self.size)
            self.both("checkpoint", name, touched=(name,))

    # -- batches ---------------------------------------------------------------------------

    def decoding(self):
        """Return the sequences whose prompts are computed, a few of them."""
        names = [name for name in self.live if self.old.seqs[name].state == "open"]
        names = [n for n in names if self.lengths(n)[2] >= len(self.live[n].tokens)]
        self.random.shuffle(names)
        return names[: self.random.randint(1, max(len(names), 1))]

    def act_batch(self):
        names = self.decoding()
        if not names:
            return
        name = self.name()
        if self.both("batch", name, names)[0]:
            self.batches[name] = names
            while len(self.batches) > 3:
                del self.batches[next(iter(self.batches))]
            self.steps(name, names, self.random.randint(1, 2 * self.size))

    def act_step(self):
        if self.batches and self.random.random() < 0.7:
            name = self.random.choice([*self.batches])
            self.steps(name, self.batches[name], self.random.randint(1, self.size + 1))
            return
        names = self.decoding()
        if names:
            self.steps(None, names, 1)

    def steps(self, name, names, count):
        for _ in range(count):
            reserve = ("reserve_step", name) if name is not None else ("reserve_list", names)
            if not self.both(*reserve, touched=names)[0]:
                return
            if self.random.random() < 0.95:
                self.both("take_copies")
            tokens = self.some_tokens(len(names))
            if name is not None:
                done, _ = self.both("commit_step", name, self.array(tokens), touched=names)
            else:
                done, _ = self.both("commit_list", names, self.array(tokens), touched=names)
            if not done:
                return
            for each, token in zip(names, tokens, strict=True):
                self.computed(each, [token])

    # -- drafts ----------------------------------------------------------------------------

    def act_draft(self):
        name = self.pick()
        if name is None:
            return
        _, _, computed, capacity = self.lengths(name)
        if capacity > computed and self.random.random() < 0.8:
            self.both("truncate", name, computed, touched=(name,))
        count = self.random.randint(1, self.size + 2)
        parents = list(range(-1, count - 1))
        if self.random.random() < 0.6:
            parents = [self.random.randint(-1, at - 1) for at in range(count)]
        drafted, _ = self.both("draft", name, parents, touched=(name,))
        if drafted:
            self.live[name].parents = parents
            if self.random.random() < 0.5:
                self.accept(name)

    def act_accept(self):
        drafted = [name for name in self.live if self.live[name].parents is not None]
        if drafted:
            self.accept(self.random.choice(drafted))

    def accept(self, name):
        """Accept the head of one branch of what was drafted."""
        parents, live = self.live[name].parents, self.live[name]
        path = [self.random.randint(0, len(parents) - 1)]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        path = path[: self.random.randint(0, len(path))]
        computed = self.lengths(name)[2]
        tokens = live.tokens[computed : computed + len(path)]
        tokens += self.some_tokens(len(path) - len(tokens))
        if self.random.random() < 0.95:
            self.both("take_copies")
        accepted, _ = self.both("accept", name, path, self.array(tokens), touched=(name,))
        if accepted:
            self.computed(name, tokens)
        if accepted or self.random.random() < 0.5:
            live.parents = None

    # -- lookups ---------------------------------------------------------------------------

    def act_probe(self):
        self.both("probe", *self.asked())

    def act_explain(self):
        self.both("explain", *self.asked())

    def act_fits(self):
        tokens, scope, media = self.asked()
        self.both("fits", tokens, self.random.choice((None, 1, 2 * self.size)), scope, media)
        name = self.random.choice([*self.live])
        self.both("fits_sequence", name, self.random.choice((None, 1, 3 * self.size)))

    def act_what_if(self):
        self.both("what_if")

    def act_drawn(self):
        self.both("drawn")

    def act_usage(self):
        self.both("usage", self.random.randrange(len(self.recipe["groups"])))

    def act_tables(self):
        names = [name for name in self.live if self.old.seqs[name].state == "open"]
        group = self.random.randrange(len(self.recipe["groups"]))
        self.both("tables", names, group, self.random.choice((None, 0, -7)))

    def act_kept(self):
        self.both(self.random.choice(("all_blocks", "prefixes")))
        name = self.pick()
        if name is not None:
            self.both("blocks_of", name)

    # -- what is cached --------------------------------------------------------------------

    def act_pin(self):
        name = self.name()
        ttl_s = self.random.choice((None, 1, 6)) if "clock" in self.has else None
        if self.both("pin", name, *self.asked(), ttl_s, touched=[*self.live][:2])[0]:
            self.pins.append(name)
            self.both("pinned", name)

    def act_unpin(self):
        if self.pins:
            name = self.random.choice(self.pins)
            self.both("pinned", name)
            self.both("unpin", name)
            self.pins.remove(name)
            self.left["unpin"].append(name)

    def act_evict(self):
        if self.random.random() < 0.2:
            self.both("evict", None, self.random.choice(SCOPES), ())
        else:
            self.both("evict", *self.asked())

    def act_reclaim(self):
        group = self.random.choice((None, None, *range(len(self.recipe["groups"]))))
        self.both("reclaim", self.random.randint(1, 6), group)

    def act_clear(self):
        self.both("clear", touched=[*self.live])

    def act_end_session(self):
        self.both("end_session", self.random.choice(SESSIONS), self.random.choice(SCOPES))

    def act_wait(self):
        self.clock.now += self.random.choice((0.25, 1.0, 3.0, 10.0, 60.0))

    # -- memory ----------------------------------------------------------------------------

    def act_take_copies(self):
        self.both("take_copies")

    def act_take_events(self):
        self.both("take_events")

    def act_take_evicted(self):
        self.both("take_evicted")

    def act_compact(self):
        if self.random.random() < 0.8:
            self.both("take_copies")
        self.both(
            "compact", self.random.randrange(len(self.recipe["groups"])), touched=[*self.live]
        )

    def act_resize(self):
        if self.random.random() < 0.8:
            self.both("take_copies")
        sizes = {}
        for name, _, num_blocks in self.recipe["groups"]:
            if self.random.random() < 0.6:
                sizes[name] = max(int(num_blocks * self.random.choice((0.3, 0.7, 0.9, 1, 1.2))), 1)
        self.both("resize", sizes, touched=[*self.live])

    def act_reset(self):
        self.both("reset")
        self.dead = [*self.live][-MAX_DEAD:]
        self.live.clear()
        self.batches.clear()
        kinds = {"unpin": self.pins, "leave_restore": self.restores, "let_go": self.holds}
        self.left["restored"] += self.restores
        for call, names in kinds.items():
            self.left[call] += names
            names.clear()

    # -- tiers -----------------------------------------------------------------------------

    def act_residency(self):
        self.both("residency", *self.asked())

    def act_restore(self):
        tokens, scope, media = self.prompt()
        tokens = [*tokens, 0]
        found, here = self.both("residency", tokens, scope, media)
        if not found:
            return
        last = (len(tokens) - 1) // self.size
        end = self.random.randint(min(here["accepted"] + 1, last), last) if last else 0
        brought = {}
        for group, (_, kind, _) in enumerate(self.recipe["groups"]):
            _, required = self.both("required", group, end)
            wanted = set(required)
            if kind[0] in ("SlidingWindow", "ChunkedAttention") and self.random.random() < 0.4:
                wanted |= {at for at in range(here["accepted"], end) if self.random.random() < 0.5}
            held = here["held"][group]
            missing = sorted(at for at in wanted if at >= len(held) or not held[at])
            if missing and self.random.random() < 0.05:
                missing.pop(self.random.randrange(len(missing)))
            brought[group] = missing
        if self.random.random() < 0.8:
            self.both("take_copies")
        name = self.name()
        array = np.array(tokens, np.int32)
        begun, _ = self.both("restore", name, (array, scope, media), end, brought)
        if begun:
            self.restores.append(name)
            if self.random.random() < 0.6:
                self.act_restored()

    def act_restored(self):
        if self.restores:
            name = self.random.choice(self.restores)
            if self.random.random() < 0.8:
                self.both("restored", name)
            if self.random.random() < 0.1:
                self.both("restored", name)
            self.both("leave_restore", name)
            self.restores.remove(name)
            if self.random.random() < 0.1:
                self.both("restored", name)

    def act_hold(self):
        name = self.pick()
        if name is not None:
            hold = self.name()
            if self.both("hold", hold, name)[0]:
                self.holds.append(hold)

    def act_let_go(self):
        if self.holds:
            name = self.random.choice(self.holds)
            self.both("let_go", name)
            self.holds.remove(name)
            if self.random.random() < 0.1:
                self.both("let_go", name)

    # -- calls that are refused ------------------------------------------------------------

    def act_bad(self):
        """Make a call that most states refuse, on a sequence of any state."""
        calls = bad_anywhere(self)
        if self.random.random() < 0.5:
            calls = bad_on_any(self)
        call, *args = self.random.choice(calls)
        self.both(call, *args, touched=[n for n in args[:1] if type(n) is int and n in self.live])


FEATURED = frozenset(NEEDS.values()) | {
    "truncate", "fits", "explain", "evict", "compact", "resize", "restore",
    "checkpoint", "what_if", "drawn", "usage", "kept", "bad", "reset",
}  # fmt: skip
