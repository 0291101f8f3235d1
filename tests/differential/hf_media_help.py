"""Requests with media as their processors make them, and the comparison."""

import torch
from hf_help import PAD, same
from hf_media_models import (
    AUDIO,
    BREAK,
    IMAGE,
    QWEN,
    SIZED,
    TILE,
    TILED,
    VIDEO,
    media_model,
)

__all__ = ["IMAGE", "VIDEO", "Content", "media_model"]
torch.set_num_threads(1)
FIRST_TEXT, LAST_TEXT = 3, 89
TOKENS_PER_TILE = 4
TYPE_NAMES = {"gemma3": "token_type_ids", **dict.fromkeys(QWEN, "mm_token_type_ids")}
SIZES = {
    **{name: [(4, 4), (4, 8), (8, 4), (2, 2)] for name in QWEN},
    **{name: [(1, 1), (1, 2), (2, 2)] for name in TILED},
    "llava_next": [(8, 16), (16, 8), (16, 16), (9, 13), (5, 30), (8, 8)],
    "mistral3": [(8, 8), (4, 12), (9, 14), (12, 4)],
    "llava+pixtral": [(4, 4), (2, 6), (5, 7), (6, 2)],
}
"""What sizes a class's images have, the first by default: patches, tiles or pixels (height, width)."""


class Content:
    """One image, video or audio: the tokens that stand for it, and the arguments it brings."""

    def __init__(self, tokens, **arguments):
        self.tokens = torch.as_tensor(tokens)
        self.arguments = arguments

    @property
    def num_tokens(self):
        return len(self.tokens)


def base(name):
    """A class's name without its variant."""
    return name.split("+")[0]


def sizes_of(name):
    """The sizes that pictures of a class may have."""
    return SIZES.get(name) or SIZES.get(base(name)) or [None]


