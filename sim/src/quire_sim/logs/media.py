"""Images, sounds and files in bodies: a digest of the bytes, and what the header says they are."""

from __future__ import annotations

import base64
import binascii
import struct
from hashlib import sha256
from typing import Any, cast

from quire_sim.logs.rows import Section

_KINDS = ("image", "image_url", "input_image", "input_audio", "audio_url", "video_url", "input_file",
          "file", "document", "media", "blob")  # fmt: skip

_JPEG_SIZES = frozenset({0xC0, 0xC1, 0xC2, 0xC3})


def media_section(fields: dict[str, Any], path: str, role: str, ttl: int) -> Section | None:
    """Return the section of a part that is media; None for another part, and for a document of text."""
    kind = fields.get("type")
    if kind not in _KINDS:
        return None
    source: Any = fields.get("source", fields.get(str(kind), fields))
    given: Any = source
    detail = ""
    if isinstance(source, dict):
        inner = cast("dict[str, Any]", source)
        detail = str(inner.get("detail") or fields.get("detail") or "")
        if inner.get("type") == "text":
            return Section(path, role, "text", str(inner.get("data", "")), "", ttl)
        names = ("url", "data", "file_data", "image_url", "file_id", "content")
        given = next((inner[name] for name in names if inner.get(name)), "")
    text = str(given)
    data = _bytes_of(text)
    digest = sha256(text.encode("utf-8", "surrogatepass") if data is None else data).hexdigest()
    what = f"{kind}" if data is None else _described(data, str(kind))
    return Section(path, role, "media", f"{what} {detail}".strip(), digest[:32], ttl)


def _bytes_of(text: str) -> bytes | None:
    """Return the bytes of a data URL or of base64; None for an address or a name."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    elif text.startswith(("http://", "https://", "file-", "gs://", "s3://")):
        return None
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def _described(data: bytes, kind: str) -> str:
    """Return the format and size of an image by its header."""
    if data.startswith(b"\x89PNG") and len(data) >= 24:
        return "image/png {}x{}".format(*struct.unpack(">II", data[16:24]))
    if data.startswith(b"\xff\xd8"):
        at = 2
        while at + 9 < len(data) and data[at] == 0xFF:
            if data[at + 1] in _JPEG_SIZES:
                height, width = struct.unpack(">HH", data[at + 5 : at + 9])
                return f"image/jpeg {width}x{height}"
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        return "image/jpeg"
    if data.startswith(b"%PDF"):
        return "application/pdf"
    return kind
