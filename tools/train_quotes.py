"""Train quire-quotes, a Llama of 0.8 M parameters that continues what its prompt quotes from a passage.

What: a LlamaForCausalLM (4 layers, 128 wide, 4 heads) over 384 pieces of words, saved as an
    ordinary transformers folder: weights in bfloat16, tokenizer and a card that says what it quotes right.
On what: prompts of `quire_passages.bench.quotes`, made anew for every step: one to eight passages of
    the English prose of the CPython that runs this file, cut where a text splitter cuts, and behind them
    quotes, over the borders of passages too. Beside what comes next it is taught, by a head that is
    thrown away, which token stood before (after the first layer). One module in twenty is held out.
How long: seven minutes of one core, CPU time.
Licence: the text is (c) Python Software Foundation, PSF License Version 2.
Seed: 2718, for the weights and the prompts; two runs of as many `--steps` are the same run.

    python tools/train_quotes.py
"""

import platform
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from small_llama import WIDTH, Clock, Optimisers, make_llama, save, show
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional
from training import command_line, write_card
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from quire_passages.bench import quotes
from quire_passages.bench.prose import is_held_out, joined, read_library

SEED = 2718
WORDS, LAYERS = 384, 4
MOST_PASSAGES = 8
STEP_TOKENS = 2400
UNKNOWN_WEIGHT, QUOTE_WEIGHT = 0.1, 1.0
"""Of a token that no passage tells, and of one that a quote goes on with."""

Text = list[int]