def picture(name, seed, size=None):
    """A random picture for a model, or a recording, of one of its sizes."""
    random = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=random)

    size = size or sizes_of(name)[0]
    if name in AUDIO:
        mask = {"feature_attention_mask": torch.ones(1, 32, dtype=torch.long)}
        return Content(
            [IMAGE] * 8, input_features=noise(1, 8, 32), **(mask if name == "qwen2_audio" else {})
        )
    if base(name) in QWEN:
        height, width = size
        return Content(
            [IMAGE] * (height * width // 4),
            pixel_values=noise(height * width, 12),
            image_grid_thw=torch.tensor([[1, height, width]]),
        )
    if name in TILED:
        return _tiles(noise, *size)
    if name in SIZED:
        unit = 4 if name == "mistral3" else 2
        high, wide = size[0] // unit, size[1] // unit
        lines = ([IMAGE] * wide + [BREAK]) * high
        return Content(
            lines[:-1], pixel_values=noise(1, 3, *size), image_sizes=torch.tensor([size])
        )
    if name == "llava_next":
        return _anyres(noise, size)
    side = {"internvl": 16, "got_ocr2": 32, "gemma3": 16}.get(name, 8)
    # Gemma's is longer than its window.
    num_tokens = 16 if name == "gemma3" else 4
    return Content([IMAGE] * num_tokens, pixel_values=noise(1, 3, side, side))


def _tiles(noise, rows, columns):
    """Tiles with their places between them, and the whole behind them, as SmolVLM has them."""
    count = rows * columns + 1 if rows * columns > 1 else 1
    tokens = [IMAGE] * 4
    for _ in range(count - 1):
        tokens = [*tokens, TILE, *[IMAGE] * 4]
    mask = torch.ones(1, count, 8, 8, dtype=torch.long)
    mask[:, -1, :, 6:] = 0
    return Content(tokens, pixel_values=noise(1, count, 3, 8, 8), pixel_attention_mask=mask)


# Tokens of an image of so many pixels, tiles of 8 with 2 x 2 patches: the whole, then lines that end in one more.
_ANYRES = {
    (8, 16): (3, 4 + 2 * 5),
    (16, 8): (3, 4 + 4 * 3),
    (16, 16): (5, 4 + 4 * 5),
    (9, 13): (5, 4 + 2 * 5),
    (5, 30): (4, 4 + 2 * 7),
    (8, 8): (3, 4 + 2 * 3),
}


def _anyres(noise, size):
    tiles, num_tokens = _ANYRES[size]
    return Content(
        [IMAGE] * num_tokens,
        pixel_values=noise(1, tiles, 3, 8, 8),
        image_sizes=torch.tensor([size]),
    )


def film(name, seed, size=(2, 4, 4), **arguments):
    """A random video for Qwen's models, of so many patches (time, height, width)."""
    random = torch.Generator().manual_seed(seed)
    num_patches = size[0] * size[1] * size[2]
    frame = [VIDEO] * (size[1] * size[2] // 4)
    gap = [BREAK] if name.startswith("qwen3") else []  # the text of its time stands before each
    tokens = [*frame, *(gap + frame) * (size[0] - 1)]
    return Content(
        tokens,
        pixel_values_videos=torch.randn(num_patches, 12, generator=random),
        video_grid_thw=torch.tensor([size]),
        **arguments,
    )


def words(seed, num_tokens):
    """Random text that holds neither placeholders nor an end."""
    random = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(FIRST_TEXT, LAST_TEXT, (num_tokens,), generator=random)


def request(name, *pieces):
    """The arguments of generate that a model's processor makes of text and content."""
    return batch(name, [pieces])


def batch(name, rows):
    """A left-padded batch of requests."""
    ids = [torch.cat([getattr(piece, "tokens", piece) for piece in row]) for row in rows]
    contents = [[piece for piece in row if isinstance(piece, Content)] for row in rows]
    columns = max(len(row) for row in ids)
    made = {"input_ids": _padded(ids, columns, PAD)}
    made["attention_mask"] = _padded([torch.ones_like(row) for row in ids], columns, 0)
    if name in TILED:  # a row of tiles for each row of the batch
        empty = Content([], pixel_values=torch.zeros(1, 1, 3, 8, 8), pixel_attention_mask=torch.zeros(1, 1, 8, 8, dtype=torch.long))  # fmt: skip
        if any(contents):
            contents = [[_side_by_side(row or [empty])] for row in contents]
    whole = [content for row in contents for content in row]
    for argument in dict.fromkeys(name for content in whole for name in content.arguments):
        values = [c.arguments[argument] for c in whole if argument in c.arguments]
        made[argument] = stacked(values)
    if base(name) in TYPE_NAMES:
        made[TYPE_NAMES[base(name)]] = type_ids(made["input_ids"])
    return made


def type_ids(ids):
    """The modality of each token."""
    return torch.where(ids == IMAGE, 1, torch.where(ids == VIDEO, 2, 0))


def _side_by_side(contents):
    """The tiles of a row's images as one."""
    names = contents[0].arguments
    return Content([], **{n: torch.cat([c.arguments[n] for c in contents], dim=1) for n in names})


def stacked(values):
    """Entries of different sizes as one tensor, padded with zeros."""
    most = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
    out = []
    for value in values:
        room = value.new_zeros(len(value), *most)
        room[tuple(slice(0, size) for size in value.shape)] = value
        out.append(room)
    return torch.cat(out)


def _padded(rows, columns, value):
    out = torch.full((len(rows), columns), value)
    for row, values in enumerate(rows):
        out[row, columns - len(values) :] = values
    return out


def follow_up(inputs, output, *pieces, name):
    """The next turn: everything so far, a reply included, then more text and content."""
    rest = request(name, *pieces)
    ids = torch.cat([output, rest.pop("input_ids")], dim=1)
    joined = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    other = {"input_ids", "attention_mask", TYPE_NAMES.get(base(name))}
    if base(name) in TYPE_NAMES:
        joined[TYPE_NAMES[base(name)]] = type_ids(ids)
    for argument in {*inputs, *rest} - other:
        values = [given[argument] for given in (inputs, rest) if argument in given]
        if name in TILED:
            joined[argument] = torch.cat(values, dim=1)
        else:
            joined[argument] = stacked(values)
    return joined


def equal(model, cache, inputs, **arguments):
    """Generate with and without quire, demand the same, return the tokens; no placeholder is made."""
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    arguments = {"suppress_tokens": [IMAGE, VIDEO], **arguments}
    return same(model, cache, inputs["input_ids"], **rest, **arguments)


def first_logits(model, inputs):
    """The next-token logits of the plain model."""
    made = model.generate(
        **inputs, max_new_tokens=1, return_dict_in_generate=True, output_logits=True
    )
    return made.logits[0]
