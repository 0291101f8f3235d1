"""The demo's two runs: the same conversations with and without quire, measured."""

import time
from collections.abc import Callable
from statistics import median
from string import ascii_uppercase
from typing import Any, NamedTuple, TypeAlias

from quire.cli.chat import Messages, Timed, message, prompt_inputs, reply_text, timed
from quire.cli.talks import MAX_CONVERSATIONS, MAX_TURNS, QUESTIONS, SAMPLED_QUESTION, system_text
from quire.errors import ConfigError

WARM_TOKENS = 2000
"""A turn with so many cached tokens counts as warm in the medians."""

NUM_SAMPLES = 4

Call: TypeAlias = dict[str, Any]
"""One prompt, generated from twice: `before` without quire, `after` with it; times in ms."""


class DemoSize(NamedTuple):
    """The size of the demo. Raises `ConfigError` through `check`."""

    num_conversations: int = 5
    num_turns: int = 3
    system_tokens: int = 3000
    max_new_tokens: int = 64
    seed: int = 0

    def check(self) -> None:
        """Raise `ConfigError` unless the numbers are within the demo's text."""
        limits = (MAX_CONVERSATIONS, MAX_TURNS, 100_000, 1000)
        for name, value, limit in zip(self._fields, self, limits, strict=False):
            if not 1 <= value <= limit:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} is {value}; it must be between 1 and {limit}")


def figures(turns: list[Call], sample: Call) -> dict[str, Any]:
    """Return what calls come to. Medians are over `warm` turns, the same on both sides."""
    calls = [*turns, sample]
    long = any(call["cached_tokens"] >= WARM_TOKENS for call in turns)
    warm_tokens = WARM_TOKENS if long else 1
    warm = [call for call in turns if call["cached_tokens"] >= warm_tokens]

    def middle(name: str) -> float | None:
        return median(call[name] for call in warm) if warm else None

    sums = {
        name: sum(call[name] for call in calls)
        for name in ("prompt_tokens", "cached_tokens", "total_before_ms", "total_after_ms")
    }
    return {
        "outputs_identical": all(call["identical"] for call in calls),
        "prompt_tokens": sums["prompt_tokens"],
        "reused_tokens": sums["cached_tokens"],
        "hit_rate": sums["cached_tokens"] / sums["prompt_tokens"],
        "ttft_ms_cold_median": middle("ttft_before_ms"),
        "ttft_ms_warm_median": middle("ttft_after_ms"),
        "ttft_speedup_median": middle("speedup"),
        "median_over_turns_with_cached_tokens": warm_tokens,
        "calls_ms_before": sums["total_before_ms"],
        "calls_ms_after": sums["total_after_ms"],
        "turns": turns,
        "sample": sample,
    }


class Side(NamedTuple):
    """The output of one side of a comparison for one prompt.

    `said` is equal on both sides if nothing differs.
    """

    replies: list[str]
    said: Any
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    total_s: float


