"""Images, video and audio of a prompt: their spans, their content keys, and the part left to feed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from quire.core import MediaItem
from quire.engines.hf.inputs import Prompts
from quire.engines.hf.modalities import (
    MODALITIES,
    Item,
    MediaOfModel,
    merged,
    placeholder_id,
    read_items,
)
from quire.engines.hf.splits import joined
from quire.errors import ConfigError, MediaError
from quire.tensors.kinds import model_type

Spans = list[tuple[MediaItem, ...]]
Named = Sequence[MediaItem] | Sequence[Sequence[MediaItem]]

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
    type_name                      the argument that they are given in
    is_causal                      whether tokens of an item see those before them only
    names                          arguments of a forward that carry media
    """

    spans: Spans
    pads: npt.NDArray[np.int64]
    declared: npt.NDArray[np.bool_]
    placeholders: tuple[int, ...] = ()
    positions: torch.Tensor | None = None
    type_ids: torch.Tensor | None = None
    type_name: str = ""
    is_causal: bool = True
    items: Sequence[Item] = field(default_factory=list[Item])
    names: frozenset[str] = frozenset()

    def cut(self, num_columns: int) -> int:
        """Return the most columns up to `num_columns` that end inside no item of any row.

        A model is fed whole items only.
        """
        around = self._around(num_columns)
        return self.cut(min(start for start, _ in around)) if around else num_columns

    def beyond(self, num_columns: int) -> int:
        """Return the fewest columns from `num_columns` on that end inside no item of any row."""
        around = self._around(num_columns)
        return self.beyond(max(stop for _, stop in around)) if around else num_columns

    def _around(self, num_columns: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the items, in columns, that go on across a boundary."""
        return [
            (int(pad) + item.start, int(pad) + item.start + item.length)
            for pad, row in zip(self.pads, self.spans, strict=True)
            for item in row
            if item.start < num_columns - pad < item.start + item.length
        ]

    def row(self, row: int) -> "Media":
        """Return what one row alone has, without its padding."""
        pad = int(self.pads[row])
        positions, type_ids = self.positions, self.type_ids
        return replace(
            self,
            spans=[self.spans[row]],
            pads=np.zeros(1, dtype=np.int64),
            declared=self.declared[row : row + 1, pad:],
            positions=None if positions is None else positions[..., row : row + 1, pad:],
            type_ids=None if type_ids is None else type_ids[row : row + 1, pad:],
            items=[replace(item, row=0) for item in self.items if item.row == row],
        )

    def content(self, num_columns: int, stop: int | None = None) -> dict[str, Any]:
        """Return the content arguments of the items behind the first `num_columns` columns, before column `stop` if any."""
        parts: dict[str, list[Any]] = {}
        for item in self.items:
            start = self.pads[item.row] + item.start
            if start >= num_columns and (stop is None or start < stop):
                for name, part in item.parts.items():
                    parts.setdefault(name, []).append(part)
        return {name: joined(pieces) for name, pieces in parts.items()}

    def arguments(self, num_columns: int) -> dict[str, Any]:
        """Return generate's arguments for media when `num_columns` columns are computed already."""
        beside = {"position_ids": self.positions, self.type_name: self.type_ids}
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

    def is_seen_so(
        self, type_ids: object, origins: npt.NDArray[np.int64], start: int, stop: int
    ) -> bool:
        """Whether type ids given to a forward of columns from `start` to `stop` are those of the prompt.

        Where an item's tokens see all of it, other ones give other K and V. Only the items that are fed count.
        """
        if self.is_causal:
            return True
        fed = self.declared[origins, start:stop]
        if type_ids is None:
            return not fed.any()
        if not isinstance(type_ids, torch.Tensor) or tuple(type_ids.shape) != (len(origins), stop):
            return False
        expected = np.zeros((len(origins), stop), dtype=np.int64)
        declared = self.declared[origins, :stop]
        expected[:, : declared.shape[1]] = declared
        return np.array_equal(type_ids.cpu().numpy(), expected)

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
        self._name = model_type(model.config)
        self._reading = reading = MODALITIES.get(self._name, MediaOfModel(()))
        self._modalities = reading.modalities
        self._placeholders = tuple(placeholder_id(model.config, m) for m in self._modalities)
        names = (name for modality in self._modalities for name in modality.arguments)
        self._names = frozenset([*names, reading.type_ids, ENCODED] if self._modalities else [])

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
        if not self._reading.is_causal:
            items = merged(items)
        type_ids = given.get(self._reading.type_ids)
        self._check_type_ids(prompts, items, type_ids)
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
            type_ids=type_ids,
            items=items,
        )

    def declared(self, prompts: Prompts, named: object) -> Media:
        """Take the caller's word for the media of a prompt that the caller feeds.

        Raises `MediaError` if a placeholder belongs to no item of `named`.
        """
        media = self._media(prompts, _rows_of(named, len(prompts.tokens)))
        if not self._reading.is_causal and any(media.spans):
            raise ConfigError(
                f"a session with images: {self._name} has all tokens of an image see each other, as "
                f"{self._reading.type_ids} say in a forward, which a cache alone does not see; use cache.generate(...)"
            )
        for row, tokens in enumerate(prompts.tokens):
            held = np.isin(tokens, media.placeholders)
            open_ = np.flatnonzero(held & ~media.declared[row, int(prompts.pads[row]) :])
            if open_.size:
                raise MediaError(
                    f"token {open_[0]} of row {row} is a placeholder (id {tokens[open_[0]]}) of no "
                    "media item; pass media=[quire.MediaItem(digest, start, length), ...] for all"
                )
        return media

    def check_chunk(self, media: Media, chunk: int | None) -> None:
        """Raise `ConfigError` where a prompt cannot be fed in pieces, as they would end inside an item."""
        if chunk is not None and media.items and not self._reading.is_causal:
            raise ConfigError(
                f"prefill_chunk_size={chunk} with images: {self._name} has all tokens of an image see each other, "
                "which they do not where a piece ends inside it; leave it out"
            )

    def _media(self, prompts: Prompts, spans: Spans) -> Media:
        declared = np.zeros(tuple(prompts.ids.shape), dtype=np.bool_)
        for row, (pad, items) in enumerate(zip(prompts.pads, spans, strict=True)):
            for item in items:
                declared[row, pad + item.start : pad + item.start + item.length] = True
        return Media(
            spans,
            prompts.pads,
            declared,
            self._placeholders,
            type_name=self._reading.type_ids,
            is_causal=self._reading.is_causal,
            names=self._names,
        )

    def _take(self, arguments: dict[str, Any]) -> dict[str, Any]:
        taken = {name: arguments.pop(name, None) for name in self._names - {ENCODED}}
        return {name: value for name, value in taken.items() if value is not None}

    def _check_type_ids(self, prompts: Prompts, items: Iterable[Item], type_ids: object) -> None:
        """Positions or masks are computed from the type ids: they must be those of the placeholders."""
        needed = self.positions_depend or not self._reading.is_causal
        if type_ids is None and not (needed and items):
            return
        expected = self._expected_type_ids(prompts)
        if not isinstance(type_ids, torch.Tensor) or not np.array_equal(
            type_ids.cpu().numpy(), expected
        ):
            kinds = ", ".join(f"{each.name} {each.type_id}" for each in self._modalities)
            raise MediaError(
                f"{self._reading.type_ids} {'are missing' if type_ids is None else 'do not match'}: they must be "
                f"[rows, tokens], with the modality of each placeholder ({kinds}) "
                "and 0 elsewhere; the processor returns them"
            )

    def _expected_type_ids(self, prompts: Prompts) -> npt.NDArray[np.int64]:
        ids = prompts.ids.cpu().numpy()
        expected = np.zeros(ids.shape, dtype=np.int64)
        for modality, token_id in zip(self._modalities, self._placeholders, strict=True):
            expected[ids == token_id] = modality.type_id
        return expected

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


def moved(arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the same arguments, tensors on a device."""
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
