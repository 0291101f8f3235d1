"""Settings of the reuse of passages."""

from dataclasses import dataclass, field
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
    selector        chooses the rows to compute again, unless a call says otherwise
    capture         how passages are kept that a call does not find. "isolated": each is computed behind
                    the head alone, at the end of the call; "contextual": K and V are copied from the
                    call where they are exact; "none": only by calls of `capture`
    share_isolated  whether isolated captures serve all scopes; contextual ones never do
    min_tokens      shorter passages are computed
    worth           passages are reused where that takes at most this share of the time of a plain prefill
    share           rows that an engine computes for captures while requests wait, by those of requests
    warm            a tier for isolated captures in eight bits, which outlives the store and may outlive the
                    process: "host:4GiB", "disk:/var/passages?capacity=50GiB"; None: none
    warm_key        the path of a file of tier keys that sign records of `warm`; nothing else is accepted from it
    gates           a directory in which results of the relocation gate are kept for the next process; None:
                    the gate runs once in each

    Raises `ConfigError` for a setting that cannot work.
    """

    capacity: str | int = "1GiB"
    selector: Selector = field(default_factory=KVDeviation)
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
        if not isinstance(cast("object", self.selector), Selector):
            raise ConfigError(
                f"selector={self.selector!r}; give a selector such as KVDeviation(0.15), or named_selector"
                "('kv-deviation:0.15')"
            )
        if not self.worth > 0:
            raise ConfigError(f"worth={self.worth}; it is a share of a plain prefill, above 0")
        if not 0 <= self.share <= 1:
            raise ConfigError(f"share={self.share}; it is a share of the rows of requests, 0 to 1")
        if self.min_tokens < 1:
            raise ConfigError(f"min_tokens={self.min_tokens}; a passage has at least 1 token")

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


def for_server(
    capacity: int, rows: str, warm: str | None, warm_key: Path | None, gates: Path
) -> Passages:
    """Return the settings of `quire serve --passages`. Raises `ConfigError`."""
    return Passages(capacity, named_selector(rows), warm=warm, warm_key=warm_key, gates=gates)