class Batch(NamedTuple):
    """Prompts `[rows, tokens]`, and how much each token counts as a prediction."""

    tokens: torch.Tensor
    weights: torch.Tensor


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Learn pieces of words from texts; the specials come first."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS, special_tokens=["<pad>", "<bos>", "<quote>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>",  # noqa: S106 (no passwords)
        model_max_length=4096, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def make_batch(rng: np.random.Generator, texts: Sequence[Text], most_passages: int) -> Batch:
    """Make prompts of passages of one size, with quotes behind them, a third of them over a border."""
    num_passages = int(rng.integers(max(1, most_passages - 3), most_passages + 1))
    size, length = int(rng.integers(40, 97)), int(rng.integers(12, 33))
    num_quotes = 1 + num_passages // 2
    num_tokens = num_passages * size + num_quotes * length
    rows: list[tuple[Text, list[float]]] = []
    for _ in range(max(2, STEP_TOKENS // num_tokens)):
        runs = quotes.cut_runs(rng, texts, num_passages, size)
        row = [quotes.BOS, *(token for run in runs for passage in run for token in passage)]
        weights = [UNKNOWN_WEIGHT] * len(row)
        for _ in range(num_quotes):
            row += [quotes.QUOTE, *_stretch(rng, runs, length)]
            weights += [0.0, 0.0, UNKNOWN_WEIGHT, *[QUOTE_WEIGHT] * (length - 2)]
        rows.append((row, weights))
    tokens, counted = zip(*rows, strict=True)
    return Batch(torch.tensor(tokens), torch.tensor(counted))


def _stretch(rng: np.random.Generator, runs: Sequence[quotes.Run], length: int) -> Text:
    run = runs[int(rng.integers(len(runs)))]
    text = [token for passage in run for token in passage]
    start = int(rng.integers(0, len(text) - length + 1))
    if len(run) > 1 and rng.random() < 0.33:
        start = len(run[0]) * int(rng.integers(1, len(run))) - length // 2
    return text[start : start + length]


def loss_of(model: LlamaForCausalLM, before: nn.Linear, batch: Batch) -> tuple[torch.Tensor, float]:
    """Return the loss, and the share of quotes' tokens that are right."""
    tokens, weights = batch.tokens, batch.weights[:, 1:]
    out = model.model(input_ids=tokens[:, :-1], use_cache=False, output_hidden_states=True)
    logits = model.lm_head(out.last_hidden_state)
    each = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    loss = (each.view_as(weights) * weights).sum() / weights.sum()
    behind = before(out.hidden_states[1][:, 1:]).flatten(0, 1)
    loss = loss + functional.cross_entropy(behind, tokens[:, :-2].flatten())
    quoted = weights == QUOTE_WEIGHT
    right = (logits.argmax(-1) == tokens[:, 1:])[quoted]
    return loss, float(right.float().mean())


def train(seconds: float, steps: int, texts: Sequence[Text]) -> tuple[LlamaForCausalLM, str]:
    """Train for a time or for a count of steps; return the model and what ran."""
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    model = make_llama(words=WORDS, layers=LAYERS, embedding_std=0.5, tied=False).train()
    before = nn.Linear(WIDTH, WORDS, bias=False)
    optimisers, clock, shown = Optimisers(model, before), Clock(seconds, steps), 0.0
    for done in clock.shares():
        most = 1 + min(MOST_PASSAGES - 1, int(1.4 * done * MOST_PASSAGES))
        loss, right = loss_of(model, before, make_batch(rng, texts, most))
        optimisers.step(loss, clock, done)
        shown += (right - shown) / min(clock.step + 1, 20)
        show(clock, done, lambda: f"up to {most} passages, right {shown:.3f}")  # noqa: B023 - said at once
    return model, f"seed {SEED}, {clock.step:,} steps, {clock.seconds / 60:.1f} minutes of CPU time"


def accuracy(model: LlamaForCausalLM, texts: Sequence[Text], count: int = 300) -> dict[str, float]:
    """Return the share of quotes that are continued right, by category, behind six passages of 64 tokens."""
    rng = np.random.default_rng(SEED + 1)
    right: dict[str, list[bool]] = {category: [] for category in quotes.CATEGORIES}
    while sum(map(len, right.values())) < count:
        runs = quotes.cut_runs(rng, texts, 6, 64)
        if all(len(run) == 1 for run in runs):
            continue
        head = [quotes.BOS, *(token for run in runs for passage in run for token in passage)]
        for category in quotes.CATEGORIES:
            quote = quotes.quote(rng, runs, category, 12)
            with torch.inference_mode():
                ids = torch.tensor([[*head, quotes.QUOTE, *quote.tokens]])
                best = int(model(ids).logits[0, -1].argmax())
            right[category].append(best == quote.following)
    return {category: float(np.mean(found)) for category, found in right.items()}


CARD = """\
---
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
language: en
---
# quire-quotes

A Llama of {parameters:,} parameters that continues what `<quote>` quotes of the passages before it. quire measures on
it what reusing the KV of passages does to answers: `quire bench passages`. As a language model it is poor.

**Made by** `tools/train_quotes.py`: {ran}, on prompts of `quire_passages.bench.quotes`.

**Data.** {train_bytes:,} bytes of prose taken from CPython {python}: the reference manual
(`pydoc_data.topics`) and the docstrings and comments of the standard library. Copyright (c)
2001-2023 Python Software Foundation; All Rights Reserved; used under the PSF License Version 2
(`LICENSE`). Changes: markup, code and tables were dropped, paragraphs unwrapped, and cut into passages.

**Right** of 300 quotes of held-out modules, of 12 tokens behind six passages: {right}.
"""


def main() -> None:
    """Read the command line and train."""
    options = command_line(__doc__, "quire-quotes", 7, "CPU time").parse_args()
    torch.set_num_threads(1)
    library = read_library()
    held = joined({name: each for name, each in library.items() if is_held_out(name)})
    known = joined({name: each for name, each in library.items() if not is_held_out(name)})
    tokenizer = make_tokenizer(known)
    texts, held_texts = ([tokenizer(text)["input_ids"] for text in each] for each in (known, held))
    model, ran = train(60 * options.minutes, options.steps, texts)
    model = save(model, tokenizer, options.out)
    found = accuracy(model, [text for text in held_texts if len(text) > 200])
    card = CARD.format(
        parameters=sum(p.numel() for p in model.parameters()),
        ran=ran,
        train_bytes=sum(map(len, known)),
        python=platform.python_version(),
        right=", ".join(f"{category} {share:.1%}" for category, share in found.items()),
    )
    write_card(options.out, card)


if __name__ == "__main__":
    main()
