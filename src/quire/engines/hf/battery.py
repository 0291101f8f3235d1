"""Requests to a tiny twin of a model, with quire and without, before its KV is reused."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import torch
from transformers import GenerationConfig

from quire.engines.hf.models import num_embeddings
from quire.engines.hf.probe import probe_model, relative
from quire.engines.hf.twin import MAX_DISTANCE, distances, shrunk
from quire.errors import QuireError, UnsupportedModel
from quire.tensors.kinds import layer_kinds, model_type

LIMIT = 1e-3
"""Relative L2 distance of logits in float32. Rounding gives up to 2e-5 in twins; a token that is
masked, or counted, wrongly gives 2e-3 and more."""

_PAD = 0
_NUM_NEW = 2
_SHORTEST = 8
_LENGTH = 2 * MAX_DISTANCE + 10
_NUM_BLOCKS = 1200
# A router may choose other experts by rounding: what is refused must be so under both. What holds
# up to a threshold only is looked at more often, for models that choose keys by rounding are not exact.
_SEEDS = (0, 1)
_MORE_SEEDS = (2, 3, 4, 5)
_SPREAD = 0.1
_KERNELS = ("flash", "flex", "/")

Asked = tuple[str, Sequence[torch.Tensor], int]
"""A request: what it checks, its rows without padding, and the padding of the longest."""


def check_kind(model: Any, make_cache: Callable[..., Any], *, needs_twin: bool) -> int | None:
    """Raise `UnsupportedModel` unless a random-weight twin of `model` passes the whole battery.

    Returns the column from which rows behind padding differ from rows alone; None: nowhere. Takes a
    second or less, whatever the model's size, and nothing for a kind asked before. Leaves the model
    and the state of torch's random numbers alone. `make_cache` is `PrefixCache`; `needs_twin`: refuse
    where no twin can be built.
    """
    config = model.config
    values = repr({**config.to_dict(), "attention": _attention(config)})
    kind = cast("Any", type(model))
    verdict = _verdict(_Kind(kind, values, config, make_cache))
    name = f"{model_type(config)} ({kind.__name__})"
    if verdict.refused is not None:
        raise UnsupportedModel(
            f"{name} is not exact with reuse: a tiny twin of its config with random weights failed "
            f"at {verdict.refused}; call model.generate instead"
        )
    if verdict.unchecked is not None and needs_twin:
        raise UnsupportedModel(
            f"{name}: no tiny twin of its config runs, on which windows, padding and batches would "
            f'be checked ({verdict.unchecked}). PrefixCache(..., verify="first") compares on the '
            "model itself instead, call by call"
        )
    return verdict.padded_below


def ask(make_cache: Callable[..., Any], model: Any, requests: Iterable[Asked]) -> str | None:
    """Make requests to `model` through quire; return the first that differs from its rows alone.

    With the distance of the logits and the limit, or the error that was raised. None: all are right.
    """
    try:
        names = [group.name for group in probe_model(model, 1)[1].groups]
    except QuireError as error:
        return f"a short check: {error}"
    # Fresh memory is not a number, so that whatever looks at it shows.
    cache = make_cache(model, dict.fromkeys(names, _NUM_BLOCKS), 1, verify=None, debug=True)
    for check, rows, padding in requests:
        alone = [_generate(model, *_padded([row], 0)) for row in rows]
        try:
            batch = _generate(cache, *_padded(rows, padding))
        except Exception as error:  # noqa: BLE001 - a model may raise anything, with quire and not without
            return f"{check}: {type(error).__name__}: {error}"
        for row, one in enumerate(alone):
            far = distance([step[0] for step in one.logits], [step[row] for step in batch.logits])
            if not far <= LIMIT:
                return (
                    f"{check}: its logits are {far:.2g} from those without quire (limit {LIMIT:g})"
                )
    return None


def distance(one: Sequence[torch.Tensor], two: Sequence[torch.Tensor]) -> float:
    """Return the largest relative distance of logits `[vocab]` of the same steps.

    Steps behind the first at which other tokens would be chosen are left out: their texts differ.
    """
    largest = 0.0
    for a, b in zip(one, two, strict=True):
        kept = (a.abs() < 1e4) | (b.abs() < 1e4)  # what a model forbids is a very low number
        largest = max(largest, relative((a.double() - b.double())[kept], a[kept]))
        if a.argmax() != b.argmax():
            break
    return largest


def twin_of(model_class: Any, config: Any, seed: int) -> Any:
    """Build a model of a shrunk config whose random weights are large enough for errors to show."""
    small = shrunk(config)
    small._attn_implementation = _attention(config)  # noqa: SLF001 - its public name
    with _random(seed), torch.device("cpu"), torch.no_grad():
        twin = model_class._from_config(small, dtype=torch.float32).eval()  # noqa: SLF001 - as from_config calls it
        for weight in twin.parameters():
            _stir(weight)
    twin.generation_config = GenerationConfig(pad_token_id=_PAD, max_new_tokens=_NUM_NEW)
    return twin


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What became of a twin.

    refused       why its kind is
    unchecked     why there was none
    padded_below  the column from which rows behind padding are not exact; None: they all are
    """

    refused: str | None = None
    unchecked: str | None = None
    padded_below: int | None = None


@dataclass(frozen=True, slots=True)
class _Kind:
    """What two models that compute in the same way have in common: a class, and a config by its values."""

    model_class: Any
    values: str
    config: Any = field(compare=False, repr=False)
    make_cache: Callable[..., Any] = field(compare=False, repr=False)


