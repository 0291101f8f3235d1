"""Prefixes of made-up models in a tier: namespaces, block hashes, names and sealed records."""

from hashlib import sha256

import numpy as np

from quire import Scope, block_hashes
from quire.exchange.hashing import root_digest
from quire.tiers.contents.names import ChainName, NameBook, NamespaceName, ScopeName
from quire.tiers.format import DType, Header, Namespace, new_buffer, payload_of, record_bytes, seal

FULL = Namespace(
    "model-a", "float16", 4, "per layer K [4, 2, 3], V [4, 2, 5], little-endian", (0, 2), (0, 2)
)
STATES = Namespace(
    "model-a",
    "mixed",
    4,
    "states conv [3, 5] bfloat16 + sum [2, 4] float32; count [] float32, little-endian",
    (1, 3),
    (0, 0),
)
QUANTIZED = Namespace(
    "model-a",
    "int8 of float16, K per channel, V per token",
    4,
    "per layer K [4, 2, 3], V [4, 2, 5], little-endian",
    (0, 2),
    (0, 2),
)
SIZES = {FULL: 2 * 2 * 4 * 2 * 8, STATES: 30 + 32 + 4, QUANTIZED: 200}
CODES = {FULL: DType.FLOAT16, STATES: DType.MIXED, QUANTIZED: DType.INT8}


def hashes_of(tokens, scope=None):
    return block_hashes(tokens, 4, scope)


def payload_for(key, size):
    return np.random.default_rng(list(key)).bytes(size)


def sealed(namespace, block, group=0):
    key, size = namespace.key(block), SIZES.get(namespace, SIZES[FULL])
    record = new_buffer(record_bytes(size))
    payload_of(record, size)[:] = payload_for(key, size)
    tokens = 0 if namespace is STATES else 4
    seal(
        record,
        Header(
            key,
            namespace.digest,
            size,
            tokens,
            group,
            CODES.get(namespace, DType.FLOAT16),
            generation=7,
        ),
    )
    return key, record


def store(tier, namespace, blocks, group=0):
    """Put a record for each block; return their keys."""
    pairs = [sealed(namespace, block, group) for block in blocks]
    tier.put([key for key, _ in pairs], [record for _, record in pairs])
    return [key for key, _ in pairs]


def book_of(namespaces, prompts):
    """Names of prompts: pairs of tokens and scope."""
    book = NameBook()
    for namespace in namespaces:
        book.add(NamespaceName(namespace))
    for tokens, scope in prompts:
        root = root_digest(scope or Scope())
        book.add(ScopeName(root, f"scope {sha256(root).hexdigest()[:4]}"))
        book.add(ChainName(root, hashes_of(tokens, scope)))
    return book
