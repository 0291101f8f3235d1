"""C structures of llama.cpp, read from the `llama.h` that belongs to a library."""

import ctypes
import re
from typing import Any

from quire.errors import ConfigError

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_FIELD = re.compile(r"(?:const |enum |struct )*(\w+)\s*((?:\*\s*)*)(\w+)")
_NUMBERS: dict[str, Any] = {
    "bool": ctypes.c_bool,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "uint32_t": ctypes.c_uint32,
    "size_t": ctypes.c_size_t,
    **dict.fromkeys(("int32_t", "llama_token", "llama_pos", "llama_seq_id"), ctypes.c_int32),
}
_ADDRESS = ("_callback", "_buffer_type_t", "_dev_t")
"""Endings of types that are addresses without a star."""

NEEDED = {
    "llama_model_params": ("n_gpu_layers", "progress_callback", "vocab_only"),
    "llama_context_params": (
        *("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch"),
        *("flash_attn_type", "type_k", "type_v", "offload_kqv", "swa_full", "kv_unified"),
    ),
    "llama_batch": ("n_tokens", "token", "embd", "pos", "n_seq_id", "seq_id", "logits"),
}
"""The structures that quire uses, and the fields of each that it sets."""


def structures(header: str) -> dict[str, Any]:
    """Return the structures of `NEEDED` as ctypes classes, by name.

    Raises `ConfigError` for a header that lacks one of them, a field, or has a type that is not known.
    """
    text = _COMMENT.sub("", header)
    enums = {*re.findall(r"\benum\s+(\w+)", text)}
    return {name: _structure(name, text, enums) for name in NEEDED}


def number(header: str, name: str) -> int | None:
    """Return the number that the header defines by a name, None for none."""
    found = re.search(rf"#define\s+{name}\s+(\d+)\b", header)
    return None if found is None else int(found[1])


_OTHER = "it is of another version than quire knows; `quire gguf build` makes one that fits"


def _structure(name: str, text: str, enums: set[str]) -> Any:
    body = re.search(rf"struct\s+{name}\s*\{{([^}}]*)\}}", text)
    if body is None:
        raise ConfigError(f"the header of llama.cpp has no struct {name}: {_OTHER}")
    fields = [_field(name, each, enums) for each in body[1].split(";") if each.strip()]
    lacking = {*NEEDED[name]} - {field for field, _ in fields}
    if lacking:
        raise ConfigError(f"struct {name} of llama.cpp has no {min(lacking)}: {_OTHER}")
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _field(name: str, line: str, enums: set[str]) -> tuple[str, Any]:
    words = " ".join(line.split())
    found = _FIELD.fullmatch(words)
    if found is not None:
        kind, stars, field = found.groups()
        if stars or kind.endswith(_ADDRESS):
            return field, ctypes.c_void_p
        if kind in enums or kind in _NUMBERS:
            return field, _NUMBERS.get(kind, ctypes.c_int)
    raise ConfigError(f"struct {name} of llama.cpp has a field {words!r}: {_OTHER}")
