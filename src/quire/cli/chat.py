"""Messages to token ids."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.chat.conversation import laid_out
from quire.errors import ConfigError, TokensError
from quire.extras import lacking

Messages = list[dict[str, Any]]


def message(role: str, content: str, images: Sequence[Any] = ()) -> dict[str, Any]:
    """Return one message of a conversation; with images, in parts, as processors' chat templates read them."""
    if not images:
        return {"role": role, "content": content}
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": role, "content": [*parts, {"type": "text", "text": content}]}


def read_image(path: Path) -> Any:
    """Read an image file. Raises `ConfigError`."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ConfigError(lacking("reading images", "PIL", "hf")) from error
    try:
        with Image.open(path.expanduser()) as image:
            return image.convert("RGB")
    except OSError as error:
        raise ConfigError(f"cannot read the image {str(path)!r}: {error}") from error


def prompt_inputs(reader: Any, messages: Messages) -> dict[str, Any]:
    """Return what generate takes of the whole conversation, ready for the next reply.

    `reader`: a tokenizer, which gives `input_ids` `[1, tokens]`, or a processor, which gives what
    images became beside. Its chat template lays the conversation out; a tokenizer without one joins
    messages by blank lines. Raises `TokensError` for an empty conversation, and `ConfigError` if
    the template refuses it or images have none.
    """
    contents = [said["content"] for said in messages]
    if not any(isinstance(content, list) or content.strip() for content in contents):
        raise TokensError("the prompt is empty; give some text")
    places_images = hasattr(reader, "image_processor")
    if reader.chat_template is None:
        if places_images:
            raise ConfigError("the model's processor has no chat template to place images with")
        return {"input_ids": reader("\n\n".join(contents), return_tensors="pt")["input_ids"]}
    if places_images:
        in_parts = (
            [{"type": "text", "text": each}] if isinstance(each, str) else each for each in contents
        )
        messages = [said | {"content": each} for said, each in zip(messages, in_parts, strict=True)]
    encoded = laid_out(
        reader,
        messages,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    wanted = dict(encoded) if places_images else {"input_ids": encoded["input_ids"]}
    wanted.pop("attention_mask", None)  # of one row, without padding
    return wanted


def reply_text(tokenizer: Any, new_ids: list[int]) -> str:
    """Return new tokens as text, special tokens left out."""
    return tokenizer.decode(new_ids, skip_special_tokens=True)
