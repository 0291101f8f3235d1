"""Requests to a tiny twin of a model, with quire and without, before its KV is reused."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from quire.engines.models.distance import of_logits
from quire.engines.models.probe import probe_model
from quire.engines.models.supported import num_embeddings
from quire.engines.models.twin import MAX_DISTANCE, distances, numbers_in, shrunk
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
        alone = [_generate(model, [row]) for row in rows]
        try:
            batch = _generate(cache, rows, padding)
        except Exception as error:  # noqa: BLE001 - a model may raise anything, with quire and not without
            return f"{check}: {type(error).__name__}: {error}"
        for row, one in enumerate(alone):
            far = of_logits([step[0] for step in one.logits], [step[row] for step in batch.logits])
            if not far <= LIMIT:
                return (
                    f"{check}: its logits are {far:.2g} from those without quire (limit {LIMIT:g})"
                )
    return None


def twin_of(model_class: Any, config: Any, seed: int) -> Any:
    """Build a model of a shrunk config whose random weights are large enough for errors to show."""
    small = shrunk(config)
    small._attn_implementation = _attention(config)  # noqa: SLF001 - its public name
    forked = cast("Any", torch.random).fork_rng(devices=[])
    with forked, torch.device("cpu"), torch.no_grad():
        torch.default_generator.manual_seed(seed)  # that of the CPU alone
        twin = model_class._from_config(small, dtype=torch.float32).eval()  # noqa: SLF001 - as from_config calls it
        for weight in twin.parameters():
            _stir(weight)
    twin.generation_config = GenerationConfig(pad_token_id=_PAD, max_new_tokens=_NUM_NEW)
    return twin


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The result of checking a model's tiny twin.

    refused       why models of its kind are refused; None: they are not
    unchecked     why no twin could be run; None: one was
    padded_below  the column from which rows behind padding are not exact; None: they all are
    """

    refused: str | None = None
    unchecked: str | None = None
    padded_below: int | None = None


@dataclass(frozen=True, slots=True)
class _Kind:
    """The identity of models that compute in the same way: a class, and a config by its values."""

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
            _generate(twin, [_texts(twin)(1, _LENGTH)])
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
    refused = ask(kind.make_cache, twin, _batches(twin, _LENGTH))
    if refused is None:
        return _Verdict()
    # A threshold that counts padding does nothing to texts that are shorter than it.
    below = [
        length
        for length, near in distances(kind.config).items()
        if near >= _SHORTEST and ask(kind.make_cache, twin, _batches(twin, near - _NUM_NEW)) is None
    ]
    return _Verdict(padded_below=max(below)) if below else _Verdict(refused=refused)


def _rows_alone(model: Any) -> Iterator[Asked]:
    """Yield a prompt that grows over every window and threshold, and one that leaves it."""
    windows = {kind.window for kind in layer_kinds(model.config) if kind.window}
    borders = {near for window in windows for near in (window - 1, window, window + 1)}
    lengths = sorted({3, 11, 30, 33, 50, _LENGTH} | {x for x in borders if 3 < x < _LENGTH})
    texts = _texts(model)
    text = texts(1, _LENGTH)
    yield f"{lengths[0]} tokens", [text[: lengths[0]]], 0
    for start, stop in pairwise(lengths):
        yield f"{stop} tokens, of which {start} were computed before", [text[:stop]], 0
    yield "a prompt that leaves one before its end", [torch.cat([text[:40], texts(2, 12)])], 0


def _batches(model: Any, num_columns: int) -> Iterator[Asked]:
    """Yield rows behind padding, of so many columns at most, and what is left of them alone."""
    texts, n = _texts(model), num_columns
    one, two, three = texts(3, n), texts(4, n), texts(5, n)
    yield "a row behind padding", [one[: n // 2]], n // 6 + 1
    yield "a row that goes on behind other padding", [one[: n // 2 + n // 6]], n // 8 + 1
    rows = [two[: n // 4 + 1], one[: n - 1]]
    yield "a batch of a new row and a longer one that goes on", rows, 0
    rows = [one, three[: n // 3], two[: n // 2]]
    yield "a batch of a new row between two that go on", rows, 0
    for row in (two[: n // 2 + 2], three[: n // 3 + 2]):
        yield "a row of a batch that goes on alone", [row], 0


def _texts(model: Any) -> Callable[[int, int], torch.Tensor]:
    """Return what makes texts `[tokens]` of a model's ordinary tokens, by seed and length."""
    # What a config gives a meaning to: ends, padding, places of media.
    special = {number for name, number in numbers_in(model.config.to_dict()) if "token" in name}
    ordinary = set(range(num_embeddings(model))) - special - {_PAD}
    ids = torch.tensor(sorted(ordinary))

    def text(seed: int, num_tokens: int) -> torch.Tensor:
        numbers = torch.Generator().manual_seed(seed)
        return ids[torch.randint(len(ids), (num_tokens,), generator=numbers)]

    return text


def _generate(model: Any, rows: Sequence[torch.Tensor], padding: int = 0) -> Any:
    """Generate from rows, left-padded to the longest one and `padding` more."""
    ids = pad_sequence(list(rows), batch_first=True, padding_value=_PAD, padding_side="left")
    ids = torch.nn.functional.pad(ids, (padding, 0), value=_PAD)
    return model.generate(
        ids,
        attention_mask=(ids != _PAD).long(),
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


def _attention(config: Any) -> str | None:
    """Return the attention function of a twin: those for accelerators give way to torch's."""
    name = getattr(config, "_attn_implementation", None)
    return "sdpa" if name is not None and any(word in name for word in _KERNELS) else name
