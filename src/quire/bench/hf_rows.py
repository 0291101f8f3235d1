"""Rows of the transformers engine: plain `generate`, an expert's hand-kept cache, and quire."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from quire.assets import demo_model
from quire.bench.timing import Progress, Row, Stamp, check_names
from quire.engines.hf import PrefixCache

Way = Literal["plain", "cold", "by_hand", "warm"]

WAYS: tuple[Way, ...] = ("plain", "cold", "by_hand", "warm")
"""How a prompt is generated from, in the order of each round:

plain    model.generate, nothing kept
cold     quire, with a prefix that it has never seen: what a miss costs
by_hand  what an expert writes: a DynamicCache of the prefix is kept, copied, and passed in
warm     quire, with the prefix cached
"""


def quire_tiny() -> Any:
    """Load quire-tiny in float32, in eval mode, on the CPU."""
    models: Any = AutoModelForCausalLM
    return models.from_pretrained(demo_model(), dtype=torch.float32).eval()


def random_llama(hidden: int, layers: int) -> Any:
    """Make a Llama of random weights (seed 0), float32, in eval mode, on the CPU."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 256, 1),
        max_position_embeddings=8192,
        initializer_range=0.05,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng():  # pyright: ignore[reportUnknownMemberType]
        torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
        return LlamaForCausalLM(config).eval()


PREFIXES = {"512": 512, "1k": 1024, "2k": 2048, "4k": 4096}
MODELS: dict[str, Callable[[], Any]] = {"": quire_tiny, "_25m": lambda: random_llama(512, 8)}
"""By suffix of the rows' names: quire-tiny (3.8 M), and a random Llama (25 M, 8 layers of 512)."""

QUICK_PREFIXES = ("512", "2k")
SUFFIX_TOKENS = 32
NEW_TOKENS = 33
ROUNDS, QUICK_ROUNDS = 7, 3
CAPACITY = "512MiB"

FIGURES = {"ttft": "median_ms", "decode": "tokens_per_s"}
"""What is measured of a call, and the key that it stands under in its row."""

RATIOS: dict[str, Way] = {"ratio_to_plain": "plain", "ratio_to_hand": "by_hand"}


class Sample(NamedTuple):
    """One call: milliseconds to the first new token, new tokens per second from there, the tokens."""

    ttft: float
    decode: float
    tokens: list[int]


Samples = dict[Way, list[Sample]]
"""The calls of each way, round by round; equal places are of the same round."""


def rows(
    names: list[str] | None = None, progress: Progress | None = None, *, quick: bool = False
) -> list[Row]:
    """Measure the named rows (all by default): wall time, medians of interleaved rounds.

    `hf_ttft_*` have `median_ms` to the first new token; `hf_decode_*` have `tokens_per_s`, from
    the first new token to the call's return, so that what quire stores at the end is in it.
    `ratio_to_plain` and `ratio_to_hand` are the median over rounds of this row's value over the
    other way's: for times below 1 is faster, for rates above 1. `same_tokens` says whether the
    new tokens were plain's in every round; a cold prefix is compared with nothing.

    `quick` leaves out the larger model, two prefixes and most rounds. Raises `ValueError` for
    a name that does not exist.
    """
    wanted = names or row_names(quick=quick)
    check_names(wanted, row_names())
    measured: dict[str, Row] = {}
    for suffix, make in MODELS.items():
        prefixes = [p for p in PREFIXES if set(wanted) & set(_names(p, suffix))]
        if not prefixes:
            continue
        bench = Bench(make())
        for prefix in prefixes:
            if progress is not None:
                progress(f"{prefix} tokens, {bench.num_parameters / 1e6:.0f} M parameters")
            samples = bench.run(PREFIXES[prefix], QUICK_ROUNDS if quick else ROUNDS)
            measured |= {str(row["name"]): row for row in _rows(samples, prefix, suffix)}
    return [measured[name] for name in wanted]


def row_names(*, quick: bool = False) -> list[str]:
    """Return the names of all rows, in the order of the table."""
    return [
        name
        for suffix in MODELS
        for prefix in PREFIXES
        if not quick or (prefix in QUICK_PREFIXES and not suffix)
        for name in _names(prefix, suffix)
    ]


