"""Requests of every kind, at random, to engines of one model; the plain model's answers beside them.

Every request draws one of each of these, and some at once with others:

    prompt    new; one from before again, several of them at once; one from before cut; either with more behind it;
              a conversation: prompt and answer of one from before, and more
              where two part, and how long they are: a block's border, one token before, one behind it; the
              same of the model's window or chunk, once and twice; the longest that the engine takes
    scores    of no prompt token, of each, with the likeliest ones; and no answer
    answer    length; n; tokens guessed ahead; ended by length, the model's end, a stop token, an abort before or
              within the prompt or the answer, a deadline, or an exception in the forward
    rank      priority; tenant
    choice    greedy, beside the plain model; drawn, with every rule there is, beside the same request alone in an
              engine with room for it
    rule      a form of every kind, which the answer matches; allowed tokens; bad words; texts that end the answer;
              greedy ones are the plain model's likeliest tokens of those that may come
    cache     scope; how much is stored; retained; a hint; pinned, and dropped, by others
    company   plain `model.generate` and `PrefixCache.generate` between two steps; an engine of the same model; both
              plain ones on another thread, during steps (`GeneratingBeside`); a weight written, as it is, during a step

and every engine:

    blocks    size; so many that all fit, or that two or three requests fill them, and are preempted
    step      requests at once, from 1; tokens, from one more than these; tokens of one prompt, from 1; its time

What must hold: an answer is the plain one, whatever ended it (`loop_help.ties`); it grows from output to output; an
error is only told to whom it happened; and at the end nothing is held.
"""

from collections import Counter
from contextlib import suppress
from copy import deepcopy
from functools import partial
from random import Random
from threading import Event, Thread, get_ident

import loop_help
import msgspec
import torch
from loop_help import (
    EOS,
    LONGEST,
    VOCAB,
    check_scores,
    make_cache,
    nothing_held,
    plain_answer,
    ties,
)
from rules_help import FORMS, check_form, check_greedy, letters, text_of

from quire import Hint, Scope, ops
from quire.engines.loop import Engine, SamplingParams
from quire.errors import DeadlinePassed, OutOfBlocks, PinBudgetExceeded, QueueTimeout, RequestFailed

SCOPES = (
    None,
    None,
    None,
    None,
    None,
    Scope(salt="a"),
    Scope(salt="b"),
    Scope(salt="b", tenant="a"),
    Scope(salt="c", tenant="a"),
    Scope(tenant="b"),
)
HINTS = (Hint(), Hint(), Hint("never"), Hint("session", session_id="s"))
KEPT_TEXTS = 12

# A pool that a few requests fill: they are preempted; and steps that cut prompts into pieces.
TIGHT = {
    "num_blocks": 26,
    "block_size": 4,
    "max_running": 6,
    "max_step_tokens": 23,
    "max_prefill_tokens": 9,
}


class Asked:
    """A request as it was sent, and what was told of it so far."""

    def __init__(self, prompt, params, form=None):
        self.prompt, self.params, self.form = prompt, params, form
        self.told = [[] for _ in range(params.n)]