@lru_cache(maxsize=128)
def _verdict(kind: _Kind) -> _Verdict:
    # A function of its argument alone: what is remembered is what would be found again.
    verdict = _Verdict()
    for seed in _SEEDS:
        try:
            twin = twin_of(kind.model_class, kind.config, seed)
            _generate(twin, *_padded([_Texts(twin)(1, _LENGTH)], 0))
        except Exception as error:  # noqa: BLE001 - a config may be anything
            return _Verdict(unchecked=f"{type(error).__name__}: {error}")
        verdict = _asked(twin, kind)
        if verdict.refused is None:
            break
    for seed in _MORE_SEEDS if verdict.padded_below else ():
        twin = twin_of(kind.model_class, kind.config, seed)
        if (refused := ask(kind.make_cache, twin, _rows_alone(twin))) is not None:
            return _Verdict(refused=refused)
    return verdict


def _asked(twin: Any, kind: _Kind) -> _Verdict:
    refused = ask(kind.make_cache, twin, _rows_alone(twin))
    if refused is not None:
        return _Verdict(refused=refused)
    refused = ask(kind.make_cache, twin, _batches(_Texts(twin), _LENGTH))
    if refused is None:
        return _Verdict()
    # A threshold that counts padding does nothing to texts that are shorter than it.
    below = [
        length
        for length, near in distances(kind.config).items()
        if near >= _SHORTEST
        and ask(kind.make_cache, twin, _batches(_Texts(twin), near - _NUM_NEW)) is None
    ]
    return _Verdict(padded_below=max(below)) if below else _Verdict(refused=refused)


def _rows_alone(model: Any) -> Iterator[Asked]:
    """Yield a prompt that grows over every window and threshold, and one that leaves it."""
    windows = {kind.window for kind in layer_kinds(model.config) if kind.window}
    borders = {near for window in windows for near in (window - 1, window, window + 1)}
    lengths = sorted({3, 11, 30, 33, 50, _LENGTH} | {x for x in borders if 3 < x < _LENGTH})
    texts = _Texts(model)
    text = texts(1, _LENGTH)
    yield f"{lengths[0]} tokens", [text[: lengths[0]]], 0
    for start, stop in pairwise(lengths):
        yield f"{stop} tokens, of which {start} were computed before", [text[:stop]], 0
    yield "a prompt that leaves one before its end", [torch.cat([text[:40], texts(2, 12)])], 0


def _batches(texts: "_Texts", num_columns: int) -> Iterator[Asked]:
    """Yield rows behind padding, of so many columns at most, and what is left of them alone."""
    n = num_columns
    one, two, three = texts(3, n), texts(4, n), texts(5, n)
    yield "a row behind padding", [one[: n // 2]], n // 6 + 1
    yield "a row that goes on behind other padding", [one[: n // 2 + n // 6]], n // 8 + 1
    rows = [two[: n // 4 + 1], one[: n - 1]]
    yield "a batch of a new row and a longer one that goes on", rows, 0
    rows = [one, three[: n // 3], two[: n // 2]]
    yield "a batch of a new row between two that go on", rows, 0
    for row in (two[: n // 2 + 2], three[: n // 3 + 2]):
        yield "a row of a batch that goes on alone", [row], 0


class _Texts:
    """Texts `[tokens]` of a model's ordinary tokens, by seed."""

    def __init__(self, model: Any) -> None:
        special = set(_special_ids(model.config.to_dict())) | {_PAD}
        vocab = num_embeddings(model)
        self._ids = torch.tensor([n for n in range(vocab) if n not in special])

    def __call__(self, seed: int, num_tokens: int) -> torch.Tensor:
        numbers = torch.Generator().manual_seed(seed)
        return self._ids[torch.randint(len(self._ids), (num_tokens,), generator=numbers)]


def _special_ids(values: dict[Any, Any]) -> Iterator[int]:
    """Yield the ids that a config, and those in it, give a meaning: ends, padding, places of media."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _special_ids(cast("dict[Any, Any]", value))
        elif "token" in str(name):
            for each in cast("list[Any]", value) if isinstance(value, list) else [value]:
                if isinstance(each, int):
                    yield each


def _padded(rows: Sequence[torch.Tensor], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask `[rows, columns]`, left-padded to the longest row and `padding` more."""
    columns = max(len(row) for row in rows) + padding
    ids = torch.full((len(rows), columns), _PAD)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, columns - len(row) :] = row
        mask[index, columns - len(row) :] = 1
    return ids, mask


def _generate(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=_NUM_NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )


def _stir(weight: torch.Tensor) -> None:
    """Make a parameter random enough that nothing behind it is hidden: zeros, ones, small numbers."""
    if weight.is_floating_point():
        spread = float(weight.std()) if weight.ndim > 1 else 0.0
        if weight.ndim > 1 and 0 < spread < _SPREAD:
            weight.mul_(_SPREAD / spread)
        elif spread == 0:
            weight.add_(_SPREAD * torch.randn_like(weight))


@contextmanager
def _random(seed: int) -> Generator[None, None, None]:
    """Seed torch's random numbers on the CPU, and put them back at the end of the block."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _attention(config: Any) -> str | None:
    """Return the attention function of a twin: those for accelerators give way to torch's."""
    name = getattr(config, "_attn_implementation", None)
    return "sdpa" if name is not None and any(word in name for word in _KERNELS) else name
