"""Content of media as processors return it, split into items: by entry, run, grid, size or tile."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from quire.errors import MediaError

Parts = dict[str, Any]
"""An item's own share of the arguments that carry media."""


@dataclass(frozen=True, slots=True)
class Placeholders:
    """The placeholders of one modality in a request.

    rows     [n]  the row of each placeholder
    columns  [n]  its token in that row
    noun          the modality, for messages
    """

    rows: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    noun: str

    def runs(self) -> list[int]:
        """Return the lengths of the runs of neighbouring placeholders."""
        breaks = np.flatnonzero((np.diff(self.columns) != 1) | (np.diff(self.rows) != 0)) + 1
        return [len(run) for run in np.split(self.columns, breaks)]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Items of one modality, in order.

    lengths  placeholders of each item
    parts    the arguments of each item
    gaps     whether other tokens may stand between the placeholders of an item
    """

    lengths: list[int]
    parts: list[Parts] = field(default_factory=list[Parts])
    gaps: bool = False


Split = Callable[[Any, Mapping[str, Any], Placeholders], Pieces]
"""Splits content by a model's config; raises `MediaError` for content of another form."""


def by_entry(name: str) -> Split:
    """Return a split into entries of equal numbers of placeholders."""

    def split(_config: Any, given: Mapping[str, Any], places: Placeholders) -> Pieces:
        content = _tensor(given, name)
        each = len(places.columns) // len(content)
        return Pieces([each] * len(content), _entries(name, content))

    return split


def by_runs(name: str) -> Split:
    """Return a split into entries, each with the placeholders of one run."""

    def split(_config: Any, given: Mapping[str, Any], places: Placeholders) -> Pieces:
        content, lengths = _tensor(given, name), places.runs()
        if len(lengths) != len(content):
            raise MediaError(
                f"{name} hold {len(content)} items, but the prompt has {len(lengths)} runs of "
                f"{places.noun} placeholders; pass one for each"
            )
        return Pieces(lengths, _entries(name, content))

    return split


