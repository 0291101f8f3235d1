"""Write block_hashes.json: the published test vectors of `quire.block_hashes`.

They are computed here from the definition in `quire/exchange/hashing.py`, with hashlib and struct
alone, so that the file checks the code and not itself.
"""

import hashlib
import json
import struct
from pathlib import Path

FILE = Path(__file__).with_name("block_hashes.json")


def part(value):
    kind, data = {
        type(None): lambda v: (0, b""),
        str: lambda v: (1, v.encode()),
        bytes: lambda v: (2, v),
        int: lambda v: (3, str(v).encode()),
    }[type(value)](value)
    return bytes([kind]) + struct.pack("<Q", len(data)) + data


def tagged(digest, tag):
    return digest[:16] + tag + digest[24:]


def tenant_tag(scope):
    tenant = scope.get("tenant", scope.get("salt"))
    if tenant is None:
        return bytes(8)
    return hashlib.sha256(b"quire-tenant-1" + part(tenant)).digest()[:8]


def root(scope):
    parts = b"".join(part(scope.get(name)) for name in ("tenant", "salt", "lora", "model"))
    return tagged(hashlib.sha256(b"quire-scope-2" + parts).digest(), tenant_tag(scope))


def hashes(tokens, block_size, scope, media):
    parent, digests = root(scope), []
    tag = tenant_tag(scope)
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = list(tokens[start : start + block_size])
        runs = b""
        for item in media:
            first = max(item["start"], start)
            last = min(item["start"] + item["length"], start + block_size)
            if first < last:
                block[first - start : last - start] = [-1] * (last - first)
                digest = bytes.fromhex(item["digest"])
                span = tokens[item["start"] : item["start"] + item["length"]]
                content = (
                    struct.pack("<Q", len(digest)) + digest + struct.pack(f"<{len(span)}i", *span)
                )
                runs += struct.pack("<II", first - start, last - first)
                runs += hashlib.sha256(content).digest()
        text = parent + struct.pack(f"<{block_size}i", *block) + runs
        parent = tagged(hashlib.sha256(text).digest(), tag)
        digests.append(parent.hex())
    return digests


CASES = [
    {"tokens": list(range(16)), "block_size": 16, "scope": {}, "media": []},
    {"tokens": list(range(1, 50)), "block_size": 16, "scope": {}, "media": []},
    {"tokens": [0, 2**31 - 1, 7], "block_size": 1, "scope": {}, "media": []},
    {"tokens": list(range(12)), "block_size": 3, "scope": {"lora": "a", "salt": "b"}, "media": []},
    {"tokens": list(range(12)), "block_size": 3, "scope": {"lora": "ab"}, "media": []},
    {"tokens": list(range(12)), "block_size": 3, "scope": {"salt": "ab"}, "media": []},
    {"tokens": list(range(12)), "block_size": 3, "scope": {"salt": 7, "model": "é"}, "media": []},
    {"tokens": list(range(12)), "block_size": 3, "scope": {"tenant": "ab"}, "media": []},
    {
        "tokens": list(range(12)),
        "block_size": 3,
        "scope": {"tenant": "ab", "salt": "x"},
        "media": [],
    },
    {
        "tokens": [5, 9, 9, 9, 9, 9, 6, 7, 9, 9, 1, 2],
        "block_size": 4,
        "scope": {},
        "media": [
            {"digest": "ab" * 32, "start": 1, "length": 5},
            {"digest": "cd" * 16, "start": 8, "length": 2},
        ],
    },
]

if __name__ == "__main__":
    vectors = [
        case | {"hashes": hashes(case["tokens"], case["block_size"], case["scope"], case["media"])}
        for case in CASES
    ]
    FILE.write_text(json.dumps(vectors, indent=1) + "\n", encoding="utf-8")