class Bench:
    """One model, plain and behind a `PrefixCache`."""

    def __init__(self, model: Any) -> None:
        model.generation_config.eos_token_id = None
        self._model = model
        self._cache = PrefixCache(model, CAPACITY)
        self._random = torch.Generator().manual_seed(0)

    @property
    def num_parameters(self) -> int:
        """Weights of the model."""
        return sum(weight.numel() for weight in self._model.parameters())

    def run(self, num_prefix: int, num_rounds: int) -> Samples:
        """Time all ways in turn, `num_rounds` times after one that is not counted.

        Each round has a fresh suffix, the same for all ways; cold has a fresh prefix too.
        """
        self._cache.clear()
        prefix = self._draw(num_prefix)
        kept = DynamicCache(config=self._model.config)
        with torch.inference_mode():
            self._model(prefix, past_key_values=kept, use_cache=True)
        self._quire(prefix, Stamp())
        samples: Samples = {way: [] for way in WAYS}
        for _ in range(num_rounds + 1):
            prompt = torch.cat([prefix, self._draw(SUFFIX_TOKENS)], dim=1)
            fresh = self._draw(num_prefix + SUFFIX_TOKENS)
            calls: dict[Way, Callable[[Any], Any]] = {
                "plain": lambda stamp, ids=prompt: self._plain(ids, stamp),
                "cold": lambda stamp, ids=fresh: self._quire(ids, stamp),
                "by_hand": lambda stamp, ids=prompt: self._by_hand(ids, kept, stamp),
                "warm": lambda stamp, ids=prompt: self._quire(ids, stamp),
            }
            for way, call in calls.items():
                samples[way].append(_timed(call))
        return {way: taken[1:] for way, taken in samples.items()}

    def _plain(self, ids: Any, stamp: Stamp) -> Any:
        return self._model.generate(ids, **_arguments(ids, stamp))

    def _by_hand(self, ids: Any, kept: DynamicCache, stamp: Stamp) -> Any:
        past = copy.deepcopy(kept)
        return self._model.generate(ids, past_key_values=past, **_arguments(ids, stamp))

    def _quire(self, ids: Any, stamp: Stamp) -> Any:
        return self._cache.generate(ids, **_arguments(ids, stamp))

    def _draw(self, num_tokens: int) -> torch.Tensor:
        return torch.randint(1, 256, (1, num_tokens), generator=self._random)


def _timed(call: Callable[[Stamp], Any]) -> Sample:
    """Make one call to its return, so that what quire stores at the end is in it."""
    stamp = Stamp()
    output = call(stamp)
    decode_s = time.perf_counter() - stamp.first_at
    return Sample(
        (stamp.first_at - stamp.started) * 1e3, (NEW_TOKENS - 1) / decode_s, output[0].tolist()
    )


def _arguments(ids: Any, stamp: Stamp) -> dict[str, Any]:
    return {
        "attention_mask": torch.ones_like(ids),
        "streamer": stamp,
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "pad_token_id": 0,
    }


def _names(prefix: str, suffix: str) -> list[str]:
    return [f"hf_{figure}_{way}_{prefix}{suffix}" for figure in FIGURES for way in WAYS]


def _rows(samples: Samples, prefix: str, suffix: str) -> list[Row]:
    made: list[Row] = []
    for figure, key in FIGURES.items():
        values: dict[Way, list[float]] = {
            way: [getattr(sample, figure) for sample in taken] for way, taken in samples.items()
        }
        for way in WAYS:
            row: Row = {"name": f"hf_{figure}_{way}_{prefix}{suffix}", key: median(values[way])}
            for ratio, other in RATIOS.items():
                if way != other:
                    pairs = zip(values[way], values[other], strict=True)
                    row[ratio] = median(mine / theirs for mine, theirs in pairs)
            if way in {"by_hand", "warm"}:
                rounds = zip(samples[way], samples["plain"], strict=True)
                same = all(mine.tokens == plain.tokens for mine, plain in rounds)
                row["same_tokens"] = "yes" if same else "NO"
            made.append(row)
    return made
