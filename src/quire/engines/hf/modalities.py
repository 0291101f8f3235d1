"""Inputs of a composite model besides tokens, as single images, videos and audios."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.engines.hf.splits import (
    Pieces,
    Placeholders,
    Split,
    by_anyres,
    by_entry,
    by_grid,
    by_runs,
    by_size,
    by_tile,
    joined,
)
from quire.errors import MediaError, UnsupportedModel
from quire.tensors.kinds import model_type

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Modality:
    """The arguments and token ids by which one kind of media enters a model.

    name     for messages
    type_id  the value at its placeholders in a model's type ids
    tokens   config fields, one of which names the placeholder's token id
    content  the argument with the processed content
    split    splits the content into items
    beside   other arguments, on which features or positions depend as well: one entry per item, but for
             those that `split` has divided
    """

    name: str
    type_id: int
    tokens: tuple[str, ...]
    content: str
    split: Split
    beside: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """Every argument of this modality."""
        return (self.content, *self.beside)


@dataclass(frozen=True, slots=True)
class MediaOfModel:
    """The media of a model, and how its tokens attend to them.

    modalities   what enters it
    type_ids     the argument that tells the modality of each token
    is_causal    whether tokens of an image see those before them only; else they see all of their image, and
                 `type_ids` say where images are
    """

    modalities: tuple[Modality, ...]
    type_ids: str = "mm_token_type_ids"
    is_causal: bool = True


_ENTRIES = Modality(
    "image", 1, ("image_token_id", "image_token_index"), "pixel_values", by_entry("pixel_values")
)
_SIZED = replace(_ENTRIES, split=by_size, beside=("image_sizes",))
_ANYRES = replace(_ENTRIES, split=by_anyres, beside=("image_sizes",))
_TILES = replace(_ENTRIES, split=by_tile, beside=("pixel_attention_mask",))
_PATCHES = replace(
    _ENTRIES, split=by_grid("pixel_values", "image_grid_thw"), beside=("image_grid_thw",)
)
_VIDEO = Modality(
    "video",
    2,
    ("video_token_id",),
    "pixel_values_videos",
    by_grid("pixel_values_videos", "video_grid_thw"),
    ("video_grid_thw",),
)
_TIMED_VIDEO = replace(_VIDEO, beside=("video_grid_thw", "second_per_grid_ts"))
# Frames stand apart, each behind the text of its time.
_FRAMES = replace(_VIDEO, split=by_grid("pixel_values_videos", "video_grid_thw", gaps=True))
_AUDIO = Modality("audio", 3, ("audio_token_id",), "input_features", by_entry("input_features"))
_RECORDINGS = replace(_AUDIO, split=by_runs("input_features"), beside=("feature_attention_mask",))

MODALITIES: Mapping[str, MediaOfModel] = {
    "aya_vision": MediaOfModel((_ENTRIES,)),
    "cohere2_vision": MediaOfModel((_ENTRIES,)),
    "gemma3": MediaOfModel((_ENTRIES,), "token_type_ids", is_causal=False),
    "got_ocr2": MediaOfModel((_ENTRIES,)),
    "idefics2": MediaOfModel((_TILES,)),
    "idefics3": MediaOfModel((_TILES,)),
    "internvl": MediaOfModel((_ENTRIES,)),
    "llama4": MediaOfModel((_ENTRIES,)),
    "llava": MediaOfModel((_SIZED,)),
    "llava_next": MediaOfModel((_ANYRES,)),
    "mistral3": MediaOfModel((_SIZED,)),
    "qwen2_5_vl": MediaOfModel((_PATCHES, _TIMED_VIDEO)),
    "qwen2_audio": MediaOfModel((_RECORDINGS,)),
    "qwen2_vl": MediaOfModel((_PATCHES, _VIDEO)),
    "qwen3_vl": MediaOfModel((_PATCHES, _FRAMES)),
    "qwen3_vl_moe": MediaOfModel((_PATCHES, _FRAMES)),
    "smolvlm": MediaOfModel((_TILES,)),
    "vipllava": MediaOfModel((_ENTRIES,)),
    "voxtral": MediaOfModel((_AUDIO,)),
}
"""The media of each composite model, by its config's `model_type`."""


@dataclass(frozen=True, slots=True)
class Item:
    """One image, video or audio: `length` tokens of `row` from token `start` on.

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
    found = _pieces(modality, config, given, Placeholders(row_of, places, modality.name))
    lengths = found.lengths
    if sum(lengths) != places.size:
        raise MediaError(
            f"{modality.content} hold {len(lengths)} items of {lengths} tokens, "
            f"{sum(lengths)} in all, but the prompt has {places.size} {modality.name} "
            f"placeholders (id {token_id}); pass one item for each place, and no other"
        )
    done = 0
    for index, (length, part) in enumerate(zip(lengths, found.parts, strict=True)):
        first, last = done, done + length - 1
        done += length
        spans = int(places[last] - places[first]) + 1
        if row_of[first] != row_of[last] or (spans != length and not found.gaps):
            raise MediaError(
                f"{modality.name} {index} has {length} tokens, but the placeholders from token "
                f"{places[first]} of row {row_of[first]} on are no run of so many; pass as "
                f"many entries of {modality.content} as the prompt has places for"
            )
        yield Item(modality, int(row_of[first]), int(places[first]), spans, part)


def merged(items: Iterable[Item]) -> list[Item]:
    """Return items, neighbours of one modality as one: their tokens see each other."""
    whole: list[Item] = []
    for item in items:
        before = whole[-1] if whole else None
        if (
            before is not None
            and (before.row, before.modality) == (item.row, item.modality)
            and before.start + before.length == item.start
        ):
            parts = {name: joined([before.parts[name], item.parts[name]]) for name in item.parts}
            whole[-1] = replace(before, length=before.length + item.length, parts=parts)
        else:
            whole.append(item)
    return whole


def _pieces(
    modality: Modality, config: Any, given: Mapping[str, Any], places: Placeholders
) -> Pieces:
    """Split the content, and what comes beside it."""
    found = modality.split(config, given, places)
    for name in modality.beside:
        values = given.get(name)
        if values is None or name in found.parts[0]:
            continue
        if len(values) != len(found.parts):
            raise MediaError(f"{name} has {len(values)} entries for {len(found.parts)} items")
        for index, part in enumerate(found.parts):
            part[name] = values[index : index + 1]
    return found