def by_grid(name: str, grid_name: str, *, gaps: bool = False) -> Split:
    """Return a split of patches by a grid of (t, h, w) patches per item, merged by the vision tower."""

    def split(config: Any, given: Mapping[str, Any], _places: Placeholders) -> Pieces:
        content, grid = _tensor(given, name), given.get(grid_name)
        merged = int(config.vision_config.spatial_merge_size) ** 2  # patches become one token
        if not isinstance(grid, torch.Tensor) or grid.ndim != 2 or grid.shape[1] != 3:
            raise MediaError(
                f"{grid_name} is {grid!r}; it must be a tensor [items, 3] of patches (t, h, w)"
            )
        patches = cast("list[int]", grid.prod(dim=1).tolist())  # pyright: ignore[reportUnknownMemberType]
        if sum(patches) != len(content) or min(patches) < merged:
            raise MediaError(
                f"{grid_name} speaks of {sum(patches)} patches in {len(patches)} items, but "
                f"{name} hold {len(content)}; pass both as the processor made them"
            )
        ends = np.cumsum(patches)
        parts = [{name: content[end - n : end]} for n, end in zip(patches, ends, strict=True)]
        return Pieces([count // merged for count in patches], parts, gaps)

    return split


def by_size(config: Any, given: Mapping[str, Any], places: Placeholders) -> Pieces:
    """Split images of different sizes, padded to one: a row of patches is a run of placeholders.

    Pixtral's vision tower looks at `image_sizes` (height, width) of each, and at nothing beyond.
    Without sizes, images are of equal numbers of placeholders.
    """
    if given.get("image_sizes") is None and config.model_type != "mistral3":
        return by_entry("pixel_values")(config, given, places)
    content = _tensor(given, "pixel_values")
    unit = int(config.vision_config.patch_size) * int(getattr(config, "spatial_merge_size", 1))
    lengths: list[int] = []
    parts: list[Parts] = []
    for index, (height, width) in enumerate(_sizes(given, len(content))):
        if not unit <= height <= content.shape[-2] or not unit <= width <= content.shape[-1]:
            raise MediaError(
                f"image_sizes[{index}] is ({height}, {width}), but pixel_values hold "
                f"({content.shape[-2]}, {content.shape[-1]}) pixels, of which {unit} make a token; "
                "pass both as the processor made them"
            )
        lengths.append((height // unit) * (width // unit))
        parts.append({"pixel_values": content[index : index + 1, :, :height, :width]})
    return Pieces(lengths, parts, gaps=True)


def by_anyres(config: Any, given: Mapping[str, Any], _places: Placeholders) -> Pieces:
    """Split LLaVA-NeXT's images: one tile of the whole, and those of the best of a model's resolutions.

    `pixel_values` are `[images, tiles, 3, height, width]`, padded to the most tiles. An image has the
    placeholders that are left when the padding of its resolution is taken off, and one for each line.
    """
    from transformers.models.llava_next import (  # noqa: PLC0415 - one model's own rules
        modeling_llava_next,
    )

    anyres = cast("Any", modeling_llava_next)
    content, side = _tensor(given, "pixel_values"), int(config.vision_config.image_size)
    if content.ndim != 5:
        raise MediaError(
            f"pixel_values are {list(content.shape)}; they must be [images, tiles, 3, height, width], "
            "as the processor makes them"
        )
    patches, pinpoints = side // int(config.vision_config.patch_size), config.image_grid_pinpoints
    lengths: list[int] = []
    parts: list[Parts] = []
    for index, size in enumerate(_sizes(given, len(content))):
        count = anyres.image_size_to_num_patches(size, pinpoints, side)
        if count > content.shape[1]:
            raise MediaError(
                f"image_sizes[{index}] is {size}, which needs {count} tiles, but pixel_values hold "
                f"{content.shape[1]}; pass both as the processor made them"
            )
        high, wide = anyres.get_anyres_image_grid_shape(size, pinpoints, side)
        whole = torch.empty(1, high * patches, wide * patches)
        _, height, width = anyres.unpad_image(whole, size).shape
        lines = height * (width + 1) if count > 1 else 1
        lengths.append(patches**2 + lines)
        parts.append({"pixel_values": content[index : index + 1, :count]})
    return Pieces(lengths, parts)


def by_tile(config: Any, given: Mapping[str, Any], places: Placeholders) -> Pieces:
    """Split the tiles of Idefics and SmolVLM, `[rows, tiles, 3, height, width]`: each is an item.

    A tile of zeros is padding: the models take no notice of it.
    """
    content, mask = _tensor(given, "pixel_values"), given.get("pixel_attention_mask")
    if content.ndim != 5:
        raise MediaError(
            f"pixel_values are {list(content.shape)}; they must be [rows, tiles, 3, height, width], "
            "as the processor makes them"
        )
    tiles = content.flatten(0, 1)
    real = (tiles != 0).flatten(1).any(dim=1)
    if not real.any() and config.model_type != "idefics2":
        real[0] = True  # they leave one
    chosen = cast("list[int]", real.nonzero()[:, 0].tolist())  # pyright: ignore[reportUnknownMemberType]
    parts: list[Parts] = [{"pixel_values": tiles[at : at + 1, None]} for at in chosen]
    if mask is not None:
        wanted = [*content.shape[:2], *content.shape[3:]]
        if not isinstance(mask, torch.Tensor) or list(mask.shape) != wanted:
            raise MediaError(
                f"pixel_attention_mask must be a tensor {wanted} for pixel_values "
                f"{list(content.shape)}; pass both as the processor made them"
            )
        masks = mask.flatten(0, 1)
        for at, part in zip(chosen, parts, strict=True):
            part["pixel_attention_mask"] = masks[at : at + 1, None]
    if not chosen:
        raise MediaError("pixel_values hold nothing but zeros, which this model takes for padding")
    return Pieces([len(places.columns) // len(chosen)] * len(chosen), parts)


def joined(pieces: list[Any]) -> Any:
    """Return shares of an argument as one, padded with zeros to the largest, as a processor does."""
    if not isinstance(pieces[0], torch.Tensor):
        return [entry for piece in pieces for entry in piece]
    if len(pieces) == 1:
        return pieces[0]
    most = [max(sizes) for sizes in zip(*(piece.shape[1:] for piece in pieces), strict=True)]
    return torch.cat([_padded(piece, most) for piece in pieces])


def _padded(piece: torch.Tensor, most: list[int]) -> torch.Tensor:
    lacking = [wanted - size for wanted, size in zip(most, piece.shape[1:], strict=True)]
    if not any(lacking):
        return piece
    sides = [side for count in reversed(lacking) for side in (0, count)]
    return torch.nn.functional.pad(piece, sides)


def _tensor(given: Mapping[str, Any], name: str) -> torch.Tensor:
    content = given[name]
    if not isinstance(content, torch.Tensor) or content.ndim < 2 or not len(content):
        shape = list(content.shape) if isinstance(content, torch.Tensor) else []
        raise MediaError(
            f"{name} are a {type(content).__name__} {shape}; pass the tensor that the processor returns with "
            "return_tensors='pt'"
        )
    return content


def _entries(name: str, content: torch.Tensor) -> list[Parts]:
    return [{name: content[index : index + 1]} for index in range(len(content))]


def _sizes(given: Mapping[str, Any], num_images: int) -> list[tuple[int, int]]:
    """Return (height, width) of each image, as the processor names them."""
    sizes = given.get("image_sizes")
    if isinstance(sizes, list | tuple | np.ndarray):
        sizes = torch.as_tensor(sizes)
    if not isinstance(sizes, torch.Tensor) or list(sizes.shape) != [num_images, 2]:
        raise MediaError(
            f"image_sizes is {sizes!r}; it must be a tensor [{num_images}, 2] of heights and widths, one for "
            "each entry of pixel_values; the processor returns it"
        )
    rows = cast("list[list[int]]", sizes.tolist())  # pyright: ignore[reportUnknownMemberType]
    return [(int(height), int(width)) for height, width in rows]
