"""The engine over llama.cpp with real weights, beside llama.cpp alone: tokens, and logits within its own distance."""

import random
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")

import real_models
from quire import ops
from quire.engines.gguf import GgufModel
from quire.engines.gguf.context import Chunk
from quire.engines.loop import Engine, SamplingParams

pytestmark = [pytest.mark.system("llama.cpp"), pytest.mark.ci]
SMOLLM2, GEMMA = "smollm2-135m", "gemma3-270m"


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA])
def file(request, tmp_path_factory):
    """The file of a real model, as its packages have it."""
    if not real_models.packaged(request.param):
        pytest.skip(
            f"the packages of {request.param} are missing: `make real-models` installs them"
        )
    return real_models.whole_file(request.param, tmp_path_factory.mktemp("gguf"))


class Alone:
    """llama.cpp alone, in a context of its own: logits of texts from scratch, at the same or at random places."""

    def __init__(self, model, num_cells=4096):
        self.context, self.random = model.context(), random.Random(0)
        self.num_cells, self.vocab_size = num_cells, model.vocab_size

    def logits(self, tokens, num_asked, *, scattered=False):
        """The logits of the last tokens of a text; `scattered`: between cells of others, in pieces."""
        self.context.clear()
        if scattered:
            size = self.random.choice((20, 60, 100))
            for number in range(3, 9):
                self._decode([7] * size, 0, number)
            for number in self.random.sample(range(3, 9), 3):
                self.context.cut((number,))
        asked = np.zeros(len(tokens), np.int8)
        asked[-num_asked:] = 1
        return self.context.decode([Chunk((1, 2), 0, np.array(tokens, np.int32), asked)])

    def answer(self, prompt, num_tokens, num_kept):
        """The likeliest tokens, one after the other; with `num_kept` what is behind it is computed a second time."""
        row, told = self.logits(prompt, 1)[-1], []
        if num_kept:
            self.context.cut((1, 2), num_kept)
            row = self._decode(prompt[num_kept:], num_kept, 1)[-1]
        for at in range(num_tokens):
            told.append(int(row.argmax()))
            row = self._decode(told[-1:], len(prompt) + at, 1)[-1]
        return told

    def distance(self, texts, num_asked):
        """The greatest distance of logits of a text from those at other places."""
        return max(
            float(
                np.abs(
                    self.logits(text, num_asked) - self.logits(text, num_asked, scattered=True)
                ).max()
            )
            for text in texts
            for _ in range(2)
        )

    def _decode(self, tokens, start, number):
        asked = np.zeros(len(tokens), np.int8)
        asked[-1] = 1
        ids = (number, number + 1) if number == 1 else (number, number + 10)
        return self.context.decode([Chunk(ids, start, np.array(tokens, np.int32), asked)])


def texts_of(tokenizer):
    """Token ids of real texts: the documentation of some modules."""
    modules = (random, Path, np.ndarray, np.random.Generator)
    return [tokenizer(module.__doc__ * 3)["input_ids"] for module in modules]


def test_alone_and_after_a_restart_tokens_are_those_of_llama_cpp(file, tmp_path):
    model = GgufModel(file, n_ctx=4096, n_threads=1)
    alone, tokenizer = Alone(model), model.tokenizer()
    prompt = texts_of(tokenizer)[0][:300]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for found in (0, (len(prompt) - 1) // 16 * 16):
        engine = Engine(model, num_blocks=200, tiers=[f"disk:{tmp_path}?capacity=256MiB"])
        (told,) = engine.generate([prompt], params)
        assert told.num_cached_tokens == found
        assert told.outputs[0].token_ids == alone.answer(prompt, 24, found)
        engine.close()
    alone.context.close()
    model.close()


@pytest.mark.parametrize("num_requests", [8, pytest.param(500, marks=pytest.mark.long)])
def test_beside_others_answers_are_within_the_distance_of_llama_cpp_to_itself(
    file, num_requests, tmp_path, record_property
):
    model, draw = GgufModel(file, n_ctx=2048, n_threads=1), random.Random(1)
    alone, tokenizer = Alone(model), model.tokenizer()
    texts = texts_of(tokenizer)
    bound = alone.distance([text[:150] for text in texts[:2]], 8)
    engine = Engine(
        model,
        num_blocks=160,
        max_running=6,
        max_step_tokens=400,
        tiers=[f"disk:{tmp_path}?capacity=1GiB"],
    )
    asked, left, flips, cached, num_tokens = {}, num_requests, 0, 0, 0
    while left or engine.has_unfinished():
        if left and len(asked) < 8:
            text = draw.choice(texts)
            head, more = draw.choice((40, 100, 210)), draw.choice((3, 30))
            prompt = [*text[:head], *draw.sample(text, more)]
            params = SamplingParams(
                temperature=0,
                max_tokens=draw.choice((4, 12)),
                n=draw.choice((1, 1, 2)),
                ignore_eos=True,
            )
            asked[engine.add_request(prompt, params)] = prompt
            left -= 1
        if asked and draw.random() < 0.02:
            gone = draw.choice(list(asked))
            engine.abort(gone)
            del asked[gone]
        for told in engine.step():
            if not told.finished:
                continue
            prompt, cached = asked.pop(told.request_id), cached + told.num_cached_tokens
            texts[draw.randrange(4)] = (prompt + told.outputs[0].token_ids)[:250] + texts[0][:50]
            for answer in told.outputs:
                ids = answer.token_ids
                rows = alone.logits(prompt + ids[:-1], len(ids))
                behind = rows.max(axis=1) - rows[np.arange(len(ids)), ids]
                assert behind.max() <= 2 * bound, (prompt, ids, behind, bound)
                flips, num_tokens = flips + int((behind > 0).sum()), num_tokens + len(ids)
        engine._forward.residents.check()
        ops.check(engine.manager)
    assert cached > 0
    assert flips <= num_tokens / 10
    record_property(
        "told",
        f"{file.name}: distance {bound:.3f}, {flips} of {num_tokens} tokens are another one, {cached} cached",
    )
    engine.close()
    alone.context.close()
    model.close()
