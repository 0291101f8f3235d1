"""Train quire-tiny, the byte-level Llama of 3.8 M parameters that quire's demo and tests run.

What: a LlamaForCausalLM (5 layers, 256 wide, 4 query heads, 2 key-value heads) over 256 bytes and
    eight special tokens, saved as an ordinary transformers folder: weights in bfloat16,
    tokenizer, chat template, generation settings and a model card with the measured loss.
On what: the English prose of the CPython that runs this file (see `tiny_text.py`), two fifths as
    text and three fifths as conversations. One module in twenty is held out and measured on.
How long: `--minutes` of wall time; the learning rate reaches zero as they end. One core with
    AVX512-BF16 reads about 3,000 bytes a second. Every nine minutes the averaged weights are
    written, so that the folder can be used before the end.
Licence: the text is (c) Python Software Foundation, PSF License Version 2.
Seed: 2718, for the weights, the text and its order. The clock decides how many steps fit; with
    `--steps` the schedule follows the count of steps instead, and two runs are the same run.

    python tools/train_tiny.py --minutes 45
"""

import math
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tiny_text import ASSISTANT, BOS, EOS, render
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import command_line
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quire_passages.bench.prose import Library, is_held_out, read_library

SEED = 2718
SPECIALS = ("<pad>", "<bos>", "<eos>", "<system>", "<user>", "<assistant>", "<r0>", "<r1>")
PAD = 256
CHAT_TEMPLATE = (
    "<bos>{% if tools %}<system>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STEP_TOKENS = 4096
# (until this share of the run, sequence length -> share of the steps)
LENGTHS: tuple[tuple[float, dict[int, float]], ...] = (
    (0.40, {256: 0.82, 1024: 0.12, 4096: 0.06}),
    (0.80, {512: 0.50, 1024: 0.38, 4096: 0.12}),
    (1.01, {1024: 0.40, 4096: 0.48, 6144: 0.12}),
)
DECAY_FROM = 0.40


class Stream:
    """Random crops of rendered text; the text is rendered anew once it has been read through."""

    def __init__(self, library: Library, rng: np.random.Generator) -> None:
        self.library, self.rng = library, rng
        self.tokens, self.left = np.empty(0, dtype=np.int16), 0

    def batch(self, length: int) -> torch.Tensor:
        """Return about STEP_TOKENS tokens as rows of `length` + 1."""
        if self.left <= 0:
            self.tokens = render(self.library, self.rng)
            self.left = len(self.tokens)
        starts = self.rng.integers(0, len(self.tokens) - length - 1, max(1, STEP_TOKENS // length))
        self.left -= length * len(starts)
        return torch.from_numpy(np.stack([self.tokens[s : s + length + 1] for s in starts])).long()


def make_model() -> LlamaForCausalLM:
    """Build the model; blocks begin as the identity."""
    config = LlamaConfig(
        vocab_size=264, hidden_size=256, intermediate_size=704, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
        max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 2e4},
        initializer_range=0.02, rms_norm_eps=1e-5,
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer whose token number is the byte's value, with the specials behind."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    names = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    core = Tokenizer(models.BPE(vocab={names[b]: b for b in range(256)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, chat_template=CHAT_TEMPLATE, model_max_length=8192,
        clean_up_tokenization_spaces=False,
        pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",  # noqa: S106 (no passwords)
    )  # fmt: skip


def bits_by_position(model: LlamaForCausalLM, tokens: np.ndarray, rows: int = 12) -> list[float]:
    """Measure bits per byte at context 0-1k, 1k-2k, 2k-4k and 4k-6k, then over all of it."""
    length, step = 6144, (len(tokens) - 6145) // max(1, rows - 1)
    losses: list[torch.Tensor] = []
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for start in range(0, len(tokens) - length, step):
            row = torch.from_numpy(tokens[start : start + length + 1]).long()
            logits = model(input_ids=row[None, :-1]).logits[0].float()
            losses.append(functional.cross_entropy(logits, row[1:], reduction="none"))
    bits = torch.stack(losses).mean(0) / math.log(2)
    spans = ((0, 1024), (1024, 2048), (2048, 4096), (4096, 6144), (0, 6144))
    return [float(bits[a:b].mean()) for a, b in spans]


def save(model: LlamaForCausalLM, out: Path, held: np.ndarray, train_bytes: int, ran: str) -> str:
    """Write the folder in bfloat16 with tokenizer, generation settings and model card."""
    state = {k: v.bfloat16() for k, v in model.state_dict().items()}
    half = LlamaForCausalLM(model.config).bfloat16()
    half.load_state_dict(state)
    half.save_pretrained(out)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(out)
    bits = bits_by_position(model.eval(), held)
    ends = np.flatnonzero(held == ASSISTANT)
    end = int(ends[ends > 3000][0]) + 1
    prompt = torch.from_numpy(held[end - 3000 : end]).long()[None]
    torch.manual_seed(SEED)
    sample = model.generate(prompt, max_new_tokens=500, do_sample=True, temperature=0.7, top_p=0.9)
    model.train()
    card = CARD.format(
        parameters=f"{sum(p.numel() for p in model.parameters()):,}",
        size=f"{(out / 'model.safetensors').stat().st_size:,}",
        train_bytes=f"{train_bytes:,}",
        held_bytes=f"{len(held):,}",
        bits=" | ".join(f"{b:.2f}" for b in bits),
        ran=ran,
        python=platform.python_version(),
        question=tokenizer.decode(prompt[0, -200:]).rpartition("<user>")[2].partition("<")[0],
        sample=tokenizer.decode(sample[0, 3000:], skip_special_tokens=True).replace("\n", "\n> "),
    )
    (out / "README.md").write_text(card, "utf-8")
    return card


CARD = """\
---
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
language: en
---
# quire-tiny

A Llama of {parameters} parameters over bytes, {size} bytes of bfloat16. quire's demo and tests run
on it: a real transformers model that needs no download. It answers what `quire
demo` asks, and nothing else it says should be believed.

**Made by** `tools/train_tiny.py`: {ran}.

**Data.** {train_bytes} bytes of prose taken from CPython {python}: the reference manual
(`pydoc_data.topics`) and the docstrings and comments of the standard library. Copyright (c)
2001-2023 Python Software Foundation; All Rights Reserved; used under the PSF License Version 2.
Changes: markup, code and tables were dropped, paragraphs unwrapped and laid out as conversations.
Then some sixty short questions about Python with their answers, written for quire (`tools/tiny_talks.py`): those it knows
by heart, and what it says to others is made of them.

**Tokens.** Token n is byte n; 256 to 261 are `<pad> <bos> <eos> <system> <user> <assistant>`. A
conversation is `<bos><system>...<user>...<assistant>...<eos><user>...`, so its tokens are exactly
the first tokens of the same conversation with another turn.

**Bits per byte** on {held_bytes} bytes of held-out modules, by position in the context:

| 0-1k | 1k-2k | 2k-4k | 4k-6k | all |
|---|---|---|---|---|
| {bits} |

**Sample**, temperature 0.7 and top-p 0.9, after 3000 bytes of a held-out conversation that ask
"{question}":

> {sample}
"""


def train(minutes: float, steps: int, out: Path) -> str:
    """Train for a time or for a count of steps, saving on the way, and return the model card."""
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    library = read_library()
    held = {name: entries for name, entries in library.items() if is_held_out(name)}
    stream = Stream({k: v for k, v in library.items() if k not in held}, rng)
    held_tokens = render(held, np.random.default_rng(SEED))
    train_bytes = sum(len(p) for v in stream.library.values() for e in v for p in e.paragraphs)
    model = make_model().train()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = torch.optim.Muon(matrices, lr=1.5e-2, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = [(group, group["lr"]) for o in (muon, adam) for group in o.param_groups]
    begin = saved = time.monotonic()
    step, seconds, loss_average = 0, 0.0, 0.0
    while (done := step / steps if steps else (time.monotonic() - begin) / (60 * minutes)) < 1:
        lengths = next(shares for until, shares in LENGTHS if done < until)
        rows = stream.batch(int(rng.choice(list(lengths), p=list(lengths.values()))))
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=rows[:, :-1]).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = min(1.0, (step + 1) / 50, (1 - done) / (1 - DECAY_FROM) + 0.005)
        for group, peak in schedule:
            group["lr"] = peak * rate
        for optimiser in (muon, adam):
            optimiser.step()
            optimiser.zero_grad()
        average.update_parameters(model)
        step += 1
        loss_average += (loss.item() / math.log(2) - loss_average) / min(step, 50)
        seconds = time.monotonic() - begin
        if sys.stderr.isatty():
            text = f"\r{done:6.1%} step {step} {seconds / 60:.1f} min {loss_average:.3f} bits/byte "
            sys.stderr.write(text)
        if time.monotonic() - saved > 9 * 60:
            save(average.module, out, held_tokens, train_bytes, f"unfinished, {step:,} steps")
            saved = time.monotonic()
    ran = f"seed {SEED}, {step:,} steps of about {STEP_TOKENS:,} bytes, {seconds / 60:.0f} minutes"
    return save(model, out, held_tokens, train_bytes, ran)


def main() -> None:
    """Read the command line and train."""
    parser = command_line(__doc__, "quire-tiny", 45, "wall time")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sys.stdout.write(train(options.minutes, options.steps, options.out))


if __name__ == "__main__":
    main()
