"""Teach quire-tiny short conversations, after `train_tiny.py` has taught it to read and write.

What: the same weights, trained on: nine steps of conversations (`tiny_talks.py`, the answers
    alone count) to one of the text that it was trained on first. Written in place.
How long: a step of 2,800 to 4,096 bytes takes about two seconds of one core with AVX512-BF16.
Seed: 2718; two runs of as many steps are the same run. A second run goes on where the first ended.

    python tools/teach_tiny.py --steps 300
    python tools/teach_tiny.py --steps 150 --rate 7e-4 --seed 3141
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tiny_talks import Talks
from tiny_text import render
from torch.nn import functional
from train_tiny import SEED, Stream, save
from transformers import LlamaForCausalLM

from quire_passages.bench.prose import is_held_out, read_library

ROWS = ((700, 4, 0.40), (1600, 2, 0.15), (4096, 1, 0.35), (0, 0, 0.10))
"""Length of rows, rows of a step, and share of the steps; length 0 is plain text."""


def teach(folder: Path, steps: int, rate: float, seed: int) -> str:
    """Train on for so many steps, save in place, and return the model card."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    library = read_library()
    held = {name: entries for name, entries in library.items() if is_held_out(name)}
    stream = Stream({k: v for k, v in library.items() if k not in held}, rng)
    names = [entry.name for entries in stream.library.values() for entry in entries]
    talks = Talks(names, rng)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    begin = time.monotonic()
    for step in range(steps):
        length, count, _ = ROWS[rng.choice(len(ROWS), p=[share for *_, share in ROWS])]
        if length:
            rows = [talks.row(length) for _ in range(count)]
            tokens, labels = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
            tokens, labels = tokens[:, :-1], labels[:, 1:]
        else:
            batch = stream.batch(512)
            tokens, labels = batch[:, :-1], batch[:, 1:]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=tokens).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 40, 1.25 * (1 - step / steps))
        optimiser.step()
        optimiser.zero_grad()
        if step % 20 == 0:
            minutes = (time.monotonic() - begin) / 60
            sys.stderr.write(
                f"step {step} length {length} {minutes:.1f} min loss {loss.item():.3f}\n"
            )
    card = (folder / "README.md").read_text("utf-8")
    ran = card.partition("`tools/train_tiny.py`: ")[2].partition(".\n")[0]
    train_bytes = sum(len(p) for v in stream.library.values() for e in v for p in e.paragraphs)
    taught = f"{ran}; then `tools/teach_tiny.py`: seed {seed}, {steps:,} steps at {rate:g}"
    return save(model, folder, render(held, np.random.default_rng(SEED)), train_bytes, taught)


def main() -> None:
    """Read the command line and teach."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(__file__).parent.parent / "src" / "quire" / "assets" / "quire-tiny"
    parser.add_argument("--steps", type=int, default=300, help="how many steps (default 300)")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate (default 1e-3)")
    parser.add_argument("--seed", type=int, default=SEED, help=f"seed (default {SEED})")
    parser.add_argument("--folder", type=Path, default=default, help="the model, changed in place")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sys.stdout.write(teach(options.folder, options.steps, options.rate, options.seed))


if __name__ == "__main__":
    main()
