"""Tiny composite models with media, requests as their processors make them, and the comparison."""

import functools

import torch
import transformers
from hf_help import GQA, PAD, same, settled

torch.set_num_threads(1)
IMAGE, VIDEO = 90, 91
FIRST_TEXT, LAST_TEXT = 3, 89
TOKENS_PER_TILE = 4

_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
_CLIP = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "projection_dim": 16,
}
_WHISPER = {
    "num_mel_bins": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "d_model": 16,
    "max_source_positions": 16,
}


def _config(name):
    mapping = transformers.CONFIG_MAPPING[name]
    if name == "llava":
        return mapping(
            vision_config={"model_type": "clip_vision_model", **_CLIP},
            text_config={"model_type": "llama", **GQA},
            image_token_id=IMAGE,
            vision_feature_layer=-1,
        )
    if name == "internvl":
        vision = {k: v for k, v in _CLIP.items() if k != "projection_dim"}
        return mapping(
            vision_config={**vision, "image_size": [16, 16], "patch_size": [4, 4]},
            text_config={"model_type": "qwen2", **GQA},
            image_token_id=IMAGE,
            downsample_ratio=0.5,
        )
    if name == "qwen2_vl":
        vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 2}
        text = {**GQA, "rope_parameters": _MROPE}
    elif name == "qwen2_5_vl":
        vision = {
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32,
            "num_heads": 4, "patch_size": 2, "window_size": 8, "fullatt_block_indexes": [1],
        }  # fmt: skip
        text = {**GQA, "rope_parameters": _MROPE}
    elif name == "qwen2_audio":
        return mapping(
            audio_config=_WHISPER,
            text_config={"model_type": "qwen2", **GQA},
            audio_token_id=IMAGE,
        )
    elif name == "voxtral":
        audio = {
            "num_mel_bins": 8, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "max_source_positions": 16,
        }  # fmt: skip
        return mapping(
            audio_config=audio,
            text_config={"model_type": "llama", **GQA},
            audio_token_id=IMAGE,
        )
    else:
        raise KeyError(name)
    return mapping(
        vision_config={**vision, "temporal_patch_size": 1, "spatial_merge_size": 2},
        text_config=text,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )


@functools.cache
def media_model(name):
    """A random model, always the same one; weights large enough to disagree."""
    torch.manual_seed(0)
    kinds = transformers.AutoModelForMultimodalLM
    model = kinds.from_config(_config(name), dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(5.0)
    return settled(model)


class Content:
    """One image, video or audio: the arguments it brings, and its number of placeholders."""

    def __init__(self, num_tokens, token=IMAGE, type_id=1, **arguments):
        self.num_tokens = num_tokens
        self.token = token
        self.type_id = type_id
        self.arguments = arguments


def picture(name, seed, size=(4, 4)):
    """A random picture for a model; for Qwen's of so many patches (height, width)."""
    random = torch.Generator().manual_seed(seed)
    if name in {"qwen2_audio", "voxtral"}:
        frames = 32
        mel = torch.randn(1, 8, frames, generator=random)
        mask = {"feature_attention_mask": torch.ones(1, frames, dtype=torch.long)}
        return Content(8, input_features=mel, **(mask if name == "qwen2_audio" else {}))
    if name.startswith("qwen"):
        height, width = size
        return Content(
            height * width // 4,
            pixel_values=torch.randn(height * width, 12, generator=random),
            image_grid_thw=torch.tensor([[1, height, width]]),
        )
    side = 8 if name == "llava" else 16
    return Content(4, pixel_values=torch.randn(1, 3, side, side, generator=random))


def film(name, seed, size=(2, 4, 4), **arguments):
    """A random video for Qwen's models, of so many patches (time, height, width)."""
    random = torch.Generator().manual_seed(seed)
    num_patches = size[0] * size[1] * size[2]
    return Content(
        num_patches // 4,
        VIDEO,
        2,
        pixel_values_videos=torch.randn(num_patches, 12, generator=random),
        video_grid_thw=torch.tensor([size]),
        **arguments,
    )


def words(seed, num_tokens):
    """Random text that holds neither placeholders nor an end."""
    random = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(FIRST_TEXT, LAST_TEXT, (num_tokens,), generator=random)


def request(name, *pieces):
    """What the processor of a model makes of text and content: the arguments of generate."""
    return batch(name, [pieces])


def batch(name, rows):
    """A left-padded batch of requests."""
    ids, types, arguments = [], [], {}
    for pieces in rows:
        row = [
            torch.full((piece.num_tokens,), piece.token) if isinstance(piece, Content) else piece
            for piece in pieces
        ]
        kinds = [
            torch.full(part.shape, piece.type_id if isinstance(piece, Content) else 0)
            for part, piece in zip(row, pieces, strict=True)
        ]
        ids.append(torch.cat(row))
        types.append(torch.cat(kinds))
        for piece in pieces:
            if isinstance(piece, Content):
                for argument, value in piece.arguments.items():
                    arguments.setdefault(argument, []).append(value)
    columns = max(len(row) for row in ids)
    made = {argument: torch.cat(values) for argument, values in arguments.items()}
    made["input_ids"] = _padded(ids, columns, PAD)
    made["attention_mask"] = _padded([torch.ones_like(row) for row in ids], columns, 0)
    if name in {"qwen2_vl", "qwen2_5_vl"}:
        made["mm_token_type_ids"] = _padded(types, columns, 0)
    return made


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
    rest.pop("attention_mask")
    if "mm_token_type_ids" in inputs:
        types = torch.zeros_like(ids)
        types[:, : inputs["input_ids"].shape[1]] = inputs["mm_token_type_ids"]
        more = rest.pop("mm_token_type_ids")
        types[:, types.shape[1] - more.shape[1] :] = more
        joined["mm_token_type_ids"] = types
    for argument in {*inputs, *rest} - {"input_ids", "attention_mask", "mm_token_type_ids"}:
        values = [given[argument] for given in (inputs, rest) if argument in given]
        joined[argument] = torch.cat(values)
    return joined


def equal(model, cache, inputs, **arguments):
    """Generate with and without quire, demand the same, return the tokens; no placeholder is made."""
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    arguments = {"suppress_tokens": [IMAGE, VIDEO], **arguments}
    return same(model, cache, inputs["input_ids"], **rest, **arguments)


def first_logits(model, inputs):
    """What the plain model says next."""
    made = model.generate(
        **inputs, max_new_tokens=1, return_dict_in_generate=True, output_logits=True
    )
    return made.logits[0]
