"""A model with real weights in float32, texts for it, and what plain forwards say of an answer."""

import builtins
import functools
import inspect

import torch
from hf_help import group_names
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import real_models
from quire import PrefixCache, ops

TIE = 2e-3
"""Two tokens are as good as each other, so near do their logits lie: these reach 40 in real models."""

NEAR = 5e-3
"""So near are logits with reuse to those without: what rounding in float32 leaves after all layers."""


def lent(name, dtype=torch.float32):
    """A model that tests share and do not change, and its tokenizer."""
    return _loaded(name, dtype)


@functools.cache
def _loaded(name, dtype):
    folder = real_models.folder(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.generation_config.do_sample = False
    return model, AutoTokenizer.from_pretrained(folder)


@functools.cache
def _documentation(name):
    things = [each for _, each in sorted(vars(builtins).items()) if callable(each)]
    text = "\n\n".join(filter(None, map(inspect.getdoc, things)))
    return lent(name)[1](text)["input_ids"]


def text(name, num_tokens, start=0):
    """The `num_tokens` tokens of Python's documentation of its built-ins from `start` on."""
    ids = _documentation(name)[start : start + num_tokens]
    assert len(ids) == num_tokens
    return ids


def shared_head(prompt, stored):
    """The length of the longest head of a prompt that stands in whole blocks of 16 of a stored text."""
    most = 0
    for known in stored:
        whole = known[: (len(known) - 1) // 16 * 16]
        pairs = enumerate(zip(prompt[:-1], whole, strict=False))
        parted = next((at for at, (a, b) in pairs if a != b), min(len(prompt) - 1, len(whole)))
        most = max(most, parted)
    return most


class Plain:
    """The plain model beside quire: its forwards over a cache of its own, which keeps all tokens of every layer.

    So one that was computed can be cut anywhere; masks alone make a layer see its window.
    """

    def __init__(self, model):
        self._model, self._cache, self._tokens = model, DynamicCache(), []

    def logits(self, tokens, last):
        """Return the logits of the last so many tokens."""
        pairs = enumerate(zip(self._tokens, tokens[: len(tokens) - last], strict=False))
        kept = next(
            (at for at, (a, b) in pairs if a != b), min(len(self._tokens), len(tokens) - last)
        )
        if kept < len(self._tokens):
            self._cache.crop(kept - len(self._tokens))
        with torch.inference_mode():
            made = self._model(
                torch.tensor([tokens[kept:]]), past_key_values=self._cache, logits_to_keep=last
            )
        self._tokens = list(tokens)
        return made.logits[0]

    def agrees(self, prompt, answer):
        """Check that each token of an answer is the likeliest behind those before it; return the logits."""
        logits = self.logits([*prompt, *answer[:-1]], len(answer))
        short = logits.amax(-1) - logits[torch.arange(len(answer)), torch.tensor(answer)]
        assert short.max() <= TIE, (answer, short.tolist())
        return logits


@functools.cache
def plain(name):
    """The one beside a shared model."""
    return Plain(lent(name)[0])


def asked(cache, name, prompt, num_new=4, **arguments):
    """Generate with quire, compare tokens and logits with plain ones; return the answer."""
    made = cache.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_new,
        return_dict_in_generate=True,
        output_logits=True,
        **arguments,
    )
    answer = made.sequences[0, len(prompt) :].tolist()
    right = plain(name).agrees(prompt, answer)
    torch.testing.assert_close(torch.cat(made.logits), right, atol=NEAR, rtol=0)
    ops.check(cache.manager)
    assert cache.manager.num_active == 0
    return answer


@functools.cache
def _groups(name):
    return group_names(lent(name)[0])


def cache_of(name, num_blocks, dtype=torch.float32, **options):
    """A debug cache of so many blocks of 16 tokens in each layer group: fresh memory is NaN."""
    model = lent(name, dtype)[0]
    blocks = dict.fromkeys(_groups(name), num_blocks)
    return PrefixCache(model, blocks, 16, debug=True, verify=None, **options)
