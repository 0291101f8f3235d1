"""Passages in an engine: placed as prompts are admitted, never stored as prefixes, captured when nobody waits."""

import contextlib
import copy
import sys
from contextlib import closing
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "differential"))

from passages_help import GATES, MOVED, made, passage_model_of, prompt

from quire import PrefixCache, ops
from quire.core import Scope
from quire.engines.loop import Engine, SamplingParams
from quire.engines.packed import model as packed_model
from quire.errors import ConfigError, OutOfBlocks, RequestFailed, TokensError
from quire.tensors.copy import gather_into
from quire_passages import (
    AllRows,
    Epic,
    KVDeviation,
    NoRows,
    Passages,
    QuestionRows,
    RandomRows,
    Segments,
)
from turns import drawn

SIZES = (21, 48, 40, 64, 56, 9)
GREEDY = SamplingParams(temperature=0, max_tokens=6)
FREE = {"target": None, "worth": 10.0, "min_tokens": 2, "gates": GATES, "capture": "isolated"}


@pytest.fixture(scope="module")
def model():
    return made("Llama", {})


def engine_of(model, selector, capture="isolated", **given):
    passages = Passages("64MiB", selector, **{**FREE, "capture": capture})
    return Engine(model, num_blocks=400, passages=passages, debug_nan=True, **given)


def turned(segments, order):
    passages = tuple(segments.passages[index] for index in order)
    return Segments(segments.head, passages, segments.question)


def asked(engine, *prompts, **options):
    """Ask for prompts in segments at once; return tokens and reports, with nothing held afterwards."""
    given = [{"segments": [each.head, *each.passages, each.question]} for each in prompts]
    outputs = engine.generate(given, GREEDY, **options)
    ops.check(engine.manager)
    assert engine.manager.num_active == 0
    return [(each.outputs[0].token_ids, each.passages) for each in outputs]


def plain(model, segments):
    engine = Engine(model, num_blocks=400)
    (output,) = engine.generate([segments.tokens.tolist()], GREEDY)
    return output.outputs[0].token_ids


def test_passages_are_captured_after_the_answer_and_placed_in_another_order(model):
    engine, segments = engine_of(model, AllRows()), prompt(sizes=SIZES)
    ((answer, report),) = asked(engine, segments)
    assert answer == plain(model, segments)
    assert report.exactness == "exact"
    assert report.captured == len(segments.passages)
    other = turned(segments, [2, 0, 3, 1])
    ((answer, report),) = asked(engine, other)
    assert report.exactness == "approximate"
    assert report.captured == 0
    assert report.recomputed_rows == 48 + 40 + 56
    assert answer == plain(model, other)


@pytest.mark.cases(2)
@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize(
    "selector",
    [
        NoRows(),
        Epic(5),
        RandomRows(0.3),
        KVDeviation(0.2, 1),
        KVDeviation(0.3, 2),
        QuestionRows(0.3),
    ],
    ids=lambda each: getattr(each, "name", None),
)
def test_blocks_hold_what_a_working_cache_would(model, selector, is_plain):
    """The rows that a selector chooses are computed over the blocks: K and V are those of `PassageModel.blend`."""
    engine, segments = engine_of(model, selector), prompt(sizes=SIZES)
    engine._forward.model.plain = is_plain
    asked(engine, segments)
    other, scope = turned(segments, [2, 0, 3, 1]), engine.scope()
    parts = [other.head, *other.passages, other.question]
    engine.add_request({"segments": parts}, SamplingParams(temperature=0, max_tokens=20))
    (output,) = engine.step()
    (job,) = engine._requests[output.request_id].answers
    end = other.spans[-1][1]
    store, text = engine._companions[-1].passages.store, other.head.tobytes()
    held = [store.variants(scope, ids, text)[0] for ids in other.passage_texts]
    blended = passage_model_of("llama").blend(other, held, selector)
    wanted = [blended.past.kv_layers[at].row(0, 0, end) for at in sorted(blended.past.kv_layers)]
    found = [tuple(map(torch.empty_like, layer)) for layer in wanted]
    gather_into(engine._forward.pools[0], job.seq.block_ids(0), end, found)
    for layer, right in zip(found, wanted, strict=True):
        for got, each in zip(layer, right, strict=True):
            torch.testing.assert_close(got, each, atol=1e-5, rtol=1e-4)
    assert output.passages.recomputed_rows == blended.rows.size
    assert output.outputs[0].token_ids[0] == int(blended.logits.argmax())
    engine.abort(output.request_id)
    ops.check(engine.manager)


