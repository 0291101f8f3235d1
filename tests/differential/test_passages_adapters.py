"""Passages of a model whose adapters come, change and go: what was captured under one is nothing to another."""

import warnings

import numpy as np
import pytest
import torch

peft = pytest.importorskip("peft")

from hypothesis import strategies as st  # noqa: E402
from passages_help import GATES, made, prompt  # noqa: E402

from quire.core import Scope  # noqa: E402
from quire.engines.hf import PrefixCache  # noqa: E402
from quire.ops import check  # noqa: E402
from quire_passages import AllRows, Epic, KVDeviation, NoRows, Passages, Segments  # noqa: E402
from turns import drawn  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

PROMPT = prompt(sizes=(16, 24, 20, 28, 9))
CHANGES = ("use one", "use two", "off", "on", "merge", "unmerge", "change", "none")


class Adapted:
    """A Llama with two adapters of a kind, and a cache of it that reuses passages at any price."""

    def __init__(self, seed, capacity):
        torch.manual_seed(seed)
        self.wrapped = peft.get_peft_model(made("Llama", {}), self._config(4), "one")
        self.wrapped.add_adapter("two", self._config(2))
        self.model = self.wrapped.get_base_model().eval()
        self.cache = PrefixCache(
            self.model,
            "16MiB",
            block_size=4,
            debug=True,
            passages=Passages(
                capacity, target=None, capture="isolated", worth=10.0, min_tokens=2, gates=GATES
            ),
        )

    @staticmethod
    def _config(rank):
        modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
        return peft.LoraConfig(
            r=rank, lora_alpha=16, target_modules=modules, init_lora_weights=False
        )

    def change(self, how):
        tuner = self.wrapped.base_model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if how.startswith("use"):
                tuner.unmerge_adapter()
                self.wrapped.set_adapter(how[4:])
            elif how in ("off", "on"):
                tuner.unmerge_adapter()
                (tuner.disable_adapter_layers if how == "off" else tuner.enable_adapter_layers)()
            elif how == "merge":
                tuner.merge_adapter()
            elif how == "unmerge":
                tuner.unmerge_adapter()
            elif how == "change":
                with torch.no_grad():
                    weights = [
                        each for name, each in self.wrapped.named_parameters() if "lora_B" in name
                    ]
                    weights[0].add_(0.05)

    def plain(self, ids):
        output = self.model.generate(ids, **self._how(ids))
        return output[0, ids.shape[1] :].tolist()

    def ask(self, order, selector, scope):
        """Ask with passages, and then for the same prompt as a plain one."""
        passages = tuple(PROMPT.passages[at] for at in order)
        segments = Segments(PROMPT.head, passages, PROMPT.question)
        ids = torch.from_numpy(segments.tokens.astype(np.int64))[None]
        wanted = self.plain(ids)
        how = self._how(ids) | {"scope": scope}
        del how["attention_mask"]
        output = self.cache.generate(segments=segments, selector=selector, **how)
        report = self.cache.last.passages
        if isinstance(selector, AllRows) or not report.moved_tokens:
            assert output[0, ids.shape[1] :].tolist() == wanted
        again = self.cache.generate(ids, scope=scope, **self._how(ids))
        assert again[0, ids.shape[1] :].tolist() == wanted, "what is approximate enters no prefix"
        check(self.cache.manager)
        self.cache.passages.store.check()
        return report

    @staticmethod
    def _how(ids):
        return {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": 4,
            "do_sample": False,
            "pad_token_id": 0,
        }


asks = st.tuples(
    st.sampled_from(CHANGES),
    st.permutations(range(len(PROMPT.passages))),
    st.sampled_from([AllRows(), AllRows(), NoRows(), Epic(4), KVDeviation(0.2)]),
    st.sampled_from([None, Scope(salt="a"), Scope(salt="b")]),
)


LIVES = {
    "seed": st.integers(0, 2),  # what the gate finds of each is kept
    "capacity": st.sampled_from(["64MiB", "64KiB"]),
    "steps": st.lists(asks, min_size=2, max_size=7),
}


def live(seed, capacity, steps):
    world = Adapted(seed, capacity)
    for how, order, selector, scope in steps:
        world.change(how)
        world.ask(order, selector, scope)


@pytest.mark.ci
@pytest.mark.slow
@drawn(2, 40, **LIVES)
def test_passages_follow_the_adapter_that_computes(seed, capacity, steps):
    live(seed, capacity, steps)


@pytest.mark.ci
def test_what_another_adapter_captured_is_not_in_the_store():
    world = Adapted(0, "64MiB")
    world.change("use one")
    first = world.ask([0, 1, 2], AllRows(), None)
    again = world.ask([2, 1, 0], AllRows(), None)
    assert (first.moved_tokens, first.captured, again.captured) == (0, 3, 0)
    for how in ("use two", "off"):
        world.change(how)
        assert world.ask([1, 2, 0], AllRows(), None).captured == 3
    world.change("on")
    world.change("use one")
    assert world.ask([1, 0, 2], AllRows(), None).captured == 0
    world.change("change")
    assert world.ask([0, 2, 1], AllRows(), None).captured == 3
