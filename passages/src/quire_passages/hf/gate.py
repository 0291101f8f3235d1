"""The relocation gate: whether a model's keys, computed at one position, can be rotated to another.

The model itself is asked. The same tokens are computed at a position p and at p + d; then K of every
layer must be the rotated K, and V equal, or, for MLA, which lays its rotary key beside the latent, the
other way round. Frequencies are the model's own buffers. Which of them a layer uses, which numbers
are turned and how they are paired, is found by trying; a layer whose K is equal uses none (NoPE).

What depends on the length of a text is met by trying far positions as well: dynamic NTK and longrope
change their frequencies behind a threshold. The gate vouches for positions below that.

Then rows are chosen in a forward of the model over exact K and V: logits must be those of a plain one.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from quire.engines.models.distance import limit_for, relative
from quire.engines.models.supported import num_embeddings
from quire.errors import NotRelocatable, UnsupportedModel
from quire.tensors.kinds import LayerKind, decoder_config, model_type
from quire.tensors.rotary import Pairs, Rotation, rotate_into
from quire_passages.hf.capture import PassageKV
from quire_passages.hf.relocation import Relocation
from quire_passages.hf.rows import RowForward
from quire_passages.hf.runs import Runs

Ids = npt.NDArray[np.int64]
Frequencies = npt.NDArray[np.float64]

_NUM_TOKENS = 24
_FIRST = 3
_NEAR = 37
# Relative L2 distance of K and V, and of logits, that are equal but for rounding.
_LIMITS = (1e-4, 0.03)
_ROUNDED_ANGLES = 2.0**-24
"""A model turns by angles in float32: at position p they are off by p times this."""

_FAILURES = (UnsupportedModel, RuntimeError, TypeError, ValueError, AttributeError, KeyError)
"""What a model raises that cannot be computed by rows, or layer by layer."""


def relocation_of(
    model: Any,
    kinds: Sequence[LayerKind],
    positions: int | None = None,
) -> Relocation:
    """Try a model, in a few short forwards.

    positions  positions to vouch for; None: those of the model's config

    Raises `NotRelocatable`, with the layer and the distance.
    """
    name = model_type(model.config)
    for index, kind in enumerate(kinds):
        if kind.states:
            raise NotRelocatable(
                f"{name}: layer {index} is recurrent ({kind.word}); its state is that of a whole text, and no "
                "passage of it can be moved"
            )
        if kind.tokens is None:
            raise NotRelocatable(f"{name}: layer {index} keeps no K and V of its own ({kind.word})")
    runs = Runs(model, kinds)
    return _tried(runs, name, positions)


@contextmanager
def buffers_kept(model: Any) -> Generator[None, None, None]:
    """Put the buffers of a model back: a forward at far positions may change its frequencies."""
    kept = [(each, each.clone()) for each in model.buffers()]
    names = [
        (module, name, module._buffers[name])  # noqa: SLF001 - which tensor it is counts too
        for module in model.modules()
        for name in module._buffers  # noqa: SLF001 - torch has no other list of a module's own
    ]
    try:
        yield
    finally:
        for module, name, buffer in names:
            module._buffers[name] = buffer  # noqa: SLF001 - as it was read
        for buffer, values in kept:
            if not torch.equal(buffer, values):
                buffer.copy_(values)


def _tried(runs: Runs, name: str, positions: int | None) -> Relocation:
    ids = np.random.default_rng(0).integers(1, num_embeddings(runs.model), _NUM_TOKENS)
    near = runs.kv(ids, _FIRST)
    limits = _thresholds(runs.model.config, positions)
    beyond: NotRelocatable | None = None
    rotations: tuple[Rotation | None, ...] | None = None
    for limit in limits:
        try:
            with buffers_kept(runs.model):
                rotations, error = _compared(runs, name, ids, near, limit)
            break
        except NotRelocatable as failed:
            beyond = failed
    else:
        assert beyond is not None
        raise beyond
    if positions is not None and limit < positions:
        assert beyond is not None
        raise NotRelocatable(f"{beyond}; below position {limit} it can be moved") from beyond
    rows = RowForward(runs.model, runs.kinds)
    _check_rows(runs, rows, name, ids)
    return Relocation(
        rotations=rotations,
        positions=limit,
        error=error,
        beyond=None if beyond is None else str(beyond),
        drops_rows=_dropping(runs, rows, name, ids),
        shows=_showing(runs, rows, name, ids),
    )


def _compared(
    runs: Runs, name: str, ids: Ids, near: PassageKV, limit: int
) -> tuple[tuple[Rotation | None, ...], float]:
    """Return how each layer is turned, by a short move; and the largest distance, by that and a far one."""
    last = limit - len(ids) - _FIRST
    if last < 1:
        raise NotRelocatable(
            f"{name} has {limit} positions; the gate needs {len(ids) + _FIRST + 1} to move {len(ids)} tokens"
        )
    shifts = sorted({min(_NEAR, last), last})
    frequencies = list(_frequencies(runs.model))
    moved = [runs.kv(ids, _FIRST + shift) for shift in shifts]
    rotations: list[Rotation | None] = []
    error = 0.0
    for index, layer in enumerate(near.layers):
        tries = [
            (_distance(layer, moved[0].layers[index], each, shifts[0]), each)
            for each in _hypotheses(layer, frequencies)
        ]
        far, rotation = min(tries, key=lambda each: each[0])
        worst, at = far, shifts[0]
        for shift, there in zip(shifts[1:], moved[1:], strict=True):
            distance = _distance(layer, there.layers[index], rotation, shift)
            if not distance <= worst:
                worst, at = distance, shift
        allowed = max(
            limit_for(layer[0].dtype, _LIMITS), (limit if at == last else 0) * _ROUNDED_ANGLES
        )
        if not worst <= allowed:
            raise NotRelocatable(
                f"{name}: K or V of layer {index}, computed at positions from {_FIRST + at} on, are {worst:.2g} "
                f"from those of positions from {_FIRST} on, rotated (limit {allowed:.2g}); "
                f"{_why(frequencies)}, so that no passage of it can be moved"
            )
        rotations.append(rotation)
        error = max(error, worst)
    return tuple(rotations), error


def _why(frequencies: Sequence[Frequencies]) -> str:
    if not frequencies:
        return "it has no rotary frequencies, and its K depend on positions in another way (learned ones, say)"
    return "its frequencies depend on the length of the text, or its rotation is of no kind that quire knows"


def _distance(
    here: tuple[torch.Tensor, torch.Tensor],
    there: tuple[torch.Tensor, torch.Tensor],
    rotation: Rotation | None,
    shift: int,
) -> float:
    """Return the larger relative distance of K and of V from those of another position."""
    worst = 0.0
    for index, (each, wanted) in enumerate(zip(here, there, strict=True)):
        got = each
        if rotation is not None and rotation.in_values is bool(index):
            got = torch.empty_like(each)
            rotate_into(got, each, rotation, shift)
        worst = max(worst, relative(got.double() - wanted.double(), wanted))
    return worst


def _hypotheses(
    layer: tuple[torch.Tensor, torch.Tensor], frequencies: Sequence[Frequencies]
) -> Iterator[Rotation | None]:
    """Yield the ways in which a layer's keys may be turned."""
    yield None
    for each in frequencies:
        for in_values, held in enumerate(layer):
            width = held.shape[-1]
            if 2 * each.size > width:
                continue
            for offset in dict.fromkeys((0, width - 2 * each.size)):
                for pairs in Pairs:
                    yield Rotation(bool(in_values), offset, pairs, each)


