"""Train quire-facts, a Llama of 0.7 M parameters: what `quire bench passages` counts wrong answers of.

What: a LlamaForCausalLM (4 layers, 128 wide, 4 heads) over 44 words, saved as an ordinary
    transformers folder: weights in bfloat16, tokenizer and a card that says what it answers right.
On what: prompts of `quire_passages.bench.facts`, made anew for every step: one to eight passages and
    questions about them. Beside the answers it is taught, by heads that are thrown away, which
    token stood before (after the first layer) and of whom a fact is (after the second): without
    the first it does not learn the task in this time. In every other step a passage sees the one
    before it only, so that of two facts the later one is told by positions, not by counting.
How long: seven minutes of one core, CPU time.
Seed: 2718, for the weights and the prompts; two runs of as many `--steps` are the same run.

    python tools/train_facts.py
"""

from typing import NamedTuple

import numpy as np
import torch
from small_llama import IGNORED, WIDTH, Clock, Optimisers, make_llama, save, show
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.nn import functional
from training import command_line, write_card
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from quire_passages.bench import facts

SEED = 2718
LAYERS = 4
BEFORE_LAYER, SUBJECT_LAYER = 1, 2
MOST_PASSAGES = 8
QUESTION_PLACE = 1000
"""The place of a question; those of passages count from 1, that of the first token is 0."""


class Batch(NamedTuple):
    """Prompts with their labels: each `[rows, tokens]`.

    `answers`   the value behind a question's last token
    `subjects`  of whom a key or a value is
    `places`    which passage a token is of
    """

    tokens: torch.Tensor
    answers: torch.Tensor
    subjects: torch.Tensor
    places: torch.Tensor


