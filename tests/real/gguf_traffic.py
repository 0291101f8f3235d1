"""Random requests to engines over a real GGUF file, whose logits are compared with those of llama.cpp alone.

request    a prompt of real text: a head of one from before, up to a block's border, beside it, longer than the window,
           up to the longest of the context; an answer of one from before; several answers; greedy or drawn; guessed
           tokens; tenants, hints, priorities, retained, partly stored
between    aborts, pins, dropped blocks, forgotten prompts, purged tenants, residents that have to go
engine     cells for one to five prompts, sequences that run out, blocks that run out (preemption), host memory of
           some blocks, a disk that outlives each engine
llama.cpp  fails before, within and behind a batch, or has no cells
"""

import random
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
from gguf_alone import LlamaAlone
from gguf_watch import Rows, Watch
from loop_help import nothing_held

from quire import Hint, Scope, ops
from quire.engines.gguf import GgufModel
from quire.engines.gguf.context import NoCells
from quire.engines.loop import Engine, SamplingParams
from quire.errors import OutOfBlocks, PinBudgetExceeded, RequestFailed

SCOPES = (*[None] * 5, Scope(tenant="a"), Scope(tenant="b"), Scope(salt="s"))
HINTS = (Hint(), Hint(), Hint("never"), Hint("session", session_id="s"))
LONG = 700
MORE_PLACES = 10
"""Random places of a text whose logits at two places are half as far from each other as any were so far.

Some texts are more sensitive than others, and the farthest that is looked for is theirs.
"""

MOST_PLACES = 50
"""Random places of a text whose logits by quire are farther from llama.cpp's than any of its own so far."""


