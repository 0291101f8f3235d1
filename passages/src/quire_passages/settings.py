"""Settings of the reuse of passages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast, get_args

from quire.config import parse_bytes
from quire.engines.segments import Segments
from quire.errors import ConfigError
from quire_passages.selectors import KVDeviation, Selector, named_selector

TEXT_PROMPTS = 64
"""Prompts about an operator's texts: so many decide, where few policies agree."""

Capture = Literal["isolated", "contextual", "none"]


@dataclass(frozen=True, slots=True)
class Passages:
    """Settings of passages, for `PrefixCache(passages=...)`.

    capacity        bytes for K and V of passages: "1GiB", or an integer
    selector        chooses the rows to compute again; None: the cheapest that the verdict finds good enough
    target          least agreement with the full forward: passages are reused once it was measured on texts of
                    their tenant, at most 0.01 below with 95 % confidence. None: reused unmeasured
    audit           one of so many prompts is compared with the full forward once the verdict is decided
    capture         how passages are kept that a call does not find. "contextual": K and V are copied from the call where
                    they are exact, at no forward; "isolated": each is computed behind the head alone, at the end of the
                    call; "none": only by calls of `capture`. None: isolated where `warm` or `share_isolated` need it,
                    else contextual
    variants        captures of a passage among others that are kept behind one head; of more, the one whose company is
                    most like another's goes
    share_isolated  whether isolated captures serve all scopes; contextual ones never do
    min_tokens      shorter passages are computed
    worth           passages are reused where that takes at most this share of the work of a plain prefill; None: 0.5
                    where the verdict looks for a policy, 0.9 otherwise
    share           rows of captures and comparisons, by those of requests: in an engine while requests wait, in a
                    `PrefixCache` comparisons alone
    warm            a tier for isolated captures in eight bits, which outlives the store and may outlive the
                    process: "host:4GiB", "disk:/var/passages?capacity=50GiB"; None: none
    warm_key        the path of a file of tier keys that sign records of `warm`; nothing else is accepted from it
    verdicts        a directory in which figures of comparisons are kept for the next process, without text; None: each
                    measures anew
    prompts         prompts in segments that an engine compares first: what they allow serves each tenant whose own
                    prompts have not decided; a `PrefixCache` is given some by `cache.passages.judge`
    gates           a directory in which results of the relocation gate are kept for the next process; None:
                    the gate runs once in each

    Raises `ConfigError` for a setting that cannot work.
    """

    capacity: str | int = "1GiB"
    selector: Selector | None = None
    target: float | None = 0.98
    audit: int = 50
    capture: Capture | None = None
    variants: int = 4
    share_isolated: bool = False
    min_tokens: int = 16
    worth: float | None = None
    share: float = 0.1
    warm: str | None = None
    warm_key: str | Path | None = None
    verdicts: str | Path | None = None
    prompts: Sequence[Segments] = ()
    gates: str | Path | None = None

    def __post_init__(self) -> None:
        parse_bytes(self.capacity)
        if self.capture not in (None, *get_args(Capture)):
            raise ConfigError(
                f"capture={self.capture!r}; it is one of {', '.join(map(repr, get_args(Capture)))}"
            )
        if not isinstance(cast("object", self.selector), Selector | None):
            raise ConfigError(
                f"selector={self.selector!r}; give a selector such as KVDeviation(0.15), or named_selector"
                "('kv-deviation:0.15')"
            )
        if self.worth is not None and not self.worth > 0:
            raise ConfigError(
                f"worth={self.worth}; it is a share of the work of a plain prefill, above 0"
            )
        if self.target is not None and not 0.5 <= self.target < 1:
            raise ConfigError(
                f"target={self.target}; it is the share of next tokens as in the full forward, from 0.5 to below 1, or "
                "None to reuse passages unmeasured"
            )
        if self.audit < 1:
            raise ConfigError(f"audit={self.audit}; one of so many prompts is compared, 1 or more")
        if not 0 <= self.share <= 1:
            raise ConfigError(f"share={self.share}; it is a share of the rows of requests, 0 to 1")
        if self.variants < 1:
            raise ConfigError(f"variants={self.variants}; of a passage 1 or more are kept")
        if self.prompts and self.target is None:
            raise ConfigError(
                "target=None reuses passages unmeasured; leave prompts out, or give a target"
            )
        if self.min_tokens < 1:
            raise ConfigError(f"min_tokens={self.min_tokens}; a passage has at least 1 token")

    @property
    def capturing(self) -> Capture:
        """The way passages are kept."""
        is_isolated = self.warm is not None or self.share_isolated
        return self.capture or ("isolated" if is_isolated else "contextual")

    @property
    def most_work(self) -> float:
        """The most work that reuse may take, of a plain prefill's."""
        is_sought = self.selector is None and self.target is not None
        return self.worth or (0.5 if is_sought else 0.9)

    @property
    def chosen(self) -> Selector:
        """The selector, where no verdict chooses another."""
        return KVDeviation() if self.selector is None else self.selector

    @property
    def prompts_name(self) -> str:
        """A name of the prompts that are compared first; empty without any."""
        digest = sha256(b"".join(each.text for each in self.prompts)).hexdigest()
        return digest[:16] if self.prompts else ""

    @property
    def outlives(self) -> bool:
        """Whether captures or verdicts outlive the process, so that all weights have to be in the model's name."""
        return self.warm is not None or self.verdicts is not None

    def on_texts(self, tokenizer: Any, texts: Sequence[Path]) -> "Passages":
        """Return the settings with prompts about texts, which are compared first. Raises `ConfigError`."""
        from quire_passages.bench.asked_text import TextSizes, text_prompts  # noqa: PLC0415 - of few
        from quire_passages.bench.texts import read_texts  # noqa: PLC0415

        prompts = text_prompts(tokenizer, TextSizes(), texts=read_texts(texts))
        return replace(self, prompts=tuple(islice(prompts, TEXT_PROMPTS)))

    def in_engine(self, forward: Any, bound: Any, guard: Any) -> Any:
        """Return the passages of an engine. Raises `ConfigError` for settings that it cannot keep."""
        from quire_passages.engine import EnginePassages  # noqa: PLC0415 - planning needs no torch

        return EnginePassages(forward, bound, guard, self)

    def in_cache(self, kept: Any, kinds: Any, guard: Any) -> Any:
        """Return the passages of a `PrefixCache`. Raises `ConfigError` for settings that it cannot keep."""
        if self.prompts:
            raise ConfigError(
                f"prompts has {len(self.prompts)} of them, which an engine compares between its steps; a PrefixCache "
                "compares them in cache.passages.judge(prompts)"
            )
        from quire_passages.hf.passages import CachePassages  # noqa: PLC0415

        return CachePassages(kept, kinds, guard, self)


def for_server(capacity: int, rows: str | None, **settings: Any) -> Passages:
    """Return the settings of `quire serve --passages`. Raises `ConfigError`."""
    return Passages(capacity, None if rows is None else named_selector(rows), **settings)
