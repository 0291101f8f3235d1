"""A model whose weights another thread changes while a call runs: what is kept is what its weights compute."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from passages_help import GATES, made, prompt

from quire.engines.hf import PrefixCache
from quire_passages import NoRows, Passages, Segments
from turns import drawn

SIZES = (20, 24, 17, 32, 20, 5)


class ChangingCache:
    """A cache that reuses passages, over a model whose weights go to and fro between two: in front of layers, at `due` ones."""

    def __init__(self, capture):
        self.model, self.is_other, self.due = made("Llama", {}), False, []
        self.fresh = [copy.deepcopy(self.model) for _ in range(2)]
        self.scale(self.fresh[1], 2.0)
        for layer in self.model.model.layers:
            layer.register_forward_pre_hook(self.count)
        passages = Passages(
            "64MiB", NoRows(), None, capture=capture, worth=10.0, min_tokens=2, gates=GATES
        )
        self.cache = PrefixCache(self.model, "32MiB", passages=passages)

    def count(self, *_):
        self.due = [left - 1 for left in self.due]
        if 0 in self.due:
            self.change()

    def change(self):
        self.is_other = not self.is_other
        self.scale(self.model, 2.0 if self.is_other else 0.5)

    def scale(self, model, factor):
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.weight.mul_(factor)

    def generate(self, segments, *, in_segments):
        ids = torch.from_numpy(segments.tokens.astype(np.int64))[None]
        given = {"segments": segments} if in_segments else {"input_ids": ids}
        return self.cache.generate(**given, max_new_tokens=3, do_sample=False, pad_token_id=0)

    def check(self, texts):
        """Compare all K and V that would be found now with what the model computes as it is now."""
        bound = self.cache.kept.identity.scope()
        for (_, scope), variant in self.cache.passages.store._order.values():
            if scope == bound:
                text = np.frombuffer(variant.before + variant.ids, np.int32)
                self.compare(text, variant.start, variant.kv.layers)
        for text in texts:
            ids = torch.from_numpy(text.astype(np.int64))[None]
            with self.cache.session(ids) as past:
                size = past.get_seq_length()
                if size:
                    layers = [past.kv_layers[at].row(0, 0, size) for at in sorted(past.kv_layers)]
                    self.compare(text[:size], 0, layers)

    def compare(self, text, start, layers):
        ids = torch.from_numpy(text.astype(np.int64))[None]
        with torch.no_grad():
            wanted = self.fresh[self.is_other](ids).past_key_values.layers
        for (k, v), right in zip(layers, wanted, strict=True):
            torch.testing.assert_close(k, right.keys[0, :, start:], atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(v, right.values[0, :, start:], atol=1e-3, rtol=1e-3)


@pytest.mark.ci
@pytest.mark.parametrize("capture", ["isolated", "contextual"])
@drawn(3, 30, data=st.data())
def test_what_a_cache_of_a_model_that_changes_keeps_is_what_its_weights_compute(capture, data):
    pool, changing = prompt(seed=3, sizes=SIZES), ChangingCache(capture)
    changing.generate(pool, in_segments=True)
    texts = [pool.tokens]
    for _ in range(data.draw(st.integers(1, 4))):
        order = data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=4))
        segments = Segments(pool.head, tuple(pool.passages[at] for at in order), pool.question)
        texts.append(segments.tokens)
        changing.due = data.draw(st.lists(st.integers(1, 24), max_size=2, unique=True))
        changing.generate(segments, in_segments=data.draw(st.booleans()))
        changing.due = []
        changing.cache.passages.store.check()
        for _ in range(2):
            changing.check(texts)
            changing.change()


@pytest.mark.cases(2)
@pytest.mark.parametrize("due", [[3], [2, 3], [4, 6]])
def test_a_call_over_which_the_weights_change_or_go_to_and_fro_keeps_nothing(due):
    pool, changing = prompt(seed=3, sizes=SIZES), ChangingCache("none")
    changing.due = due
    changing.generate(pool, in_segments=False)
    assert changing.is_other == (len(due) == 1)
    assert changing.cache.last.stored_tokens == 0
    changing.generate(pool, in_segments=False)
    assert changing.cache.last.cached_tokens == 0
    assert changing.cache.last.stored_tokens > 0
