"""Messages to token ids, and the stamp of the first token."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from quire.bench.timing import Stamp
from quire.errors import ConfigError, TokensError
from quire.extras import lacking

Messages = list[dict[str, Any]]


class Timed(NamedTuple):
    """One call of a `generate`: its new token ids, one list per row, and its times."""

    new_ids: list[list[int]]
    ttft_s: float
    total_s: float


def message(role: str, content: str) -> dict[str, Any]:
    """Return one message of a conversation."""
    return {"role": role, "content": content}


def message_with_images(role: str, content: str, images: list[Any]) -> dict[str, Any]:
    """Return one message of images, then text, in parts as processors' chat templates read them."""
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": role, "content": [*parts, {"type": "text", "text": content}]}


def read_image(path: Path) -> Any:
    """Read an image file. Raises `ConfigError`."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ConfigError(lacking("reading images", "PIL", "images")) from error
    try:
        with Image.open(path.expanduser()) as image:
            return image.convert("RGB")
    except OSError as error:
        raise ConfigError(f"cannot read the image {str(path)!r}: {error}") from error


def prompt_inputs(processor: Any, messages: Messages) -> dict[str, Any]:
    """Return the arguments of generate that a processor makes of a conversation with images.

    Raises `ConfigError` if the processor has no chat template, or it refuses.
    """
    if processor.chat_template is None:
        raise ConfigError("the model's processor has no chat template to place images with")
    from jinja2 import TemplateError

    parted = [
        said
        if isinstance(said["content"], list)
        else message_with_images(said["role"], said["content"], [])
        for said in messages
    ]
    try:
        return dict(
            processor.apply_chat_template(
                parted,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
        )
    except (TemplateError, ValueError) as error:
        raise ConfigError(f"the model's processor refuses this: {error}") from error


def prompt_ids(tokenizer: Any, messages: Messages) -> Any:
    """Return the whole conversation as token ids `[1, tokens]`, ready for the next reply.

    The tokenizer's chat template lays it out; without one, messages are joined by blank lines.
    Raises `TokensError` for an empty conversation and `ConfigError` if the template refuses it.
    """
    import torch

    if not any(said["content"].strip() for said in messages):
        raise TokensError("the prompt is empty; give some text")
    if tokenizer.chat_template is None:
        text = "\n\n".join(said["content"] for said in messages)
        ids = tokenizer(text)["input_ids"]
    else:
        from jinja2 import TemplateError

        try:
            encoded = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )
        except TemplateError as error:
            raise ConfigError(f"the model's chat template refuses this: {error}") from error
        ids = encoded["input_ids"]
    return torch.tensor([ids])


def reply_text(tokenizer: Any, new_ids: list[int]) -> str:
    """Return new tokens as text, special tokens left out."""
    return tokenizer.decode(new_ids, skip_special_tokens=True)


def timed(generate: Callable[..., Any], ids: Any, streamer: Any = None, **arguments: Any) -> Timed:
    """Call `model.generate` or `PrefixCache.generate`, and time the first token and the whole.

    Both are timed the same way: from the call to the first new token that generate gives to a
    streamer, and to the call's return. `streamer` is given all that generate streams.
    """
    import torch

    mask = torch.ones_like(ids)
    stamp = Stamp(streamer)
    output = generate(input_ids=ids, attention_mask=mask, streamer=stamp, **arguments)
    ended = time.perf_counter()
    first = stamp.first_at or ended
    new_ids = output[:, ids.shape[1] :].tolist()
    return Timed(new_ids, first - stamp.started, ended - stamp.started)
