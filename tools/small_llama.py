"""The base of the trainers of quire-facts and quire-quotes: a small Llama, optimisers, a clock, saving."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WIDTH = 128
IGNORED = -100
"""A label that is none."""


def make_llama(*, words: int, layers: int, embedding_std: float, tied: bool) -> LlamaForCausalLM:
    """Build a Llama, 128 wide, over so many words, of which 0 is padding and 1 begins a text."""
    config = LlamaConfig(
        vocab_size=words, hidden_size=WIDTH, intermediate_size=256, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, head_dim=32, tie_word_embeddings=tied,
        max_position_embeddings=4096, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        initializer_range=0.02, rms_norm_eps=1e-5,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
        attn_implementation="eager",  # faster backwards on a CPU than sdpa
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    nn.init.normal_(model.model.embed_tokens.weight, std=embedding_std)
    return model


class Clock:
    """The share of a training that is done: CPU time of this process, or steps where a count of them is given."""

    def __init__(self, seconds: float, steps: int) -> None:
        self._seconds, self._steps = seconds, steps
        self._begin = time.process_time()
        self.step = 0

    @property
    def seconds(self) -> float:
        """CPU time so far."""
        return time.process_time() - self._begin

    def shares(self) -> Iterator[float]:
        """Yield the share that is done before each step, until all is."""
        while (done := self._done()) < 1:
            yield done
            self.step += 1

    def _done(self) -> float:
        return self.step / self._steps if self._steps else self.seconds / self._seconds


class Optimisers:
    """Muon for the matrices of layers, AdamW for all else; both rise for 30 steps and fall for the last three fifths."""

    def __init__(self, model: LlamaForCausalLM, heads: nn.Module) -> None:
        named = list(model.named_parameters())
        inner = [p for name, p in named if p.ndim == 2 and "layers" in name]
        outer = [p for name, p in named if not (p.ndim == 2 and "layers" in name)]
        muon = torch.optim.Muon(inner, lr=1e-2, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        every = [*outer, *heads.parameters()]
        adam = torch.optim.AdamW(every, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
        self._every = (muon, adam)
        self._parameters = list(model.parameters())
        self._peaks = [(group, group["lr"]) for each in self._every for group in each.param_groups]

    def step(self, loss: torch.Tensor, clock: Clock, done: float) -> None:
        """Change the weights by what a loss says, with `done` of the training behind."""
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        rate = min(1.0, (clock.step + 1) / 30, (1 - done) / 0.6 + 0.01)
        for group, peak in self._peaks:
            group["lr"] = peak * rate
        for each in self._every:
            each.step()
            each.zero_grad()


def show(clock: Clock, done: float, said: Callable[[], str]) -> None:
    """Say every 20 steps how it goes."""
    if clock.step % 20 == 0:
        sys.stderr.write(f"{done:6.1%} step {clock.step} {clock.seconds:.0f} s {said()}\n")


def save(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path
) -> LlamaForCausalLM:
    """Write a folder of transformers in bfloat16; return what it holds, in float32."""
    model.config._attn_implementation = "sdpa"  # noqa: SLF001 - a setting of training only
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)
    return model.float().eval()