def test_passages_in_a_tier_are_placed_by_the_next_engine(model, tmp_path):
    given = {**FREE, "warm": f"files:{tmp_path}/warm"}
    segments = prompt(sizes=SIZES)
    for exactness in ("exact", "approximate"):
        passages = Passages("64MiB", AllRows(), **given)
        with closing(Engine(model, num_blocks=400, passages=passages)) as engine:
            ((answer, report),) = asked(engine, segments)
        assert report.exactness == exactness
        assert answer == plain(model, segments)
    assert report.exact_tokens == 0  # rounded ones are exact nowhere


def test_several_requests_run_beside_one_another(model):
    engine, segments = engine_of(model, AllRows()), prompt(sizes=SIZES)
    asked(engine, segments)
    others = [turned(segments, order) for order in ([2, 0], [1, 3, 0], [3, 2, 1, 0], [1, 2])]
    for (answer, report), each in zip(asked(engine, *others), others, strict=True):
        assert answer == plain(model, each)
        assert report.fallback is None


def test_nothing_approximate_is_stored_as_a_prefix(model):
    engine, segments = engine_of(model, NoRows()), prompt(sizes=SIZES)
    asked(engine, segments)
    other = turned(segments, [1, 3, 2, 0])
    ((_, report),) = asked(engine, other)
    assert report.exactness == "approximate"
    scope = engine.scope()
    assert engine.manager.probe(other.tokens, scope).num_tokens <= segments.head.size
    (output,) = engine.generate([other.tokens.tolist()], GREEDY)
    assert output.passages is None
    assert output.num_cached_tokens <= segments.head.size
    assert output.outputs[0].token_ids == plain(model, other)


def test_what_was_exact_is_stored(model):
    engine, segments = engine_of(model, Epic(4)), prompt(sizes=(40, 48, 40, 9))
    asked(engine, segments)
    ((_, report),) = asked(engine, turned(segments, [1, 0]))
    assert report.exact_tokens == 40 + 40
    assert report.details[0].is_exact


def test_several_answers_to_one_prompt(model):
    engine, segments = engine_of(model, AllRows()), prompt(sizes=SIZES)
    asked(engine, segments)
    other = turned(segments, [3, 1, 0])
    given = {"segments": [other.head, *other.passages, other.question]}
    (output,) = engine.generate([given], SamplingParams(temperature=0, max_tokens=6, n=3))
    assert [each.token_ids for each in output.outputs] == [plain(model, other)] * 3
    ops.check(engine.manager)


def test_a_preempted_request_is_placed_again(model):
    """Two prompts that do not fit beside their answers: the later one gives way, and comes back."""
    passages = Passages("64MiB", AllRows(), **FREE)
    engine = Engine(model, num_blocks=30, passages=passages, watermark=0.0)
    segments = prompt(sizes=(16, 60, 60, 60, 9))
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    asked(engine, segments)
    others = [turned(segments, order) for order in ([2, 0, 1], [1, 2, 0])]
    given = [{"segments": [each.head, *each.passages, each.question]} for each in others]
    outputs = engine.generate(given, params)
    assert engine.stats().preemptions >= 1
    wanted = Engine(model, num_blocks=400).generate(
        [each.tokens.tolist() for each in others], params
    )
    assert [each.outputs[0].token_ids for each in outputs] == [
        each.outputs[0].token_ids for each in wanted
    ]
    ops.check(engine.manager)


def test_passages_that_do_not_fit_beside_each_other_are_captured_once(model):
    passages, segments = Passages("60KiB", AllRows(), **FREE), prompt(sizes=SIZES)
    engine = Engine(model, num_blocks=400, passages=passages)
    for _ in range(2):
        ((answer, _),) = asked(engine, segments)
        assert answer == plain(model, segments)
    assert 0 < engine._companions[-1].passages.store.stats.variants < len(segments.passages)


def test_passages_are_captured_while_requests_wait_and_few_prompts_are_kept_pending(model):
    """An engine whose queue is never empty: captures take their share of its rows, and what waits is bounded."""
    passages = Passages("64MiB", AllRows(), **{**FREE, "share": 0.2})
    engine = Engine(model, num_blocks=400, passages=passages, max_running=1)
    own, num_answers = engine._companions[-1], 0
    counted, captured = own._earned.spend, []
    own._earned.spend = lambda rows: captured.append(rows) or counted(rows)
    source = iter(range(1000))

    def add():
        segments = prompt(seed=next(source), sizes=(8, 16, 16, 5))
        given = {"segments": [segments.head, *segments.passages, segments.question]}
        engine.add_request(given, SamplingParams(temperature=0, max_tokens=2))
        return segments.num_tokens

    rows = sum(add() for _ in range(3))
    while num_answers < 80:
        ended = sum(output.finished for output in engine.step())
        num_answers += ended
        rows += sum(add() for _ in range(ended))
        assert engine.scheduler.queues.num_waiting
        assert len(own._pending) <= 64
    assert own.passages.store.stats.variants > 5
    num_steps = engine.stats().steps
    assert 0 < sum(captured) <= 0.2 * (rows + 17 * num_steps) + 32