class Heads(nn.Module):
    """The auxiliary tasks of training: the token before, and the subject of a fact."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, len(facts.VOCABULARY))
        self.subject = nn.Linear(WIDTH, len(facts.VOCABULARY))


def make_batch(rng: np.random.Generator, num_passages: int) -> Batch:
    """Make about 72 passages in prompts of so many, with questions behind each."""
    made: list[tuple[list[int], list[int], list[int], list[int]]] = []
    for _ in range(max(8, 72 // num_passages)):
        passages = facts.make_passages(rng, num_passages)
        tokens, subjects, places, subject = [facts.BOS], [IGNORED], [0], IGNORED
        for place, passage in enumerate(passages, start=1):
            for at, token in enumerate(passage):
                if token == facts.SUBJECT:
                    subject = passage[at + 1]
                tokens.append(token)
                subjects.append(subject if token >= facts.FIRST_KEY else IGNORED)
                places.append(place)
        answers = [IGNORED] * len(tokens)
        for question in facts.some(rng, facts.questions(passages), 6 + 3 * num_passages):
            tokens += [*question.tokens, question.value]
            answers += [IGNORED, IGNORED, question.value, IGNORED]
            subjects += [IGNORED, IGNORED, question.name, question.name]
            places += [QUESTION_PLACE] * 4
        made.append((tokens, answers, subjects, places))
    longest = max(len(tokens) for tokens, *_ in made)
    fills = (facts.PAD, IGNORED, IGNORED, QUESTION_PLACE)
    return Batch(*(
        torch.tensor([row + [fill] * (longest - len(row)) for row in column])
        for fill, column in zip(fills, zip(*made, strict=True), strict=True)
    ))  # fmt: skip


def near_mask(places: torch.Tensor) -> torch.Tensor:
    """Return a mask to add, `[rows, 1, tokens, tokens]`: a passage sees itself, the one before and the first token."""
    asking, seen = places[:, :, None], places[:, None, :]
    allowed = (asking == QUESTION_PLACE) | (seen == 0) | (asking - seen <= 1)
    causal = torch.ones(places.shape[1], places.shape[1]).tril().bool()
    return torch.where(allowed & causal, 0.0, -1e30)[:, None]


def loss_of(
    model: LlamaForCausalLM, heads: Heads, batch: Batch, mask: torch.Tensor | None
) -> tuple[torch.Tensor, float]:
    """Return the loss, and the share of answers that are right."""
    out = model.model(
        input_ids=batch.tokens, attention_mask=mask, use_cache=False, output_hidden_states=True
    )
    asked = batch.answers != IGNORED
    logits, answers = model.lm_head(out.last_hidden_state[asked]), batch.answers[asked]
    loss = functional.cross_entropy(logits, answers)
    behind = heads.before(out.hidden_states[BEFORE_LAYER][:, 1:]).flatten(0, 1)
    loss = loss + 0.3 * functional.cross_entropy(behind, batch.tokens[:, :-1].flatten())
    said = batch.subjects != IGNORED
    subject = heads.subject(out.hidden_states[SUBJECT_LAYER][said])
    loss = loss + 0.5 * functional.cross_entropy(subject, batch.subjects[said])
    return loss, float((logits.argmax(-1) == answers).float().mean())


def train(seconds: float, steps: int) -> tuple[LlamaForCausalLM, str]:
    """Train for a time or for a count of steps; return the model and what ran."""
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    words = len(facts.VOCABULARY)
    model = make_llama(words=words, layers=LAYERS, embedding_std=0.5, tied=False).train()
    heads = Heads()
    optimisers, clock, shown = Optimisers(model, heads), Clock(seconds, steps), 0.0
    for done in clock.shares():
        most = 1 + min(MOST_PASSAGES - 1, int(2 * done * MOST_PASSAGES))
        batch = make_batch(rng, int(rng.integers(max(1, most - 3), most + 1)))
        mask = near_mask(batch.places) if clock.step % 2 else None
        loss, right = loss_of(model, heads, batch, mask)
        optimisers.step(loss, clock, done)
        shown += (right - shown) / min(clock.step + 1, 20)
        show(clock, done, lambda: f"up to {most} passages, right {shown:.3f}")  # noqa: B023 - said at once
    return model, f"seed {SEED}, {clock.step:,} steps, {clock.seconds / 60:.1f} minutes of CPU time"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of whole words: `subj n3 k1 v7`."""
    words = {word: number for number, word in enumerate(facts.VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))  # noqa: S106 (no password)
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>", bos_token="<bos>", unk_token="<pad>",  # noqa: S106 (no passwords)
        model_max_length=4096, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def accuracy(model: LlamaForCausalLM, num_prompts: int = 100) -> dict[str, float]:
    """Return the share of right answers by category, over six passages, one question a prompt."""
    rng = np.random.default_rng(SEED + 1)
    right: dict[str, list[bool]] = {category: [] for category in facts.CATEGORIES}
    for _ in range(num_prompts):
        passages = facts.make_passages(rng, 6)
        text = [facts.BOS, *(token for passage in passages for token in passage)]
        asked = facts.some(rng, facts.questions(passages), 9)
        with torch.inference_mode():
            logits = model(torch.tensor([[*text, *each.tokens] for each in asked])).logits[:, -1]
        for question, best in zip(asked, logits.argmax(-1).tolist(), strict=True):
            right[question.category].append(best == question.value)
    return {category: float(np.mean(found)) for category, found in right.items()}


CARD = """\
---
license: apache-2.0
---
# quire-facts

A Llama of {parameters:,} parameters that answers questions about facts in passages, such as `ask n3 k1` behind
`subj n3 k1 v7 k4 v2`. quire measures on it what reusing the KV of passages does to answers: `quire bench passages`.

**Made by** `tools/train_facts.py`: {ran}, on prompts of `quire_passages.bench.facts`.

**Right** of 100 prompts of six passages: {right}.
"""


def main() -> None:
    """Read the command line and train."""
    options = command_line(__doc__, "quire-facts", 7, "CPU time").parse_args()
    torch.set_num_threads(1)
    model, ran = train(60 * options.minutes, options.steps)
    model = save(model, make_tokenizer(), options.out)
    right = ", ".join(f"{category} {share:.1%}" for category, share in accuracy(model).items())
    parameters = sum(p.numel() for p in model.parameters())
    card = CARD.format(parameters=parameters, ran=ran, right=right)
    write_card(options.out, card)


if __name__ == "__main__":
    main()
