"""Images, video and audio of a prompt: where they stand, what names them, what is left to feed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from quire.core import MediaItem
from quire.engines.hf.inputs import Prompts
from quire.engines.hf.modalities import MODALITIES, Item, placeholder_id, read_items
from quire.errors import MediaError
from quire.tensors.kinds import model_type

Spans = list[tuple[MediaItem, ...]]
Named = Sequence[MediaItem] | Sequence[Sequence[MediaItem]]

TYPE_IDS = "mm_token_type_ids"
"""The argument that tells a model the modality of each token, for its positions."""

ENCODED = "mm_encoder_outputs"
"""The argument in which generate passes content on that it has had encoded."""


@dataclass(frozen=True, slots=True)
class Media:
    """The media of a request.

    spans         per row          items as a manager takes them, in order
    pads          [rows]           leading columns of a row that are padding
    declared      [rows, columns]  whether a column holds a placeholder of an item
    placeholders                   token ids that stand for media
    positions     [.., columns]    position ids of the whole prompt, None where columns tell them
    type_ids      [rows, columns]  the modality of each token, where the model takes it
    names                          arguments of a forward that carry media
    """

    spans: Spans
    pads: npt.NDArray[np.int64]
    declared: npt.NDArray[np.bool_]
    placeholders: tuple[int, ...] = ()
    positions: torch.Tensor | None = None
    type_ids: torch.Tensor | None = None
    items: Sequence[Item] = field(default_factory=list[Item])
    names: frozenset[str] = frozenset()

    def cut(self, num_columns: int) -> int:
        """Return the most columns up to `num_columns` that end inside no item of any row.

        A model is fed whole items only.
        """
        ends_inside = [
            int(pad) + item.start
            for pad, row in zip(self.pads, self.spans, strict=True)
            for item in row
            if item.start < num_columns - pad < item.start + item.length
        ]
        return self.cut(min(ends_inside)) if ends_inside else num_columns

    def content(self, num_columns: int) -> dict[str, Any]:
        """Return the content arguments of the items behind the first `num_columns` columns."""
        parts: dict[str, list[Any]] = {}
        for item in self.items:
            if self.pads[item.row] + item.start >= num_columns:
                for name, part in item.parts.items():
                    parts.setdefault(name, []).append(part)
        return {name: _joined(pieces) for name, pieces in parts.items()}

    def arguments(self, num_columns: int) -> dict[str, Any]:
        """Return generate's arguments for media when `num_columns` columns are computed already."""
        beside = {"position_ids": self.positions, TYPE_IDS: self.type_ids}
        given = {name: value for name, value in beside.items() if value is not None}
        return self.content(num_columns) | given

    def positions_of(self, origins: npt.NDArray[np.int64], start: int, stop: int) -> torch.Tensor:
        """Return the position ids of columns of rows that descend from `origins`.

        Behind the prompt they go on by one, as generate has them.
        """
        assert self.positions is not None
        whole = self.positions[..., origins, :]
        end = whole.shape[-1]
        new = torch.arange(1, max(stop - end, 0) + 1, device=whole.device)
        return torch.cat([whole, whole[..., -1:] + new], dim=-1)[..., start:stop]

    def num_known(self, fed: torch.Tensor, start: int, origins: npt.NDArray[np.int64]) -> int:
        """Return the number of leading columns of `fed`, fed at column `start`, that a key can name.

        A placeholder where the prompt has no item may stand for content that has no digest.
        """
        if not self.placeholders:
            return fed.shape[1]
        unnamed = np.isin(fed.cpu().numpy(), self.placeholders)
        declared = self.declared[origins, start : start + fed.shape[1]]
        unnamed[:, : declared.shape[1]] &= ~declared
        columns = np.flatnonzero(unnamed.any(axis=0))
        return int(columns[0]) if columns.size else fed.shape[1]