def test_tenants_share_no_passages(model):
    engine, segments = engine_of(model, Epic(4)), prompt(sizes=SIZES)
    asked(engine, segments, scope=Scope(salt="one"))
    ((_, report),) = asked(engine, turned(segments, [1, 0]), scope=Scope(salt="two"))
    assert "no passage" in report.fallback


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "words"), [("mistral with windows", "windows"), ("deepseek v3", "latents")]
)
def test_blocks_that_cannot_take_them_are_refused_by_name(name, words):
    own = made(*MOVED[name])
    engine, segments = engine_of(own, Epic(4)), prompt(sizes=SIZES)
    for _ in range(2):
        ((answer, report),) = asked(engine, segments)
        assert words in report.fallback
        assert answer == plain(own, segments)


def test_a_forward_that_fails_leaves_the_request_to_be_computed(model, monkeypatch):
    engine, segments = engine_of(model, AllRows()), prompt(sizes=SIZES)
    asked(engine, segments)

    def failing(*_, **__):
        raise OutOfBlocks("no", group="full", needed=1, free=0, cached=0, active=0)

    monkeypatch.setattr("quire_passages.engine.scatter", failing)
    other = turned(segments, [2, 0])
    ((answer, report),) = asked(engine, other)
    assert "could not be placed: no" in report.fallback
    assert answer == plain(model, other)


def test_segments_without_passages_are_a_plain_prompt(model):
    engine, segments = Engine(model, num_blocks=400), prompt(sizes=SIZES)
    ((answer, report),) = asked(engine, segments)
    assert report is None
    assert answer == plain(model, segments)


def test_bad_segments_are_refused(model):
    engine = engine_of(model, Epic(4))
    with pytest.raises(TokensError, match="passage 1 of 3 segments is empty"):
        engine.generate([{"segments": [[1], [], [2]]}])


@pytest.mark.parametrize("given", ["1GiB", 1, Passages], ids=repr)
@pytest.mark.parametrize("kind", [Engine, PrefixCache])
def test_settings_of_passages_that_are_none_are_refused(model, kind, given):
    with pytest.raises(ConfigError, match=r"passages=.*; give quire_passages\.Passages"):
        kind(model, passages=given)


def test_passages_of_a_model_that_has_changed_since_are_not_captured(model):
    mine, segments = copy.deepcopy(model), prompt(sizes=SIZES)
    engine = engine_of(mine, NoRows())
    engine.add_request({"segments": [segments.head, *segments.passages, segments.question]}, GREEDY)
    while not any(output.finished for output in engine.step()):
        pass
    store = engine._companions[-1].passages.store
    assert engine.has_unfinished()  # passages wait
    before = store.stats.variants
    weight = mine.model.layers[0].self_attn.k_proj.weight
    with torch.no_grad():
        weight.mul_(2)
    while engine.has_unfinished():
        engine.step()
    assert store.stats.variants == before


class ChangingEngines:
    """Two engines that reuse passages over one model, whose weights go to and fro between two.

    They change between two calls or steps, while passages are computed, or in a step: once `due` more of these begin or
    end. Of the engines, one computes a step as transformers does, where they change between two layers too.
    """

    def __init__(self, model, capture="isolated"):
        self.model, self.is_other, self.due = copy.deepcopy(model), False, []
        self.engines = [engine_of(self.model, NoRows(), capture) for _ in range(2)]
        self.engines[1]._forward.model.plain = False
        for engine in self.engines:
            passages, packed = engine._companions[-1], engine._forward.model
            passages._runs.feed = self.counted(passages._runs.feed)
            passages._blended = self.counted(passages._blended)
            packed.forward = self.counted(packed.forward)
            engine._end_outdated = self.counted(engine._end_outdated, after=False)

    @contextlib.contextmanager
    def between_layers(self):
        with mock.patch.object(packed_model, "attend", self.counted(packed_model.attend)):
            yield

    def counted(self, call, *, after=True):
        def counting(*given, **named):
            self.count()
            found = call(*given, **named)
            if after:
                self.count()
            return found

        return counting

    def count(self):
        self.due = [left - 1 for left in self.due]
        if 0 in self.due:
            self.change()

    def change(self):
        self.is_other = not self.is_other
        with torch.no_grad():
            for layer in self.model.model.layers:
                layer.self_attn.k_proj.weight.mul_(2.0 if self.is_other else 0.5)

    def check(self, texts):
        """Compare all K and V that would be found now with what the model computes as it is now."""
        for engine in self.engines:
            bound, passages = engine.scope(), engine._companions[-1]
            for (_, scope), variant in passages.passages.store._order.values():
                if scope == bound:
                    text = np.frombuffer(variant.before + variant.ids, np.int32)
                    self.compare(passages._runs, text, variant.start, variant.kv.layers)
            for text in texts:
                seq = engine.manager.open(text, bound)
                engine._forward.copy()  # of a block that it shares in part
                known = text[: seq.num_cached]
                if known.size:
                    right = self.computed(passages._runs, known, 0)
                    found = [tuple(map(torch.empty_like, layer)) for layer in right]
                    gather_into(engine._forward.pools[0], seq.block_ids(0), known.size, found)
                    self.compare(passages._runs, known, 0, found)
                engine.manager.close(seq)

    def compare(self, runs, text, start, layers):
        for layer, wanted in zip(layers, self.computed(runs, text, start), strict=True):
            for got, right in zip(layer, wanted, strict=True):
                torch.testing.assert_close(got, right, atol=1e-3, rtol=1e-3)

    def computed(self, runs, text, start):
        past = runs.past(text.size)
        runs.feed(past, text)
        return [past.kv_layers[at].row(0, start, text.size) for at in sorted(past.kv_layers)]

    def is_answer(self, text, tokens):
        """Whether tokens are what the model says behind a text, one after the other."""
        ids = torch.tensor([[*text.tolist(), *tokens]])
        with torch.no_grad():
            said = self.model(ids).logits[0, len(text) - 1 : -1].argmax(-1)
        return said.tolist() == list(tokens)


