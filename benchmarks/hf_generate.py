"""Time to first token and decode speed of `generate`: without reuse, by hand, with quire.

    .venv/bin/python benchmarks/hf_generate.py [--model tiny|small|large] [--prefix 2048]

"by hand" is what a careful user writes without quire: the prefix is computed once into a
`DynamicCache`, and each request works on a deep copy of it. Every request has its own tail of
32 tokens, so that nothing but the prefix is found cached. Times are CPU seconds of one thread (on a GPU they would mean nothing), medians of
interleaved rounds.
"""

import argparse
import copy
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from quire.engines.hf import PrefixCache

TAIL = 32
SIZES = {
    "small": {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4},
    "large": {"hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12},
}


class Clock(transformers.generation.streamers.BaseStreamer):
    """Notes when tokens arrive; the first `put` is the prompt."""

    def __init__(self):
        self.times = [time.process_time()]

    def put(self, value):  # noqa: ARG002 - what the protocol passes
        self.times.append(time.process_time())

    def end(self):
        pass

    @property
    def ttft(self):
        return self.times[2] - self.times[0]

    @property
    def tokens_per_second(self):
        return (len(self.times) - 3) / (self.times[-1] - self.times[2])


def load(name):
    if name == "tiny":
        import quire

        path = Path(quire.__file__).parent / "assets" / "quire-tiny"
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    else:
        torch.manual_seed(0)
        shape = SIZES[name]
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=4096,
                intermediate_size=8 * shape["hidden_size"] // 3,
                num_key_value_heads=shape["num_attention_heads"] // 2,
                max_position_embeddings=16384,
                **shape,
            )
        )
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["tiny", *SIZES], default="tiny")
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = load(options.model)
    vocab = model.config.vocab_size
    prefix = torch.randint(3, vocab, (1, options.prefix))
    kept = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prefix, past_key_values=kept, use_cache=True, logits_to_keep=1)
    cache = PrefixCache(model, "1GiB")
    cache.generate(prefix, max_new_tokens=1)

    def without_reuse(ids, **arguments):
        return model.generate(ids, **arguments)

    def by_hand(ids, **arguments):
        return model.generate(ids, past_key_values=copy.deepcopy(kept), **arguments)

    def with_quire(ids, **arguments):
        return cache.generate(ids, **arguments)

    ways = {"without reuse": without_reuse, "by hand": by_hand, "quire": with_quire}
    measured = {name: ([], [], []) for name in ways}
    for round_index in range(options.rounds + 1):
        ids = torch.cat([prefix, torch.randint(3, vocab, (1, TAIL))], dim=1)
        outputs = []
        for name, way in ways.items():
            if name == "without reuse" and round_index > 3:
                continue
            clock = Clock()
            outputs.append(
                way(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=options.new,
                    do_sample=False,
                    streamer=clock,
                )
            )
            total = time.process_time() - clock.times[0]
            if round_index:
                numbers = clock.ttft, clock.tokens_per_second, total
                for values, number in zip(measured[name], numbers, strict=True):
                    values.append(number)
        assert all(torch.equal(outputs[0], other) for other in outputs)
    print(
        f"{options.model}, prefix {options.prefix} + {TAIL} tokens, {options.new} new, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{platform.machine()}, 1 thread"
    )
    for name, (ttft, speed, total) in measured.items():
        print(
            f"{name:14} ttft {statistics.median(ttft) * 1e3:8.1f} ms   "
            f"decode {statistics.median(speed):7.1f} tokens/s   "
            f"whole call {statistics.median(total) * 1e3:8.1f} ms"
        )


if __name__ == "__main__":
    main()
