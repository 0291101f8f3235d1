"""Passages on Gemma 3 270M, whose window of 512 tokens is shorter than the prompts."""

import pytest
import torch
from real_help import NEAR, lent, plain, text

from quire import PrefixCache, ops
from quire.engines.loop import Engine, SamplingParams
from quire_passages import AllRows, Epic, KVDeviation, Passages, QuestionRows, Segments
from quire_passages.hf import PassageModel

NAME = "gemma3-270m"
pytestmark = [pytest.mark.system(NAME), pytest.mark.slow]


@pytest.mark.ci
def test_passages_past_the_window_are_placed_right_and_become_no_prefix():
    """Passages stand before the window of the question, across its edge and in it.

    All rows computed again are the full forward; with few of them a cache says what the bare mechanism says.
    """
    model, bare = lent(NAME)[0], PassageModel(lent(NAME)[0])
    head, question = text(NAME, 12), text(NAME, 10, 2000)
    passages = [text(NAME, size, 100 + 200 * at) for at, size in enumerate((180, 150, 170, 160))]
    segments = Segments.of([head, *(passages[at] for at in (2, 0, 3, 1)), question])
    prompt = segments.tokens.tolist()
    held = {each.ids: each for each in bare.capture_alone(passages, head)}
    given = {"target": None, "worth": 10.0, "capture": "none"}
    cache = PrefixCache(model, "512MiB", passages=Passages("512MiB", **given))
    assert cache.passages.capture(passages, head) == 4
    for selector in (AllRows(), Epic(16), KVDeviation(0.3, 6), QuestionRows(0.3)):
        made = cache.generate(
            segments=segments,
            selector=selector,
            max_new_tokens=3,
            return_dict_in_generate=True,
            output_logits=True,
        )
        report, answer = cache.last.passages, made.sequences[0, len(prompt) :].tolist()
        assert report.fallback is None
        assert report.exactness == "approximate"
        first, *others = report.details
        assert first.is_exact
        assert all(each.variant and not each.is_exact for each in others)
        blended = bare.blend(segments, [held[ids] for ids in segments.passage_texts], selector)
        assert report.recomputed_rows == blended.rows.size
        torch.testing.assert_close(made.logits[0][0], blended.logits, atol=NEAR, rtol=0)
        if isinstance(selector, AllRows):
            torch.testing.assert_close(
                torch.cat(made.logits), plain(NAME).agrees(prompt, answer), atol=NEAR, rtol=0
            )
    exact = cache.generate(torch.tensor([prompt]), max_new_tokens=3)
    assert cache.last.cached_tokens <= len(head) + 180  # the head, and the first passage behind it
    plain(NAME).agrees(prompt, exact[0, len(prompt) :].tolist())
    ops.check(cache.manager)


@pytest.mark.ci
def test_an_engine_refuses_passages_of_a_model_with_windows_by_name():
    engine = Engine(lent(NAME)[0], kv_memory="64MiB", passages=Passages("64MiB"))
    parts = [text(NAME, 12), text(NAME, 40, 100), text(NAME, 40, 300), text(NAME, 5, 500)]
    (output,) = engine.generate([{"segments": parts}], SamplingParams(temperature=0, max_tokens=2))
    assert "windows" in output.passages.fallback
    assert output.passages.exactness == "exact"
    plain(NAME).agrees([each for part in parts for each in part], output.outputs[0].token_ids)