class MediaReader:
    """Finds the media of requests to one model."""

    def __init__(self, model: Any) -> None:
        self.positions_depend = hasattr(model.base_model, "rope_deltas")
        """Whether positions depend on media (M-RoPE); the model then keeps an offset of its own."""
        self._model = model
        self._modalities = MODALITIES.get(model_type(model.config), ())
        self._placeholders = tuple(placeholder_id(model.config, m) for m in self._modalities)
        names = (name for modality in self._modalities for name in modality.arguments)
        self._names = frozenset([*names, TYPE_IDS, ENCODED] if self._modalities else [])

    def read(self, prompts: Prompts, arguments: dict[str, Any], named: object = None) -> Media:
        """Find the items of the prompts, and take their arguments out of `arguments`.

        `named` are items of the caller's, whose digests are used instead of hashes of the
        content. Raises `MediaError` unless content and placeholders match one to one.
        """
        given = self._take(arguments)
        items: list[Item] = []
        for modality in self._modalities:
            items += read_items(modality, self._model.config, prompts.tokens, given)
        items.sort(key=lambda item: (item.row, item.start))
        self._check_type_ids(prompts, items, given.get(TYPE_IDS))
        if named is None:
            spans: Spans = [() for _ in prompts.tokens]
            for item in items:
                spans[item.row] += (MediaItem(item.digest(), item.start, item.length),)
        else:
            spans = _rows_of(named, len(prompts.tokens))
            _check_same(spans, items)
        return replace(
            self._media(prompts, spans),
            positions=self._positions(prompts, given),
            type_ids=given.get(TYPE_IDS),
            items=items,
        )

    def declared(self, prompts: Prompts, named: object) -> Media:
        """Take the caller's word for the media of a prompt that the caller feeds.

        Raises `MediaError` if a placeholder belongs to no item of `named`.
        """
        media = self._media(prompts, _rows_of(named, len(prompts.tokens)))
        for row, tokens in enumerate(prompts.tokens):
            held = np.isin(tokens, media.placeholders)
            open_ = np.flatnonzero(held & ~media.declared[row, int(prompts.pads[row]) :])
            if open_.size:
                raise MediaError(
                    f"token {open_[0]} of row {row} is a placeholder (id {tokens[open_[0]]}) of no "
                    "media item; pass media=[quire.MediaItem(digest, start, length), ...] for all"
                )
        return media

    def _media(self, prompts: Prompts, spans: Spans) -> Media:
        declared = np.zeros(tuple(prompts.ids.shape), dtype=np.bool_)
        for row, (pad, items) in enumerate(zip(prompts.pads, spans, strict=True)):
            for item in items:
                declared[row, pad + item.start : pad + item.start + item.length] = True
        return Media(spans, prompts.pads, declared, self._placeholders, names=self._names)

    def _take(self, arguments: dict[str, Any]) -> dict[str, Any]:
        taken = {name: arguments.pop(name, None) for name in self._names - {ENCODED}}
        return {name: value for name, value in taken.items() if value is not None}

    def _check_type_ids(self, prompts: Prompts, items: Iterable[Item], type_ids: object) -> None:
        """Positions are computed from the type ids: they must be those of the placeholders."""
        if type_ids is None and not (self.positions_depend and items):
            return
        expected = np.zeros(tuple(prompts.ids.shape), dtype=np.int64)
        for item in items:
            start = int(prompts.pads[item.row]) + item.start
            expected[item.row, start : start + item.length] = item.modality.type_id
        if not isinstance(type_ids, torch.Tensor) or not np.array_equal(
            type_ids.cpu().numpy(), expected
        ):
            raise MediaError(
                f"{TYPE_IDS} {'are missing' if type_ids is None else 'do not match'}: they must be "
                "[rows, tokens], with the modality of each placeholder (image 1, video 2, audio 3) "
                "and 0 elsewhere; the processor returns them"
            )

    def _positions(self, prompts: Prompts, given: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the position ids of the whole prompt, as generate has the model compute them.

        Left to itself with a cache that is not empty, the model (transformers 5.23) adds the
        offset that its last call left behind.
        """
        if not self.positions_depend:
            return None
        inputs = moved({**given, "attention_mask": prompts.full_mask()}, self._model.device)
        return self._model._prepare_position_ids_for_generation(prompts.ids, inputs)  # noqa: SLF001 - generate's own step


def _rows_of(named: object, num_rows: int) -> Spans:
    """Read the caller's items: a list for one row, or a list per row."""
    if not isinstance(named, list | tuple):
        raise MediaError(f"media is {named!r}; pass a list of quire.MediaItem")
    entries = cast("Sequence[object]", named)
    flat = num_rows == 1 and all(isinstance(entry, MediaItem) for entry in entries)
    rows = [entries] if flat else entries
    if len(rows) == num_rows and all(map(_is_row, rows)):
        return [tuple(cast("Sequence[MediaItem]", row)) for row in rows]
    raise MediaError(
        f"media must be a list of quire.MediaItem for a prompt, and a list of such lists for "
        f"{num_rows} rows; got {named!r}"
    )


def _is_row(row: object) -> bool:
    return isinstance(row, list | tuple) and all(
        isinstance(item, MediaItem) for item in cast("Sequence[object]", row)
    )


def _check_same(spans: Spans, items: Sequence[Item]) -> None:
    """The caller's items must stand where the content does: one without the other is garbage."""
    ours = [(row, item.start, item.length) for row, one in enumerate(spans) for item in one]
    found = [(item.row, item.start, item.length) for item in items]
    if ours != found:
        raise MediaError(
            "media and content differ: media items (row, start, length) are "
            f"{ours}, the content's placeholders are {found}"
        )


def _joined(pieces: list[Any]) -> Any:
    if isinstance(pieces[0], torch.Tensor):
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return [entry for piece in pieces for entry in piece]


def moved(arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the same arguments, tensors on a device."""
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
