"""KV events of vLLM for blocks that lie in tiers, with their tokens, as for its own offloading."""

# vLLM is not there where types are checked: it has an environment of its own.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

OWNER = "quire"
"""The owner of the storage in events."""


def stored_event(request: Any, at: int, group: int, spec: Any) -> tuple[BlockStored, Any] | None:
    """Return the event of a request's block of a layer group, and group and hash for its end.

    None for a block that vLLM has not hashed.
    """
    hashes, size = request.block_hashes, spec.block_size
    if at >= len(hashes):
        return None
    lora = request.lora_request
    extra, _ = generate_block_hash_extra_keys(request, at * size, (at + 1) * size, 0)
    name = maybe_convert_block_hash(hashes[at])
    event = BlockStored(
        block_hashes=[name],
        parent_block_hash=maybe_convert_block_hash(hashes[at - 1]) if at else None,
        token_ids=list(request.all_token_ids[at * size : (at + 1) * size]),
        block_size=size,
        lora_id=lora.adapter_id if lora is not None else None,
        medium=MEDIUM_STORAGE,
        lora_name=lora.name if lora is not None else None,
        extra_keys=to_event_extra_keys([extra]),
        group_idx=group,
        kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
        kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
        ownership=OWNER,
    )
    return event, (group, name)


def removed_events(gone: Iterable[tuple[int, Any]]) -> Iterator[BlockRemoved]:
    """Yield the ends of blocks, one event for each layer group."""
    hashes: dict[int, list[Any]] = {}
    for group, name in gone:
        hashes.setdefault(group, []).append(name)
    for group, names in hashes.items():
        yield BlockRemoved(
            block_hashes=names, medium=MEDIUM_STORAGE, group_idx=group, ownership=OWNER
        )
