"""Settings of the reuse of passages."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from quire.config import parse_bytes
from quire.errors import ConfigError
from quire_passages.selectors import KVDeviation, Selector, named_selector

Capture = Literal["isolated", "contextual", "none"]


@dataclass(frozen=True, slots=True)
class Passages:
    """Settings of passages, for `PrefixCache(passages=...)`.

    capacity        bytes for K and V of passages: "1GiB", or an integer
    selector        chooses the rows to compute again; None: the cheapest that the verdict finds good enough
    target          least agreement with the full forward: passages are reused once it was measured on texts of
                    their tenant, at most 0.01 below with 95 % confidence. None: reused unmeasured
    audit           one of so many prompts is compared with the full forward once the verdict is decided
    capture         how passages are kept that a call does not find. "isolated": each is computed behind
                    the head alone, at the end of the call; "contextual": K and V are copied from the
                    call where they are exact; "none": only by calls of `capture`
    share_isolated  whether isolated captures serve all scopes; contextual ones never do
    min_tokens      shorter passages are computed
    worth           passages are reused where that takes at most this share of the time of a plain prefill
    share           rows of captures and comparisons, by those of requests: in an engine while requests wait, in a
                    `PrefixCache` comparisons alone
    warm            a tier for isolated captures in eight bits, which outlives the store and may outlive the
                    process: "host:4GiB", "disk:/var/passages?capacity=50GiB"; None: none
    warm_key        the path of a file of tier keys that sign records of `warm`; nothing else is accepted from it
    gates           a directory in which results of the relocation gate are kept for the next process; None:
                    the gate runs once in each

    Raises `ConfigError` for a setting that cannot work.
    """

    capacity: str | int = "1GiB"
    selector: Selector | None = None
    target: float | None = 0.98
    audit: int = 50
    capture: Capture = "isolated"
    share_isolated: bool = False
    min_tokens: int = 16
    worth: float = 0.9
    share: float = 0.1
    warm: str | None = None
    warm_key: str | Path | None = None
    gates: str | Path | None = None

    def __post_init__(self) -> None:
        parse_bytes(self.capacity)
        if self.capture not in get_args(Capture):
            raise ConfigError(
                f"capture={self.capture!r}; it is one of {', '.join(map(repr, get_args(Capture)))}"
            )
        if not isinstance(cast("object", self.selector), Selector | None):
            raise ConfigError(
                f"selector={self.selector!r}; give a selector such as KVDeviation(0.15), or named_selector"
                "('kv-deviation:0.15')"
            )
        if not self.worth > 0:
            raise ConfigError(f"worth={self.worth}; it is a share of a plain prefill, above 0")
        if self.target is not None and not 0.5 <= self.target < 1:
            raise ConfigError(
                f"target={self.target}; it is the share of next tokens as in the full forward, from 0.5 to below 1, or "
                "None to reuse passages unmeasured"
            )
        if self.audit < 1:
            raise ConfigError(f"audit={self.audit}; one of so many prompts is compared, 1 or more")
        if not 0 <= self.share <= 1:
            raise ConfigError(f"share={self.share}; it is a share of the rows of requests, 0 to 1")
        if self.min_tokens < 1:
            raise ConfigError(f"min_tokens={self.min_tokens}; a passage has at least 1 token")

    @property
    def chosen(self) -> Selector:
        """The selector, where no verdict chooses another."""
        return KVDeviation() if self.selector is None else self.selector

    @property
    def outlives(self) -> bool:
        """Whether captures outlive the process."""
        return self.warm is not None

    def in_engine(self, forward: Any, bound: Any, guard: Any) -> Any:
        """Return the passages of an engine. Raises `ConfigError` for settings that it cannot keep."""
        from quire_passages.engine import EnginePassages  # noqa: PLC0415 - planning needs no torch

        return EnginePassages(forward, bound, guard, self)

    def in_cache(self, kept: Any, kinds: Any, guard: Any) -> Any:
        """Return the passages of a `PrefixCache`."""
        from quire_passages.hf.passages import CachePassages  # noqa: PLC0415

        return CachePassages(kept, kinds, guard, self)


def for_server(capacity: int, rows: str | None, **settings: Any) -> Passages:
    """Return the settings of `quire serve --passages`. Raises `ConfigError`."""
    return Passages(capacity, None if rows is None else named_selector(rows), **settings)