def _frequencies(model: Any) -> Iterator[Frequencies]:
    """Yield the rotary frequencies that a model has, each once."""
    seen: set[bytes] = set()
    for name, buffer in model.named_buffers():
        last = name.rsplit(".", 1)[-1]
        if not last.endswith("inv_freq") or buffer.ndim != 1:
            continue
        values = buffer.detach().double().cpu().numpy().copy()
        if values.size and values.tobytes() not in seen:
            seen.add(values.tobytes())
            yield values


def _thresholds(config: Any, positions: int | None) -> list[int]:
    """Return the numbers of positions to try, the largest first: the model's, and those of its scaling."""
    text = decoder_config(config)
    whole = positions or int(getattr(text, "max_position_embeddings", 0) or 2048)
    found = {whole}

    def look(value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in cast("dict[str, Any]", value).items():
                if name == "original_max_position_embeddings" and inner:
                    found.add(int(inner))
                look(inner)

    for name in ("rope_parameters", "rope_scaling"):
        look(getattr(text, name, None))
    found.add(int(getattr(text, "original_max_position_embeddings", 0) or whole))
    found.add(int(getattr(text, "max_position_embeddings", 0) or whole))
    return sorted((each for each in found if each <= whole), reverse=True)


def _check_rows(runs: Runs, rows: RowForward, name: str, ids: Ids) -> None:
    """Raise `NotRelocatable` unless chosen rows over exact K and V give the logits of a plain forward."""
    past = runs.past(len(ids))
    expected = runs.feed(past, ids)
    some = np.array([*range(1, len(ids) - 1, 3), len(ids) - 1])
    try:
        got = rows(past, ids.astype(np.int32), some)
    except _FAILURES as error:
        raise NotRelocatable(f"{name} cannot compute rows of its own choice: {error}") from error
    far = relative(got.double() - expected.double(), expected)
    if not far <= (limit := limit_for(expected.dtype, _LIMITS)):
        raise NotRelocatable(
            f"{name}: the logits of some rows over K and V that are there are {far:.2g} from those of a whole "
            f"forward (limit {limit:g}); its attention is not told by positions and a mask"
        )


def _dropping(runs: Runs, rows: RowForward, name: str, ids: Ids) -> str | None:
    """Return why rows cannot be left out behind a layer; None: they can."""
    if len(runs.kinds) < 2:
        return f"{name} has one layer, and nothing is left behind it"
    past = runs.past(len(ids))
    expected = runs.feed(past, ids)
    every = np.arange(1, len(ids))

    def some(rows: Ids, _: npt.NDArray[np.float32]) -> Ids:
        return rows[[*range(0, rows.size - 1, 3), rows.size - 1]]

    try:
        got = rows(past, ids.astype(np.int32), every, (1, some), ends=True)
    except _FAILURES as error:
        return f"{name} cannot leave rows out behind a layer: {error}"
    far = relative(got.double() - expected.double(), expected)
    if far <= (limit := limit_for(expected.dtype, _LIMITS)):
        return None
    return f"{name}: with rows left out behind layer 1, logits are {far:.2g} off (limit {limit:g})"


def _showing(runs: Runs, rows: RowForward, name: str, ids: Ids) -> str | None:
    """Return why the attention of layers cannot be seen; None: it can."""
    past = runs.past(len(ids))
    runs.feed(past, ids)
    seen: set[int] = set()

    def look(index: int, given: torch.Tensor) -> None:
        columns = len(ids) - past.kv_layers[index].first
        if given.ndim == 4 and given.shape[2:] == (1, columns):
            seen.add(index)

    try:
        rows(past, ids.astype(np.int32), np.array([len(ids) - 1]), look=look)
    except _FAILURES as error:
        return f"{name} cannot compute attention the eager way: {error}"
    if len(seen) == len(runs.kinds):
        return None
    return f"{name} returns attention probabilities of {len(seen)} of {len(runs.kinds)} layers"
