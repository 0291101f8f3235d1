"""Inputs of a composite model besides tokens, split into single images, videos and audios."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from quire.errors import MediaError, UnsupportedModel
from quire.tensors.kinds import model_type

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Modality:
    """How one kind of media enters a model.

    name     for messages
    type_id  what `mm_token_type_ids` has at its placeholders
    tokens   config fields, one of which names the placeholder's token id
    content  the argument with the processed content: one entry per item or, with a grid, the
             patches of all items
    grid     the argument with (t, h, w) patches per item; None: one entry of `content` per item,
             all with equal numbers of placeholders
    beside   arguments with one entry per item, on which features or positions depend as well
    by_runs  whether each run of placeholders is one item, as items differ in length
    """

    name: str
    type_id: int
    tokens: tuple[str, ...]
    content: str
    grid: str | None = None
    beside: tuple[str, ...] = ()
    by_runs: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """Every argument of this modality."""
        return (self.content, *((self.grid,) if self.grid else ()), *self.beside)


_TILES = Modality("image", 1, ("image_token_id", "image_token_index"), "pixel_values")
_PATCHES = replace(_TILES, grid="image_grid_thw")
_VIDEO = Modality("video", 2, ("video_token_id",), "pixel_values_videos", "video_grid_thw")
_AUDIO = Modality("audio", 3, ("audio_token_id",), "input_features")
MODALITIES: Mapping[str, tuple[Modality, ...]] = {
    "internvl": (_TILES,),
    "llava": (_TILES,),
    "qwen2_5_vl": (_PATCHES, replace(_VIDEO, beside=("second_per_grid_ts",))),
    "qwen2_audio": (replace(_AUDIO, beside=("feature_attention_mask",), by_runs=True),),
    "qwen2_vl": (_PATCHES, _VIDEO),
    "voxtral": (_AUDIO,),
}
"""Modalities of each composite model, by its config's `model_type`."""


@dataclass(frozen=True, slots=True)
class Item:
    """One image, video or audio: `length` placeholders of `row` from token `start` on.

    `parts` are the item's own share of its modality's arguments.
    """

    modality: Modality
    row: int
    start: int
    length: int
    parts: Mapping[str, Any]

    def digest(self) -> bytes:
        """Return SHA-256 over all that the model is given for this item, and of which kind it is."""
        sha = hashlib.sha256(self.modality.content.encode())
        for name, part in sorted(self.parts.items()):
            array = torch.as_tensor(part).detach().cpu().contiguous()
            sha.update(f"\0{name} {list(array.shape)} {array.dtype}\0".encode())
            sha.update(array.reshape(-1).view(torch.uint8).numpy().data)
        return sha.digest()


def placeholder_id(config: Any, modality: Modality) -> int:
    """Return the token id that stands for one position of this modality."""
    for name in modality.tokens:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    raise UnsupportedModel(
        f"{model_type(config)} names no {modality.name} placeholder in {modality.tokens}"
    )


