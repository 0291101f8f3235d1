"""Lives of an engine that reuses passages, beside plain forwards of its model in each of its states.

    model      two LoRA adapters or none, and two values of its weights: a state; it changes between two steps and in one
    company    tenants with salts; each knows the texts it has asked for, and so what it may find
    requests   passages of one pool in any order behind several heads; plain ones of the very tokens of such a prompt,
               cut within a passage, or gone on with from its answer

What must hold after every step: each block in the tree, each capture, whatever is placed and each running sequence has
the K and V of a plain forward, as far as it says that it is exact; and nobody finds what it has not asked for.
"""

import shutil
import tempfile
from collections import defaultdict
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from passages_help import GATES, prompt
from passages_plain_help import AskedFor, Changing, Claim, check, logits, owner_of

from quire import ops
from quire.core import Scope
from quire.engines.loop import Engine, SamplingParams
from quire.engines.purging import of_tenant
from quire.errors import NotRelocatable, OutOfBlocks, TenantPurged
from quire.tensors.copy import gather_into
from quire.tiers import Disk, Host
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stack import TierStack
from quire_passages import Passages, Segments
from quire_passages.verdict import PolicyOutcome

SCOPES = (
    None,
    Scope(salt="a"),
    Scope(tenant="t", salt="x"),
    Scope(tenant="t", salt="y"),
    Scope(lora="x"),
)
POOL = prompt(seed=3, sizes=(10, 9, 7, 17, 9, 4))
HEADS = (POOL.head, POOL.head[:4], POOL.head[:0])
GIVEN = [prompt(seed=at, sizes=(10, 9, 8, 7, 3)) for at in (8, 9)]
"""Prompts of an operator."""

TIE = 2e-3
_ALLOWED = 32


