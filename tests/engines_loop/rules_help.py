"""Rules of answers that are drawn: forms, allowed tokens, bad words; and which tokens may come by them."""

import functools
import re
from itertools import product
from typing import Any, NamedTuple

import torch
from loop_help import EOS, TIE, VOCAB
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FIRST = 3
"""The token of "!"; those behind it are the other letters of ASCII, up to "~"."""


@functools.cache
def letters():
    """Return a tokenizer for the tiny models: three special tokens, and one for each letter that can be seen."""
    names = ["<pad>", "<bos>", "<eos>", *map(chr, range(ord("!"), ord("~") + 1))]
    assert len(names) == VOCAB
    made = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(names[:FIRST])
    pad, bos, eos = names[:FIRST]
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, bos_token=bos, eos_token=eos
    )


def text_of(tokens):
    """Return the text of an answer's tokens."""
    return "".join(chr(token - FIRST + ord("!")) for token in tokens if FIRST <= token < VOCAB)


class Form(NamedTuple):
    """A form of an answer: what is asked, which texts match, and which may become one that does."""

    asked: dict[str, Any]
    matches: Any
    begins: Any


def finite(asked, texts):
    """Return a form that these texts match and no others."""
    return Form(asked, texts.__contains__, {t[:n] for t in texts for n in range(len(t) + 1)}.__contains__)  # fmt: skip


OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 23]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS = (
    finite({"choice": ["yes", "no", "never", "y"]}, {"yes", "no", "never", "y"}),
    finite(
        {"regex": "[a-c]{2}-(x|yz)[0-3]"},
        {"".join(each) for each in product("abc", "abc", "-", ("x", "yz"), "0123")},
    ),
    finite({"json": {"enum": ["a", 7, None, [True]]}}, {'"a"', "7", "null", "[true]"}),
    finite(
        {"json": OBJECT},
        {f'{{"a":{a},"b":{b}}}' for a, b in product(("true", "false"), (1, 23))},
    ),
    Form(
        {"grammar": 'start: ("ab" | "cd")+'},
        re.compile("(ab|cd)+").fullmatch,
        re.compile("(ab|cd)*[ac]?").fullmatch,
    ),
    Form(
        {"grammar": 'root ::= "(" root ")" | "x"'},
        lambda text: re.fullmatch(r"\(*x\)*", text) and text.count("(") == text.count(")"),
        lambda text: re.fullmatch(r"\(*(x\)*)?", text) and text.count("(") >= text.count(")"),
    ),
)  # fmt: skip


def check_form(form, tokens, reason, stops):
    """Check that an answer matches its form, or that what cut it is no token of the form."""
    text, ended = text_of(tokens), bool(tokens) and tokens[-1] == EOS
    assert form.begins(text), (form.asked, text)
    if ended and reason == "stop":
        assert form.matches(text), (form.asked, text)
    elif reason == "stop":
        assert tokens[-1] in stops


def may_come(params, form, answer, num_tokens):
    """Return which tokens may come next in an answer, bool [num_tokens]."""
    given = range(num_tokens)
    if form is not None:
        text = text_of(answer)
        return torch.tensor([
            bool(form.matches(text) if token == EOS else
                 FIRST <= token < VOCAB and form.begins(text + text_of([token])))
            for token in given
        ])  # fmt: skip
    allowed = torch.ones(num_tokens, dtype=torch.bool)
    if params.allowed_token_ids:
        allowed = torch.tensor([token in params.allowed_token_ids for token in given])
    left = allowed.clone()
    for word in params.bad_words or ():
        *begin, last = (ord(letter) - ord("!") + FIRST for letter in word)
        if not begin or answer[-len(begin) :] == begin:
            left[last] = False
    return left if left.any() else allowed


def check_greedy(model, prompt, params, form, answer):
    """Check that each token of a greedy answer is the plain model's likeliest one of those that may come."""
    if not answer:
        return
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *answer]], device=model.device)
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float().cpu()
    for at, (token, row) in enumerate(zip(answer, logits, strict=True)):
        allowed = may_come(params, form, answer[:at], len(row))
        assert allowed[token], (params, answer, at)
        assert row[allowed].max() - row[token] <= TIE, (params, answer, at)