def read_items(
    modality: Modality, config: Any, prompts: Sequence[Tokens], given: Mapping[str, Any]
) -> Iterator[Item]:
    """Give each entry of the content its placeholders, in the order of rows and tokens.

    `prompts` are the token ids of each row, without padding. Raises `MediaError` unless entries
    and runs of placeholders match one to one.
    """
    token_id = placeholder_id(config, modality)
    rows = [np.flatnonzero(tokens == token_id) for tokens in prompts]
    row_of = np.repeat(np.arange(len(rows)), [places.size for places in rows])
    places = np.concatenate(rows)
    content = given.get(modality.content)
    if content is None:
        stray = [name for name in modality.arguments if name in given]
        if places.size or stray:
            has = (
                f"{', '.join(stray)} given"
                if stray
                else (
                    f"{places.size} {modality.name} placeholders (id {token_id}) from token "
                    f"{places[0]} of row {row_of[0]} on"
                )
            )
            raise MediaError(
                f"there is no {modality.content}, but {has}; pass all that the processor made"
            )
        return
    if not places.size:
        raise MediaError(
            f"{modality.content} are given, but the prompt has no {modality.name} placeholder "
            f"(id {token_id}); let the processor make the prompt"
        )
    lengths, parts = _parts(modality, config, given, row_of, places)
    if sum(lengths) != places.size:
        raise MediaError(
            f"{modality.content} hold {len(lengths)} items of {lengths} tokens, "
            f"{sum(lengths)} in all, but the prompt has {places.size} {modality.name} "
            f"placeholders (id {token_id}); pass one item for each place, and no other"
        )
    done = 0
    for index, (length, part) in enumerate(zip(lengths, parts, strict=True)):
        first, last = done, done + length - 1
        done += length
        if row_of[first] != row_of[last] or places[last] - places[first] != length - 1:
            raise MediaError(
                f"{modality.name} {index} has {length} tokens, but the placeholders from token "
                f"{places[first]} of row {row_of[first]} on are no run of so many; pass as "
                f"many entries of {modality.content} as the prompt has places for"
            )
        yield Item(modality, int(row_of[first]), int(places[first]), length, part)


def _parts(
    modality: Modality,
    config: Any,
    given: Mapping[str, Any],
    row_of: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the number of placeholders of each item, and its share of the arguments."""
    content = given[modality.content]
    if not isinstance(content, torch.Tensor) or content.ndim < 2 or not len(content):
        shape = list(content.shape) if isinstance(content, torch.Tensor) else []
        raise MediaError(
            f"{modality.content} are a {type(content).__name__} {shape}; pass the tensor that the processor returns with "
            "return_tensors='pt'"
        )
    if modality.grid:
        merged = int(config.vision_config.spatial_merge_size) ** 2  # patches become one token
        pieces, lengths = _by_grid(modality, content, given.get(modality.grid), merged)
    else:
        pieces = [content[index : index + 1] for index in range(len(content))]
        lengths = (
            _runs(row_of, places)
            if modality.by_runs
            else [len(places) // len(content)] * len(content)
        )
        if len(lengths) != len(pieces):
            raise MediaError(
                f"{modality.content} hold {len(pieces)} items, but the prompt has "
                f"{len(lengths)} runs of {modality.name} placeholders; pass one for each"
            )
    parts = [{modality.content: piece} for piece in pieces]
    for name in modality.arguments[1:]:
        values = given.get(name)
        if values is None:
            continue
        if len(values) != len(parts):
            raise MediaError(f"{name} has {len(values)} entries for {len(parts)} items")
        for index, part in enumerate(parts):
            part[name] = values[index : index + 1]
    return lengths, parts


def _by_grid(
    modality: Modality, content: torch.Tensor, grid: object, merged: int
) -> tuple[list[torch.Tensor], list[int]]:
    if not isinstance(grid, torch.Tensor) or grid.ndim != 2 or grid.shape[1] != 3:
        raise MediaError(
            f"{modality.grid} is {grid!r}; it must be a tensor [items, 3] of patches (t, h, w)"
        )
    patches = cast("list[int]", grid.prod(dim=1).tolist())  # pyright: ignore[reportUnknownMemberType]
    if sum(patches) != len(content) or min(patches) < merged:
        raise MediaError(
            f"{modality.grid} speaks of {sum(patches)} patches in {len(patches)} items, but "
            f"{modality.content} hold {len(content)}; pass both as the processor made them"
        )
    ends = np.cumsum(patches)
    pieces = [content[end - count : end] for count, end in zip(patches, ends, strict=True)]
    return pieces, [count // merged for count in patches]


def _runs(row_of: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> list[int]:
    """Return the lengths of the runs of neighbouring places."""
    breaks = np.flatnonzero((np.diff(places) != 1) | (np.diff(row_of) != 0)) + 1
    return [len(run) for run in np.split(places, breaks)]