class SideBySide:
    """A model, and the same model behind a `PrefixCache`; each has its own conversations.

    Each prompt goes through both, one after the other, so that both meet the same machine. A
    conversation goes on with the reply of its own side: if one reply ever differed, the two
    sides would go apart, and the comparison says so.
    """

    def __init__(self, model: Any, tokenizer: Any, cache: Any, size: DemoSize) -> None:
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self._begin(size, lambda text: len(tokenizer(text)["input_ids"]))
        pad = model.generation_config.pad_token_id
        self._arguments = {
            "max_new_tokens": size.max_new_tokens,
            "pad_token_id": tokenizer.eos_token_id if pad is None else pad,
        }

    def _begin(self, size: DemoSize, count: Callable[[str], int]) -> None:
        """Begin all conversations; `count` returns the tokens of a text."""
        self._size = size
        self._system = message("system", system_text(size.system_tokens, count))
        self._talks = {
            label: ([self._system], [self._system])
            for label in ascii_uppercase[: size.num_conversations]
        }

    def warm_up(self) -> None:
        """Run both sides once on a text of their own, so that no turn pays for first calls."""
        ids = self._ids([message("user", "The first call sets things up.")])
        for generate in (self.model.generate, self.cache.generate):
            self._timed(generate, ids, do_sample=False)
        self.cache.clear()

    def turn(self, label: str, turn: int) -> Call:
        """Ask the next question of a conversation and keep the replies in it."""
        before, after = self._talks[label]
        question = QUESTIONS[ascii_uppercase.index(label)][turn - 1]
        for talk in (before, after):
            talk.append(message("user", question))
        return self._call(label, turn, before, after)

    def sample(self) -> Call:
        """Draw four replies to one question, seeded, under the same system prompt."""
        talk = [self._system, message("user", SAMPLED_QUESTION)]
        return self._call("samples", 1, talk, list(talk), num_samples=NUM_SAMPLES)

    def ended(self) -> dict[str, Any]:
        """Return the pool and the counters, when all is asked."""
        from quire import ops

        ops.check(self.cache.manager)
        snapshot = self.cache.snapshot()
        pool = snapshot["groups"][0] | {"num_bytes": self.cache.kept.num_bytes}
        return {"pool": pool, "stats": snapshot["stats"]}

    def _call(
        self, label: str, turn: int, before: Messages, after: Messages, num_samples: int = 0
    ) -> Call:
        question = before[-1]["content"]
        plain, reused = self._sides(before, after, num_samples)
        for talk, side in ((before, plain), (after, reused)):
            talk.append(message("assistant", side.replies[0]))
        return {
            "conversation": label,
            "turn": turn,
            "prompt_tokens": reused.prompt_tokens,
            "cached_tokens": reused.cached_tokens,
            "ttft_before_ms": plain.ttft_s * 1e3,
            "ttft_after_ms": reused.ttft_s * 1e3,
            "total_before_ms": plain.total_s * 1e3,
            "total_after_ms": reused.total_s * 1e3,
            "identical": plain.said == reused.said and not plain.cached_tokens,
            "question": question,
            "replies": reused.replies,
            "speedup": plain.ttft_s / reused.ttft_s,
        }

    def _sides(self, before: Messages, after: Messages, num_samples: int) -> tuple[Side, Side]:
        """Return what is generated from a prompt on either side: the likeliest, or so many samples."""
        drawn: Any = {"do_sample": num_samples > 0}
        if num_samples:
            drawn["num_return_sequences"] = num_samples
        plain = self._timed(self.model.generate, self._ids(before), **drawn)
        reused = self._timed(self.cache.generate, self._ids(after), **drawn)
        report = self.cache.last

        def side(made: Timed, cached_tokens: int) -> Side:
            replies = [reply_text(self.tokenizer, ids) for ids in made.new_ids]
            counts = report.prompt_tokens, cached_tokens
            return Side(replies, made.new_ids, *counts, made.ttft_s, made.total_s)

        return side(plain, 0), side(reused, report.cached_tokens)

    def _timed(self, generate: Callable[..., Any], ids: Any, **arguments: Any) -> Timed:
        import torch

        torch.manual_seed(self._size.seed)  # pyright: ignore[reportUnknownMemberType]
        return timed(generate, ids, **self._arguments, **arguments)

    def _ids(self, talk: Messages) -> Any:
        return prompt_inputs(self.tokenizer, talk)["input_ids"].to(self.model.device)


def settle_threads(model: Any) -> int:
    """Set torch's CPU threads to what plain generate is fastest with, 1 or torch's choice.

    On a busy machine, the threads of a small model wait for each other at each of its many short
    steps, and one thread is several times faster. The model without quire decides: a prompt of
    512 tokens, the best of three calls each, in turns.
    """
    import torch

    default = torch.get_num_threads()
    ids = torch.full((1, 512), 32, device=model.device)
    best = dict.fromkeys((default, 1), float("inf"))
    for threads in (default, 1) * 3:
        torch.set_num_threads(threads)
        made = timed(model.generate, ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        best[threads] = min(best[threads], made.total_s)
    fastest = min(best, key=lambda threads: best[threads])
    torch.set_num_threads(fastest)
    return fastest


def compare(pair: SideBySide, size: DemoSize, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the interleaved conversations and the parallel sample; `say` hears what is next.

    Returns what was found as plain data: every call, and what they come to.
    """
    started = time.perf_counter()
    pair.warm_up()
    turns: list[Call] = []
    for turn in range(1, size.num_turns + 1):
        for label in ascii_uppercase[: size.num_conversations]:
            say(f"conversation {label}, turn {turn}: without quire, then with it")
            turns.append(pair.turn(label, turn))
    say(f"{NUM_SAMPLES} samples of one prompt: without quire, then with it")
    sample = pair.sample()
    seconds = time.perf_counter() - started
    return figures(turns, sample) | {"seconds": seconds} | pair.ended()