class Life:
    """An engine, its model, what lies below it, and what was asked of it."""

    def __init__(self, *, passages, tiers, write, **options):
        self.changing = Changing()
        self.folder = Path(tempfile.mkdtemp(prefix="quire-life-"))
        given = {"min_tokens": 2, "gates": GATES, "audit": 1, **passages}
        if given.get("warm") == "disk":
            given["warm"] = f"disk:{self.folder}/warm?capacity=16MiB"
        given["verdicts"] = self.folder / "verdicts" if given.get("verdicts") else None
        self.passages = Passages(**given)
        self.options = {"debug_nan": True, "clock": lambda: 0.0, **options}
        self.tiers, self.write = tiers, write
        self.host = self._stack([Host("16MiB")]) if tiers == "host" else None
        self.states, self.claims, self.wrong = {}, [], []
        self.texts, self.asked = [], {}
        self.known, self.seen, self.kept = defaultdict(list), defaultdict(set), defaultdict(set)
        self.judged = defaultdict(int)
        self.given = {text for each in self.passages.prompts for text in each.passage_texts}
        self.due, self.is_hit = None, False
        self.open()

    def _stack(self, tiers):
        return TierStack(tiers, StackSettings(gate=False, busy_share=1.0, write=self.write))

    def open(self):
        """Begin a process over what lies on disk and in the host's tier."""
        stack = self.host
        if self.tiers == "disk":
            stack = self.stack = self._stack([Disk(self.folder / "kv", "16MiB")])
        self.engine = Engine(
            self.changing.model, passages=self.passages, tiers=stack, **self.options
        )
        self.own = own = self.engine._companions[-1]
        self._tried, own.passages.tried = own.passages.tried, self._trying
        self._blended, own._blended = own._blended, self._blending
        self._keep, own.passages.keep = own.passages.keep, self._keeping
        forward = self.engine._forward
        own._runs.logits, forward.rows = (
            self._hitting(own._runs.logits),
            self._hitting(forward.rows),
        )
        self.engine.when_computing(self._hit)
        self.bound(None)

    def restart(self, state):
        """End the process, and begin another one with the model in a state."""
        self.due = None
        self.engine.close()
        if self.tiers == "disk":
            self.stack.close()
        self.asked.clear()
        if self.passages.warm is None or self.passages.warm.startswith("host"):
            self.seen.clear()
            self.kept.clear()
        if self.tiers is None:
            self.known.clear()
        if self.passages.verdicts is None:
            self.judged.clear()
        self.changing.turn(state)
        self.open()

    def turn(self, state):
        """Change the model between two steps, and perhaps look at it."""
        self.changing.turn(state)

    def end(self):
        """Answer all that was asked, and see that nothing is held."""
        self.due = None
        for _ in range(3000):
            if not self.engine.has_unfinished():
                break
            self.step()
        assert not self.engine.has_unfinished()
        assert not self.asked
        self.check()
        assert not self.engine.manager.sequences
        self.engine.close()
        if self.tiers is not None:
            (self.host or self.stack).close()

    def leave(self):
        """Remove what lies on disk."""
        shutil.rmtree(self.folder)

    # -- what is asked -----------------------------------------------------------------------

    def bound(self, scope):
        """Return a scope for the model as it is; a state may have another name once weights were written."""
        bound = self.engine.scope(scope)
        state = self.changing.state
        assert self.states.setdefault(bound.model, state) == state
        return bound

    def ask(self, prompt, scope, max_tokens, n=1, **options):
        """Ask for a prompt, in segments or not; what no pool can hold is not asked."""
        segments = prompt if isinstance(prompt, Segments) else None
        tokens = prompt.tokens if segments else np.asarray(prompt, np.int32)
        parts = segments and [segments.head, *segments.passages, segments.question]
        given = {"segments": parts} if segments else tokens.tolist()
        params = SamplingParams(temperature=0, max_tokens=max_tokens, n=n, ignore_eos=True)
        with suppress(OutOfBlocks):
            name = self.engine.add_request(given, params, scope=scope, **options)
            bound = self.bound(scope)
            self.asked[name] = AskedFor(tokens, segments, scope, bound, self.changing.state)
            self.known[bound].append(tokens.tobytes())
            self.texts.append((tokens, scope))
            if segments:
                self._see(bound, segments)
                self.judged[owner_of(bound)] += 1

    def abort(self, name):
        """End a request at once."""
        self.engine.abort(name)
        del self.asked[name]

    def capture(self, segments, scope):
        """Capture passages ahead of time."""
        self._see(self.bound(scope), segments)
        with suppress(RuntimeError, NotRelocatable):
            self.own.passages.capture(segments.passages, segments.head, scope)

    def _see(self, bound, segments):
        self.seen[bound].update((segments.head.tobytes(), ids) for ids in segments.passage_texts)

    def _keeping(self, bound, variants):
        """Look at what is captured: passages that were asked for."""
        new = list(variants)
        is_given = bound.tenant is bound.salt is None
        for each in new:
            pair = each.head, each.ids
            if not (pair in self.seen[bound] or (is_given and each.ids in self.given)):
                self.wrong.append(AssertionError((bound, each.name)))
            self.kept[bound].add(pair)
            if each.kind == "isolated" and self.passages.share_isolated:
                self.kept[None, bound.model, bound.lora].add(pair)
        return self._keep(bound, new)

    def allow(self, scope):
        """Have a tenant's verdict serve a policy, as after many prompts that went well."""
        bound, blending = self.bound(scope), self.own.passages.tried(self.bound(scope))
        verdict = self.own.passages.verdict(bound, blending)
        self.judged[owner_of(bound)] += 0 if verdict is None else _ALLOWED
        for _ in range(0 if verdict is None else _ALLOWED):
            verdict.add({each.name: PolicyOutcome(32, 32, 0.0, 0.5) for each in verdict.policies})

    # -- what happens ------------------------------------------------------------------------

    def arm(self, count, what):
        """Have the model's weights change, or a part of it fail, once it has computed so often."""
        self.due = [count, what]

    def _hitting(self, call):
        def hitting(*given, **named):
            self._hit()
            return call(*given, **named)

        return hitting

    def _hit(self):
        if self.due is None:
            return
        self.due[0] -= 1
        if self.due[0] == 0:
            (_, what), self.due = self.due, None
            self.is_hit = True
            if what == "fail":
                raise RuntimeError("a part of the model broke")
            is_changed, adapter = self.changing.state
            self.changing.turn((not is_changed, adapter))

    def _trying(self, bound):
        """Have the gate try the model undisturbed, and what blends be hit as well."""
        with self._undisturbed():
            found = self._tried(bound)
        if not isinstance(found, NotRelocatable) and "_run" not in vars(found.rows):
            found.rows._run = self._hitting(found.rows._run)
        return found

    @contextmanager
    def _undisturbed(self):
        due, self.due = self.due, None
        yield
        self.due = due

    def _blending(self, job, plan):
        """Look at what is placed; an engine goes on where placing fails, so that it is told later."""
        try:
            self._look(job, plan)
        except AssertionError as error:
            self.wrong.append(error)
        return self._blended(job, plan)

    def _look(self, job, plan):
        """Check that what is placed is the asker's own, of its adapter, behind its head."""
        head, bound = plan.segments.head.tobytes(), job.scope
        for each, ids in zip(plan.placements, plan.segments.passage_texts, strict=True):
            if (variant := each.variant) is None:
                continue
            assert (variant.ids, variant.head) == (ids, head), variant.name
            common = self.kept[None, bound.model, bound.lora]
            if variant.kind == "isolated":
                assert (head, ids) in self.kept[bound] | common, variant.name
            else:
                text, asked = variant.before + ids, list(self.known[bound])
                if bound.tenant is bound.salt is None:
                    asked += [given.text for given in self.passages.prompts]
                assert any(known.startswith(text) for known in asked), variant.name
            self._claim(variant, self.states[bound.model])

    def step(self):
        """Compute a step, and look at the answers."""
        self.is_hit = False
        outputs = self.engine.step()
        self.bound(None)
        for output in outputs:
            self._take(output, self.asked[output.request_id])
            if output.finished:
                del self.asked[output.request_id]

    def purge(self, scope):
        """Purge a tenant: it has asked for nothing then."""
        is_own = of_tenant(scope or Scope())
        told = self.engine.purge(scope or Scope())
        assert told.is_complete, told.reason
        for held in (self.known, self.seen, self.kept, self.judged):
            for each in [each for each in held if isinstance(each, Scope) and is_own(each)]:
                del held[each]
        self.texts = [each for each in self.texts if not is_own(each[1] or Scope())]

    def bring_back(self, tokens, scope):
        """Have tiers give what they have of a text."""
        for each in self.engine._companions:
            if hasattr(each, "store"):
                each.store.onboard(tokens, self.bound(scope))
        num_found = self.engine.manager.probe(tokens, self.bound(scope)).num_tokens
        assert num_found <= self._num_known(self.bound(scope), tokens)

    # -- what must hold ----------------------------------------------------------------------

    def _take(self, output, asked):
        if output.error is not None:
            is_other = asked.state != self.changing.state
            is_purged = isinstance(output.error, TenantPurged)
            assert is_other or is_purged or self.is_hit, output.error
            return
        report, text = output.passages, asked.tokens
        if output.num_cached_tokens:
            assert output.num_cached_tokens <= self._num_known(asked.bound, text)
        for answer in output.outputs:
            whole = np.array([*text, *answer.token_ids], np.int32)
            self.known[asked.bound].append(whole.tobytes())
            if not output.finished:
                continue
            self.texts.append((whole, asked.scope))
            if report is None or report.exactness == "exact" or report.selector == "all":
                wanted = logits(asked.state, whole)[text.size - 1 : -1]
                chosen = wanted[range(len(wanted)), answer.token_ids]
                far = float((wanted.amax(-1) - chosen).max())
                assert far <= TIE, (far, report, answer.token_ids)
        if report is not None:
            parts = report.exact_tokens, report.moved_tokens, report.recomputed_rows
            assert sum(parts) + report.computed_tokens == text.size

    def _num_known(self, bound, tokens):
        """Return how many first tokens of a text a scope has asked for or was answered."""
        most = 0
        for text in self.known[bound]:
            other = np.frombuffer(text, np.int32)
            size = min(other.size, tokens.size)
            differ = np.flatnonzero(other[:size] != tokens[:size])
            most = max(most, int(differ[0]) if differ.size else size)
        return most

    def check(self):
        """Compare all that is held with plain forwards."""
        engine = self.engine
        engine._forward.copy()
        ops.check(engine.manager)
        engine.scheduler.check()
        for scope, root in engine.manager.kernel.tree.roots.items():
            self._check_below(root, self.states.get(scope.model), b"", [])
        for name, asked in self.asked.items():
            for job in engine._requests[name].answers if name in engine._requests else ():
                if job.state == "running":
                    self._check_running(job, asked)
        self._check_captures()
        for owner, verdict in self._verdicts():
            assert verdict.num_prompts <= self.judged[owner], owner
        claims, self.claims = self.claims, []
        check(claims)
        if self.wrong:
            raise self.wrong[0]

    def _verdicts(self):
        held = self.own.passages._verdicts
        return list(held._verdicts.items()) if held else []

    def _check_below(self, node, state, text, blocks):
        text, blocks = text + bytes(node.key), blocks + (list(node.blocks[0]) if node.key else [])
        if not node.children and blocks:
            layers = self._read(blocks, len(text) // 4)
            self.claims.append(Claim(layers, state, text, what="a block of the tree"))
        for child in node.children.values():
            self._check_below(child, state, text, blocks)

    def _check_running(self, job, asked):
        report, exact = job.request.passages and job.request.passages.report, job.seq.computed
        if report is not None and report.selector != "all":
            spans = zip(asked.segments.spans, report.details, strict=True)
            moved = (start for (start, _), each in spans if each.variant and not each.is_exact)
            exact = min(exact, next(moved, exact))
        if exact:
            text, layers = job.known(0, exact).tobytes(), self._read(job.seq.block_ids(0), exact)
            self.claims.append(Claim(layers, asked.state, text, what=("running", report)))

    def _read(self, blocks, num_tokens):
        pool = self.engine._forward.pools[0]
        heads, width = 2, 16
        found = [
            (torch.empty(heads, num_tokens, width), torch.empty(heads, num_tokens, width))
            for _ in pool.k
        ]
        gather_into(pool, np.asarray(blocks, np.int32), num_tokens, found)
        return found

    def _check_captures(self):
        store = self.own.passages.store
        store.check()
        for (is_shared, scope), each in store._order.values():
            whose = (None, scope.model, scope.lora) if is_shared else scope
            assert (each.head, each.ids) in self.kept[whose], (scope, each.name)
            assert not is_shared or each.kind == "isolated"
            self._claim(each, self.states[scope.model])

    def _claim(self, variant, state):
        text, layers = variant.before + variant.ids, variant.kv.layers
        what = (variant.name, variant.rounded)
        self.claims.append(Claim(layers, state, text, variant.start, variant.rounded, what))