DUE = st.lists(st.integers(1, 5) | st.integers(6, 40), max_size=2, unique=True)


@pytest.mark.ci
@drawn(3, 30, data=st.data())
def test_what_engines_of_a_model_that_changes_keep_is_what_its_weights_compute(data):
    pool = prompt(seed=3, sizes=(20, 24, 17, 32, 20, 5))
    capture = data.draw(st.sampled_from(["isolated", "contextual"]))
    changing, texts = ChangingEngines(made("Llama", {}), capture), [pool.tokens]
    for engine in changing.engines:
        asked(engine, pool)  # what is asked for from here on can be placed
    for _ in range(data.draw(st.integers(1, 4))):
        engine = data.draw(st.sampled_from(changing.engines))
        order = data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=4))
        segments = turned(pool, order)
        texts.append(segments.tokens)
        changing.due, was_other = data.draw(DUE), changing.is_other
        given = [segments.head, *segments.passages, segments.question]
        is_plain = data.draw(st.booleans())
        asked_for = segments.tokens.tolist() if is_plain else {"segments": given}
        with contextlib.suppress(RequestFailed), changing.between_layers():
            (output,) = engine.generate([asked_for], GREEDY)
            is_as_before = changing.is_other == was_other
            if is_plain and is_as_before:
                assert changing.is_answer(segments.tokens, output.outputs[0].token_ids)
        changing.due = []
        ops.check(engine.manager)
        engine._companions[-1].passages.store.check()
        assert engine.manager.num_active == 0
        for _ in range(2):
            changing.check(texts)
            changing.change()
        if data.draw(st.booleans()):
            changing.change()


def test_a_request_whose_model_changes_while_its_passages_are_placed_ends_with_its_step():
    segments = prompt(seed=3, sizes=(20, 24, 17, 32, 20, 5))
    changing = ChangingEngines(made("Llama", {}))
    engine, before = changing.engines[0], changing.engines[0].scope()
    asked(engine, segments)
    other = turned(segments, [2, 0])
    known = engine.manager.probe(other.tokens, before).num_tokens
    changing.due = [
        2
    ]  # behind the look at the model that begins a step, before what is placed in it
    with pytest.raises(RequestFailed, match="while passages were placed"):
        asked(engine, other)
    assert changing.is_other
    assert engine.manager.probe(other.tokens, before).num_tokens == known


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("is_plain", "due"),
    [(True, [2]), (True, [2, 3]), (True, [5, 6]), (False, [4]), (False, [4, 5]), (False, [12, 15])],
)
def test_a_step_over_which_the_model_changes_is_computed_again_or_keeps_nothing(is_plain, due):
    """Changed for good, the request ends; changed to and fro, it goes on as if nothing had been."""
    changing, text = ChangingEngines(made("Llama", {})), prompt(seed=3, sizes=(20, 24, 5))
    engine = changing.engines[0 if is_plain else 1]
    ids = text.tokens.tolist()
    for _ in range(2):  # from here on all values are in the model's name
        changing.change()
        engine.scope()
    engine.generate([ids], GREEDY)
    changing.due, other = due, [*ids[:20], *ids[:-1]]
    with changing.between_layers():
        if len(due) == 1:
            with pytest.raises(RequestFailed, match="changed"):
                engine.generate([other], GREEDY)
        else:
            (output,) = engine.generate([other], GREEDY)
            assert changing.is_answer(np.array(other), output.outputs[0].token_ids)
    for _ in range(2):
        changing.check([text.tokens, np.array(other, np.int32)])
        changing.change()
