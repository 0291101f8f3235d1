"""Selectors: which rows of passages are computed again, behind one interface."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from quire.config import nearest
from quire.errors import ConfigError
from quire_passages.company import nearness
from quire_passages.masses import context_impact, overlap
from quire_passages.variants import Variant

Rows = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]


class Moved(msgspec.Struct, frozen=True, eq=False):
    """A passage whose K and V come from a variant that was captured behind another text.

    start   the position of its first token in the prompt
    before  the passages before it, as bytes
    """

    variant: Variant
    start: int
    before: tuple[bytes, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the passage."""
        return self.variant.num_tokens


class Selector(ABC):
    """Chooses rows (positions in the prompt) of moved passages that are computed again.

    name    for tables and reports
    checks  whether all rows start, and a check layer says which of them go on: `kept` is asked then
    asks    whether the question is computed first, and its attention says which rows start: `kept` is asked then
    weighs  whether it goes by attention masses, which are then measured at contextual captures
    """

    name: str
    checks = False
    asks = False
    weighs = False

    @abstractmethod
    def rows(self, moved: Sequence[Moved]) -> Rows:
        """Return the rows to start with, rising."""

    def kept(self, rows: Rows, scores: Scores) -> Rows:
        """Return which of `rows` go on, by how far their KV deviates at the check layer, or by the question's attention."""
        raise NotImplementedError(f"{self.name} has no check layer")

    def preferred(self, variants: Sequence[Variant], before: tuple[bytes, ...]) -> Variant:
        """Return the variant to place behind these passages: of the nearest company, captured among others, the latest."""

        def rank(each: Variant) -> tuple[float, bool, int]:
            return nearness(each.predecessors, before), each.kind == "contextual", each.number

        return max(variants, key=rank)

    def work(self, moved: Sequence[Moved], depth: float) -> float:
        """Return the rows to compute, as whole ones; `depth`: the share of layers before the check layer."""
        return float(self.rows(moved).size)


class _Ranked(Selector):
    """A share of moved rows: those of the largest scores."""

    ratio: float

    def rows(self, moved: Sequence[Moved]) -> Rows:
        return _joined(np.arange(each.num_tokens) + each.start for each in moved)

    def kept(self, rows: Rows, scores: Scores) -> Rows:
        count = math.ceil(self.ratio * rows.size)
        return np.sort(rows[np.argsort(-scores, kind="stable")[:count]])

    def work(self, moved: Sequence[Moved], depth: float) -> float:
        total = sum(each.num_tokens for each in moved)
        return total * (depth + (1 - depth) * self.ratio)


class KVDeviation(_Ranked):
    """The rows whose K and V deviate most from the stored ones at a check layer.

    CacheBlend: Yao et al., EuroSys 2025, https://arxiv.org/abs/2405.16444, section 4, with one layer
    that is checked, and both K and V compared there. All rows are computed up to that layer.

    ratio  the share of moved rows that go on
    check  the check layer; None: the one that the relocation gate has picked for the model
    """

    checks = True

    def __init__(self, ratio: float = 0.15, check: int | None = None) -> None:
        self.ratio = _share("ratio", ratio)
        self.check = check
        if check is not None and check < 1:
            raise ConfigError(f"check={check}; the first layer that can be checked is 1")
        self.name = f"kv-deviation {ratio:g}" + ("" if check is None else f" at layer {check}")


class QuestionRows(_Ranked):
    """The rows that the question attends to most, in the later half of the layers.

    ProphetKV, https://arxiv.org/abs/2602.02579, which sums over all layers. The question is computed over moved passages
    for that, and once more over the rows that were computed again.

    ratio  the share of moved rows
    """

    asks = True

    def __init__(self, ratio: float = 0.15) -> None:
        self.ratio = _share("ratio", ratio)
        self.name = f"question {ratio:g}"


class Epic(Selector):
    """The first `tokens` rows of each passage, which had been the beginning of a text: attention sinks.

    EPIC's LegoLink: Hu et al., ICML 2025, https://arxiv.org/abs/2410.15332.
    """

    def __init__(self, tokens: int = 16) -> None:
        if tokens < 0:
            raise ConfigError(f"tokens={tokens}; the first rows of a passage are 0 or more")
        self.tokens = tokens
        self.name = f"epic {tokens}"

    def rows(self, moved: Sequence[Moved]) -> Rows:
        return _joined(np.arange(min(self.tokens, each.num_tokens)) + each.start for each in moved)

    def work(self, moved: Sequence[Moved], depth: float) -> float:
        return float(sum(min(self.tokens, each.num_tokens) for each in moved))