class RealTraffic:
    """Lives of engines over one file; `counts` says what happened, `own` and `worst` are distances of logits.

    own    of llama.cpp to itself, at two places of a context; `worst`: of quire to llama.cpp in an empty one, by whose
           attention computes
    gap    of flips: what the likeliest token has before the one that quire has drawn
    """

    def __init__(self, path, seed, folder, *, sources=None, tell=str):
        self.random, self.folder, self.tell = random.Random(seed), Path(folder), tell
        self.path, self.name = path, path.stem
        self.model = GgufModel(path, n_ctx=4096, n_threads=1, attention="llama.cpp")
        self.width = 2 if self.model.is_windowed else 1
        self.alone, self.rows, self.counts = LlamaAlone(self.model), Rows(), Counter()
        self.own, self.gap = 0.0, 0.0
        own = ["quire"] if self.model._library.has_attention else []
        self.worst = dict.fromkeys(["llama.cpp", *own], 0.0)
        self.sources = sources or self._documentation()
        self.texts = [text[:150] for text in self.sources]

    def close(self):
        self.alone.close()
        self.model.close()

    def run(self, num_requests, *, at_once=25):
        """Ask so many requests, of a new engine after every `at_once`."""
        while num_requests > 0:
            self._live(min(num_requests, at_once))
            num_requests -= at_once
            self.tell(self.told())
        return self

    def told(self):
        """Distances and counts, as a line."""
        names = ("requests", "tokens", "placements", "cached", "from tiers")
        names += ("preemptions", "aborted", "failed")
        counts = ", ".join(f"{self.counts[each]} {each}" for each in names)
        worst = " and ".join(f"{far:.4f} (attention {whose})" for whose, far in self.worst.items())
        rows = ", ".join(f"{count} rows {name}" for name, count in self.rows.counts.items())
        return (
            f"{self.name}: llama.cpp to itself {self.own:.4f}, quire to llama.cpp {worst}, "
            f"{self.counts['flips']} flips, the widest gap {self.gap:.4f}; {counts}; {rows}"
        )

    def _documentation(self):
        """Token ids of real texts: the documentation of some modules."""
        modules, tokenizer = (random, Path, np.ndarray, np.random.Generator), self.model.tokenizer()
        return [tokenizer(each.__doc__ * 3)["input_ids"][:LONG] for each in modules]

    # -- what is drawn ---------------------------------------------------------------------

    def _engine(self):
        pick = self.random.choice
        num_ids, size = pick((256, 256, 256, 9)), pick((8, 16, 16, 32))
        running = min(pick((1, 2, 4, 6)), (num_ids - 1) // self.width)
        library = self.model._library
        own = library.llama_max_parallel_sequences
        library.llama_max_parallel_sequences = lambda: num_ids
        self.model._n_ctx = pick((768, 1024, 2048))
        self.model.attention = pick([*self.worst])
        disk = f"disk:{self.folder / f'kv{size}'}?capacity=1GiB"
        try:
            engine = Engine(
                self.model,
                block_size=size,
                num_blocks=pick((LONG + 68, 1100, 1600, 3000)) // size,
                max_running=running,
                max_step_tokens=running + pick((40, 130, 400)),
                max_prefill_tokens=pick((None, None, 64)),
                policy=pick(("lru", "lru", "fifo", "lfu")),
                tiers=pick((None, [disk], [disk], ["host:8MiB", disk])),
                debug_nan=True,
            )
        finally:
            library.llama_max_parallel_sequences = own
        engine._forward.residents.idle_steps = pick((-1, 0, 5, 64))
        return engine

    def _prompt(self, engine):
        pick, text = self.random.choice, self.random.choice(self.texts)
        border = engine.manager.block_size * self.random.randrange(1, 12) + pick((-1, 0, 1))
        kept = text[: pick((len(text), border, border, border))]
        if self.random.random() < 0.04:  # longer than a window
            source = pick(self.sources)
            kept = source[: self.random.randrange(480, LONG)]
        longest = engine.max_model_len - 1
        if self.random.random() < 0.02:
            kept = (pick(self.sources) * 4)[: longest - pick((0, 1, 20))]
        more = pick((0, 1, 2, 5, 30))
        return (kept + self.random.sample(pick(self.sources), more))[:longest]

    def _ask(self, engine, mine):
        pick, prompt = self.random.choice, self._prompt(engine)
        params = SamplingParams(
            temperature=pick((0, 0, 0, 1.0)),
            seed=self.random.randrange(99),
            max_tokens=pick((1, 4, 4, 8, 12, 24)),
            n=pick((1, 1, 1, 1, 2, 3)),
            speculation=pick((0, 0, 0, 3)),
            ignore_eos=True,
        )
        options = {
            "scope": pick(SCOPES),
            "hint": pick(HINTS),
            "priority": pick((0, 0, 0, 5)),
            "retain_s": pick((None, None, None, 0.5)),
            "store_until": pick((None, None, None, None, len(prompt) // 2)),
        }
        mine[engine.add_request(prompt, params, **options)] = prompt, params
        self.counts["requests"] += 1

    # -- what happens ----------------------------------------------------------------------

    def _live(self, left):
        engine, mine = self._engine(), {}
        watch, self.pin = Watch(engine, self.rows), None
        engine.when_computing(lambda: self._look(engine))
        while left or engine.has_unfinished():
            while left and len(mine) < 8 and self.random.random() < 0.5:
                with suppress(OutOfBlocks):  # held by a pin
                    self._ask(engine, mine)
                left -= 1
            if self.random.random() < 0.08:
                self._meddle(engine, mine, watch)
            with self._failing():
                told = engine.step()
            engine._forward.residents.check()
            if self.random.random() < 0.1:
                watch.check()
                ops.check(engine.manager)
                engine.scheduler.check()
            for each in told:
                if each.finished:
                    self._compare(each, *mine.pop(each.request_id), watch)
        self._unpin()
        self.counts["cached"] += engine.stats().cached_tokens
        self.counts["preemptions"] += engine.stats().preemptions
        engine.close()
        nothing_held(engine)
        watch.check_stored()

    def _look(self, engine):
        """Let a resident go, sometimes, though its request runs."""
        if self.random.random() < 0.08:
            with suppress(NoCells):
                engine._forward.residents.make_room(())
                self.counts["dropped"] += 1

    def _meddle(self, engine, mine, watch):
        prompt = self._prompt(engine)
        match self.random.choice(("abort", "abort", "pin", "drop", "forget", "purge")):
            case "abort" if mine:
                gone = self.random.choice(list(mine))
                engine.abort(gone)
                del mine[gone]
                watch.logits.pop(gone, None)
                self.counts["aborted"] += 1
            case "pin":
                self._unpin()
                with suppress(PinBudgetExceeded):
                    self.pin = ops.pin(engine.manager, prompt[:100])
            case "drop":
                ops.reclaim(engine.manager, self.random.randrange(1, 30))
            case "forget":
                ops.invalidate(engine.manager, prompt)
            case "purge" if self.random.random() < 0.3:
                engine.purge("a")
                self.counts["purged"] += 1
            case _:
                pass

    def _unpin(self):
        if self.pin is not None:
            self.pin.close()
        self.pin = None

    def _failing(self):
        """Have llama.cpp fail in the next step, sometimes."""
        return (
            Failing(self.model._library, self.random)
            if self.random.random() < 0.02
            else nullcontext()
        )

    # -- what is compared ------------------------------------------------------------------

    def _compare(self, told, prompt, params, watch):
        rows, whose = watch.logits.pop(told.request_id, {}), self.model.attention
        self.counts["from tiers"] += sum(told.metrics.loaded_tokens.values())
        if told.error is not None:
            assert isinstance(told.error, RequestFailed), told.error
            said = str(told.error)
            known = "llama_decode returned", "no room for", "its tenant was purged"
            assert any(each in said for each in known), said
            self.counts["failed"] += 1
            return
        for answer in told.outputs:
            ids = answer.token_ids
            text = prompt + ids[:-1]
            right = self.alone.logits(text, len(ids))
            spread = Spread(right)
            self._place(text, spread)
            for _ in range(1, MORE_PLACES):
                if spread.width > self.own / 2:
                    self._place(text, spread)
            farthest = 0.0
            for at, token in enumerate(ids):
                found = rows[tuple(text[: len(prompt) + at])]
                distance = max(float(np.abs(each - right[at]).max()) for each in found)
                self.worst[whose] = max(self.worst[whose], distance)
                gap = float(right[at].max() - right[at][token])
                if params.temperature == 0 and gap:
                    self.counts["flips"] += 1
                    self.gap = max(self.gap, gap)
                    distance = max(distance, gap)
                farthest = max(farthest, distance)
            for _ in range(MOST_PLACES):
                if farthest > self.own:
                    self._place(text, spread)
            self.counts["tokens"] += len(ids)
        if len(self.texts) == 12:
            del self.texts[self.random.randrange(12)]
        self.texts.append(
            (prompt + told.outputs[0].token_ids)[: self.random.choice((80, 200, 330))]
        )

    def _place(self, text, spread):
        """Have llama.cpp compute a text elsewhere."""
        spread.add(self.alone.elsewhere(text, len(spread.least)))
        self.own = max(self.own, spread.width)
        self.counts["placements"] += 1


class Spread:
    """The least and the greatest logits of a text over its places."""

    def __init__(self, logits):
        self.least = self.greatest = logits

    def add(self, logits):
        self.least, self.greatest = (
            np.minimum(self.least, logits),
            np.maximum(self.greatest, logits),
        )

    @property
    def width(self):
        """The distance of the two that are farthest from each other."""
        return float((self.greatest - self.least).max())


class Failing:
    """Has `llama_decode` fail once within: before, in the middle of, or behind a batch, or for want of cells."""

    def __init__(self, library, draw):
        self.library, self.own, self.draw = library, library.llama_decode, draw

    def __enter__(self):
        self.library.llama_decode = self._decode

    def __exit__(self, *_):
        self.library.llama_decode = self.own

    def _decode(self, context, batch):
        self.library.llama_decode = self.own
        code = self.draw.choice((1, 1, 2, -2, -3))
        if code in (2, -3):  # those that leave what was computed before
            batch.n_tokens = self.draw.randrange(batch.n_tokens + 1)
            if batch.n_tokens:
                assert self.own(context, batch) in (0, 1)
        return code