class Traffic:
    """Lives of engines of one model; `counts` says what happened in them: requests, compared answers, ties, ..."""

    def __init__(self, model, seed):
        self.model, self.random = deepcopy(model), Random(seed)
        self._waits = Random(seed)  # of its own: the rest of the traffic is as without it
        self.counts = Counter()
        config = model.config
        self.span = getattr(config, "sliding_window", None) or getattr(
            config, "attention_chunk_size", None
        )
        self.texts = [self._tokens(60) for _ in range(2)]
        self.fails, self.raised, self._own = None, False, get_ident()
        for module in (
            self.model.modules()
        ):  # before anybody computes with it: later it would be another model
            module.register_forward_pre_hook(self._fail)
        self.cache, self.roomy = self._beside()
        self.pins, self.now = {}, 0.0

    def live(self, num_requests, **options):
        """Ask so many requests of an engine with these options, others drawn, and sometimes of a second one beside it."""
        engines = [self._engine(options) for _ in range(self.random.choice((1, 1, 2)))]
        asked = [{} for _ in engines]
        while num_requests > 0 or any(engine.has_unfinished() for engine in engines):
            which = self.random.randrange(len(engines))
            engine, mine = engines[which], asked[which]
            for _ in range(min(num_requests, self.random.choice((0, 0, 0, 1, 1, 2, 5)))):
                num_requests -= self._ask(engine, mine)
            if self.random.random() < 0.12:
                self._meddle(engine, mine)
            self.now += 1.0
            self._step(engine, mine)
        for engine, mine in zip(engines, asked, strict=True):
            assert not mine
            self.counts["preemptions"] += engine.stats().preemptions
            self.counts["cached tokens"] += engine.stats().cached_tokens
            self.counts["steps"] += engine.stats().steps
            self._unpin(engine)
            engine.close()
            nothing_held(engine)
        self.counts["engines"] += len(engines)
        return self

    def lives(self, num_lives, num_requests, **tight):
        """Live so often, in turn with engines of any options and with these."""
        for at in range(num_lives):
            self.live(num_requests, **(tight if at % 2 else {}))
        return self

    # -- what is drawn ---------------------------------------------------------------------

    def _beside(self):
        """A `PrefixCache` of the model, and an engine with room for all that it is asked."""
        roomy = Engine(self.model, letters(), num_blocks=100, block_size=8)
        return make_cache(self.model, block_size=4, num_blocks=30), roomy

    def _engine(self, options):
        engine = Engine(self.model, letters(), **self._drawn() | options)
        self._write()
        engine.scope()  # reads that weight whole: written again as it is, it is known to be the same
        engine.when_computing(partial(self._look, engine))
        return engine

    def _drawn(self):
        """Random options of an engine."""
        pick, size = self.random.choice, self.random.choice((1, 3, 4, 8, 16))
        running = pick((1, 2, 3, 6, 8))
        return {
            "debug_nan": True,
            "clock": lambda: self.now,
            "block_size": size,
            "num_blocks": pick((70, 100, 130, 400)) // size + 1,
            "max_running": running,
            "max_step_tokens": running + pick((1, 3, 17, 30, 200)),
            "max_prefill_tokens": pick((None, None, 1, 5, 9)),
            "max_inter_token_s": self._waits.choice((None, None, 1e-4, 1.0)),
            "policy": pick(("lru", "lru", "fifo", "lfu")),
        }

    def _tokens(self, num_tokens):
        return [self.random.randrange(3, VOCAB) for _ in range(num_tokens)]

    def _border(self, engine):
        """A length that means something to the engine or the model, or one beside it."""
        steps = [engine.manager.block_size * self.random.randrange(6), self.random.randrange(60)]
        steps += [self.span, 2 * self.span] if self.span else []
        return max(self.random.choice(steps) + self.random.choice((-1, 0, 1)), 0)

    def _prompt(self, engine):
        text = self.random.choice(self.texts)
        kept = self.random.choice((0, len(text), len(text), *[self._border(engine)] * 6))
        return text[:kept] + self._tokens(self.random.choice((0, 0, 1, 2, 5, 11, 21))) or [7]

    def _choice(self):
        """Random sampling parameters of a request."""
        pick = self.random.choice
        if pick((True, True, True, False)):
            return {"temperature": 0, "top_p": pick((1, 0.5)), "seed": pick((None, 3))}
        return {
            "temperature": pick((0.3, 1.0, 1.7)),
            "top_p": pick((1, 1, 0.9)),
            "top_k": pick((0, 0, 12)),
            "min_p": pick((0, 0, 0.05)),
            "repetition_penalty": pick((1, 1, 1.3)),
            "presence_penalty": pick((0, 0, 0.7)),
            "frequency_penalty": pick((0, 0, -0.4)),
            "logit_bias": pick((None, None, {5: 2.0, 9: -100.0})),
            "min_tokens": pick((0, 0, 1)),
            "ignore_eos": pick((False, False, True)),
            "logprobs": pick((None, None, 2)),
            "seed": self.random.randrange(9),
        }

    def _rule(self):
        """Random rules of a request beside its sampling parameters, and its form; mostly none."""
        draw = self._waits
        match draw.choice((*[None] * 9, "form", "form", "allowed", "bad", "stop")):
            case "form":
                form = draw.choice(FORMS)
                return {
                    "structured_outputs": form.asked,
                    "min_tokens": 0,
                    "ignore_eos": False,
                }, form
            case "allowed":
                return {"allowed_token_ids": [EOS, *draw.sample(range(3, VOCAB), 30)]}, None
            case "bad":
                return {"bad_words": [*self._words(3, 1), *self._words(40, 2)]}, None
            case "stop":
                return {"stop": [*self._words(3, 1), *self._words(20, 2)]}, None
            case _:
                return {}, None

    def _words(self, number, length):
        """Random texts of so many letters."""
        draw = self._waits
        return [text_of(draw.choices(range(3, VOCAB), k=length)) for _ in range(number)]

    def _ask(self, engine, mine):
        """Ask one prompt, or the same several times at once; return how many requests that are."""
        pick, prompt = self.random.choice, self._prompt(engine)
        stops = pick((None, None, None, self._tokens(20)))
        longest = engine.max_model_len - 1
        if pick(range(20)) == 0:
            prompt = (prompt + self._tokens(longest))[: longest - pick((0, 1, 4))]
        prompt = prompt[:longest]
        copies = pick((1, 1, 1, 1, 1, 2, 4))
        for _ in range(copies):
            params = SamplingParams(
                max_tokens=pick((1, 2, 7, 13, LONGEST)),
                n=pick((1, 1, 1, 1, 3)),
                speculation=pick((0, 0, 0, 1, 4)),
                stop_token_ids=stops,
                **self._choice(),
            )
            if self._waits.random() < 0.2:
                top, min_tokens = self._waits.choice((0, 1, 3)), params.min_tokens
                most = self._waits.choice((params.max_tokens, params.max_tokens, min_tokens))
                params = msgspec.structs.replace(params, prompt_logprobs=top, max_tokens=most)
            rule, form = self._rule()
            params = msgspec.structs.replace(params, **rule)
            options = {
                "scope": pick(SCOPES),
                "priority": pick((0, 0, 0, 5, -1)),
                "deadline_s": pick((None, None, None, None, None, None, 9, 40)),
                "max_wait_s": self._waits.choice((*[None] * 20, 3, 20)),
                "store_until": pick((None, None, None, None, 0, len(prompt) // 2)),
                "retain_s": self._waits.choice((*[None] * 6, 3, 200)),
                "hint": pick(HINTS),
            }
            try:
                request_id = engine.add_request(prompt, params, **options)
            except OutOfBlocks:  # what is not stored is held beside a window
                assert options["store_until"] is not None
                self.counts["refused"] += 1
                continue
            mine[request_id] = Asked(prompt, params, form)
            self.counts["retained"] += options["retain_s"] is not None
            self.counts["requests"] += 1
        return copies

    # -- what happens ----------------------------------------------------------------------

    def _step(self, engine, mine):
        self.raised = False
        if self.random.random() < 0.01:  # some parts are never asked
            self.fails = self.random.choice([*self.model.modules()])
        outputs = engine.step()
        self.fails = None
        for output in outputs:
            self._take(output, engine, mine)
        if self.random.random() < 0.1:
            ops.check(engine.manager)
            engine.scheduler.check()

    def _look(self, engine):
        """See that a step reads the blocks of its requests; sometimes write a weight, so that it is computed again."""
        seqs = [job.open_seq for job in engine.scheduler._step.jobs]
        for group, tables in enumerate(engine._forward._tables):
            right = engine.manager.tables(seqs, group, -1).padded
            assert (tables[:, : right.shape[1]] == right)[right >= 0].all()
        if self.random.random() < 0.02:
            self._write()
            self.counts["written"] += 1

    @torch.no_grad()
    def _write(self):
        next(self.model.parameters()).mul_(1)

    def _fail(self, module, _):
        """Fail, where this part of the model is to fail on this thread."""
        if module is self.fails and get_ident() == self._own:
            self.raised = True
            raise RuntimeError("a part of the model broke")

    def _meddle(self, engine, mine):
        """Do something beside the requests."""
        prompt = self._prompt(engine)
        match self.random.choice(("abort", "abort", "plain", "cache", "pin", "drop", "forget")):
            case "abort" if mine:
                request_id = self.random.choice(list(mine))
                engine.abort(request_id)
                del mine[request_id]
                self.counts["aborted"] += 1
            case "plain":
                with torch.inference_mode():
                    self.model(torch.tensor([prompt], device=self.model.device))
            case "cache" if self.cache is not None:
                ids = torch.tensor([prompt], device=self.model.device)
                made = self.cache.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=5
                )
                self.counts["PrefixCache"] += 1
                self._compare(prompt, made[0, len(prompt) :].tolist(), 5)
            case "pin":
                self._unpin(engine)
                with suppress(PinBudgetExceeded):
                    self.pins[engine] = ops.pin(engine.manager, prompt)
                    self.counts["pins"] += 1
            case "drop":
                ops.reclaim(engine.manager, self.random.randrange(1, 9))
            case "forget":
                ops.invalidate(engine.manager, prompt)
            case _:
                pass

    def _unpin(self, engine):
        if engine in self.pins:
            self.pins.pop(engine).close()

    def _take(self, output, engine, mine):
        asked = mine[output.request_id]
        assert output.prompt_token_ids == asked.prompt
        assert 0 <= output.num_cached_tokens < len(asked.prompt)
        for answer, told in zip(output.outputs, asked.told, strict=True):
            assert answer.token_ids[: len(told)] == told
            told[:] = answer.token_ids
        if output.error is not None:
            what = type(output.error)
            assert (
                what in (DeadlinePassed, QueueTimeout)
                or (what is RequestFailed and self.raised)
                or (what is OutOfBlocks and engine in self.pins)
            ), output.error
            self.counts[what.__name__] += 1
        if not output.finished:
            return
        if (top := asked.params.prompt_logprobs) is not None:
            self.counts["scored"] += 1
            self.counts["scored and preempted"] += output.metrics.num_preemptions > 0
            whole, told = output.error is None, output.prompt_logprobs
            assert output.num_cached_tokens == 0
            check_scores(self.model, asked.prompt, told, top, whole=whole)
        del mine[output.request_id]
        most = min(asked.params.max_tokens, engine.max_model_len - len(asked.prompt))
        if asked.params.plain and not asked.params.stop:
            self._beside_plain(asked, output.outputs, most)
        else:
            self._beside_rules(asked, output, most)
            self._beside_alone(asked, output.outputs, most)
        self._remember(asked.prompt + output.outputs[0].token_ids)

    def _beside_plain(self, asked, answers, most):
        stops = asked.params.stop_token_ids or ()
        for answer in answers:
            got, whole = answer.token_ids, answer.finish_reason != "error"
            if not most:
                assert (got, answer.finish_reason in ("length", "error")) == ([], True)
                continue
            if whole:
                ended = "stop" if got[-1] in (EOS, *stops) else "length"
                assert answer.finish_reason == ended
            self._compare(asked.prompt, got, most, stops, whole=whole)

    def _beside_rules(self, asked, output, most):
        """Check the answers to a request with rules, if it has any."""
        params, form = asked.params, asked.form
        kind = (
            "formed"
            if form
            else "limited"
            if params.allowed_token_ids or params.bad_words
            else None
        )
        if kind is None or not most:
            return
        self.counts[kind] += 1
        self.counts[f"{kind} and scored"] += params.prompt_logprobs is not None
        self.counts[f"{kind} and preempted"] += output.metrics.num_preemptions > 0
        self.counts[f"{kind} and cached"] += output.num_cached_tokens > 0
        for answer in output.outputs:
            if form is not None:
                check_form(
                    form, answer.token_ids, answer.finish_reason, params.stop_token_ids or ()
                )
            if params.greedy:
                self.counts["compared"] += 1
                check_greedy(self.model, asked.prompt, params, form, answer.token_ids)

    def _beside_alone(self, asked, answers, most):
        if not most:
            assert all(answer.token_ids == [] for answer in answers)
            return
        params = msgspec.structs.replace(
            asked.params, max_tokens=most, speculation=0, prompt_logprobs=None
        )
        (alone,) = self.roomy.generate([asked.prompt], params)
        for answer, other in zip(answers, alone.outputs, strict=True):
            got, right = answer.token_ids, other.token_ids
            if answer.finish_reason == "error":
                assert got == right[: len(got)], (asked.prompt, params, got, right)
                continue
            assert got == right, (asked.prompt, params, got, right)
            assert (answer.finish_reason, answer.text) == (other.finish_reason, other.text)
            told = [
                [each[t].logprob for t, each in zip(got, a.logprobs or (), strict=False)]
                for a in (answer, other)
            ]
            torch.testing.assert_close(*map(torch.tensor, told), atol=10 * loop_help.TIE, rtol=0)
            self.counts["drawn"] += 1

    def _compare(self, prompt, got, max_tokens, stops=(), *, whole=True):
        self.counts["compared"] += 1
        self.counts["tokens"] += len(got)
        self.counts["ties"] += ties(self.model, prompt, got, max_tokens, stops, whole=whole)

    def _remember(self, text):
        if len(self.texts) == KEPT_TEXTS:
            del self.texts[self.random.randrange(KEPT_TEXTS)]
        self.texts.append(text[:90])


class GeneratingBeside:
    """Has another thread generate with the same model all the while, plainly and with a `PrefixCache`; `compared` counts.

    Raises on its way out what that thread found wrong.
    """

    def __init__(self, model):
        random = Random(1)
        self.model, self.compared, self.wrong = model, 0, None
        lengths = (1, 7, 12, 13, 20, 21, 22, 41)
        text = [random.randrange(3, VOCAB) for _ in range(max(lengths))]
        self._prompts = [text[:length] for length in lengths]
        self._cache = make_cache(model, block_size=4, num_blocks=30)
        self._ended, self._thread = Event(), Thread(target=self._run)
        for prompt in self._prompts:
            plain_answer(model, prompt, LONGEST)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()
        if self.wrong is not None:
            raise self.wrong

    def _run(self):
        try:
            while not self._ended.is_set():
                for generate in (self.model.generate, self._cache.generate):
                    prompt = self._prompts[self.compared % len(self._prompts)]
                    ids = torch.tensor([prompt], device=self.model.device)
                    made = generate(
                        ids, attention_mask=torch.ones_like(ids), max_new_tokens=LONGEST
                    )
                    ties(self.model, prompt, made[0, len(prompt) :].tolist(), LONGEST)
                    self.compared += 1
        except BaseException as error:  # noqa: BLE001 - it is raised by whoever waits
            self.wrong = error