class EpicShare(Selector):
    """The first rows of each passage, as a share of it: EPIC by a budget."""

    def __init__(self, ratio: float = 0.2) -> None:
        self.ratio = _share("ratio", ratio)
        self.name = f"epic-share {ratio:g}"

    def rows(self, moved: Sequence[Moved]) -> Rows:
        return _joined(
            np.arange(math.ceil(self.ratio * each.num_tokens)) + each.start for each in moved
        )

    def work(self, moved: Sequence[Moved], depth: float) -> float:
        return float(sum(math.ceil(self.ratio * each.num_tokens) for each in moved))


class CacheCraft(Selector):
    """The rows that looked most at other passages, as many as the variant's context has changed.

    See `masses` for the source, and for what is corrected. Of several variants the one with
    the least to compute is placed.
    """

    weighs = True

    def __init__(self, alpha: float = 0.5) -> None:
        if not alpha >= 0:
            raise ConfigError(f"alpha={alpha}; it weighs what is computed again, and is 0 or more")
        self.alpha = alpha
        self.name = f"cache-craft {alpha:g}"

    def rows(self, moved: Sequence[Moved]) -> Rows:
        return _joined(self._of(each) for each in moved)

    def preferred(self, variants: Sequence[Variant], before: tuple[bytes, ...]) -> Variant:
        return min(variants, key=lambda each: (self.share(each, before), -each.number))

    def share(self, variant: Variant, before: tuple[bytes, ...]) -> float:
        """Return CFO, the share of a variant's rows to compute again behind these passages, 0 to 1."""
        masses = variant.masses
        impact = 0.5 if masses is None else context_impact(masses, variant.num_tokens)
        return min(max(self.alpha * impact * (1 - self.kept_context(variant, before)), 0.0), 1.0)

    def kept_context(self, variant: Variant, before: tuple[bytes, ...]) -> float:
        """Return the share of a variant's context that is there again, 0 to 1; without masses, its nearness."""
        if variant.masses is None:
            return nearness(variant.predecessors, before)
        return overlap(variant.predecessors, before, variant.masses.inter)

    def order(self, variant: Variant) -> Rows:
        """Return the tokens of a variant, those first that looked most at the passages before it."""
        if variant.masses is None:
            return np.arange(variant.num_tokens)
        return np.argsort(-variant.masses.tokens, kind="stable")

    def _of(self, moved: Moved) -> Rows:
        count = math.ceil(self.share(moved.variant, moved.before) * moved.num_tokens)
        return np.sort(self.order(moved.variant)[:count]) + moved.start


class RandomRows(Selector):
    """Rows by chance: the control that a selector has to beat at an equal number of rows."""

    def __init__(self, ratio: float, seed: int = 0) -> None:
        self.ratio = _share("ratio", ratio)
        self._seed = seed
        self.name = f"random {ratio:g}"

    def rows(self, moved: Sequence[Moved]) -> Rows:
        every = _joined(np.arange(each.num_tokens) + each.start for each in moved)
        picked = np.random.default_rng(self._seed).permutation(every)
        return np.sort(picked[: math.ceil(self.ratio * every.size)])


class AllRows(Selector):
    """Recomputes every row: the result must equal a plain forward."""

    name = "all"

    def rows(self, moved: Sequence[Moved]) -> Rows:
        return _joined(np.arange(each.num_tokens) + each.start for each in moved)


class NoRows(Selector):
    """Nothing again: re-positioning alone."""

    name = "none"

    def rows(self, moved: Sequence[Moved]) -> Rows:
        return np.empty(0, np.int64)


_NAMED: dict[str, Callable[[float], Selector]] = {
    "kv-deviation": KVDeviation,
    "epic": lambda tokens: Epic(int(tokens)),
    "epic-share": EpicShare,
    "question": QuestionRows,
    "cache-craft": CacheCraft,
    "random": RandomRows,
}
_DEFAULTS = {
    "kv-deviation": 0.15,
    "epic": 16.0,
    "epic-share": 0.2,
    "question": 0.15,
    "cache-craft": 0.5,
    "random": 0.15,
}


def named_selector(line: str) -> Selector:
    """Return the selector that a line names: `kv-deviation:0.15`, `epic:16`, `all`.

    Raises `ConfigError` for a name or a number that cannot be.
    """
    name, _, number = line.partition(":")
    if name in ("all", "none") and not number:
        return AllRows() if name == "all" else NoRows()
    if name not in _NAMED:
        known = {*_NAMED, "all", "none"}
        raise ConfigError(
            f"no selector is named {name!r}; there are {', '.join(sorted(known))}{nearest(name, known)}"
        )
    try:
        value = float(number) if number else _DEFAULTS[name]
    except ValueError:
        raise ConfigError(
            f"selector {line!r}: {number!r} is no number; write {name}:{_DEFAULTS[name]:g}"
        ) from None
    return _NAMED[name](value)


def _share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name}={value}; a share of rows is from 0 to 1")
    return value


def _joined(parts: Iterable[Rows]) -> Rows:
    found = list(parts)
    return np.concatenate(found) if found else np.empty(0, np.int64)
