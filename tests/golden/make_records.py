"""Write records/: records as the format defines them, with struct and xxhash alone.

Made from the table in `quire/tiers/format.py`, not by its code, so that the files check the code.
"""

import hashlib
import json
import struct
from pathlib import Path

import xxhash

FOLDER = Path(__file__).with_name("records")


def field(number, size):
    return number.to_bytes(size, "little")


def namespace_digest(space):
    heads = f"{space['heads'][0]}-{space['heads'][1]}"
    layers = ",".join(str(layer) for layer in space["layers"])
    digest = hashlib.sha256(b"quire-namespace-1")
    for text in (
        space["model"],
        space["dtype"],
        str(space["block_size"]),
        space["layout"],
        layers,
        heads,
    ):
        digest.update(struct.pack("<Q", len(text.encode())) + text.encode())
    return digest.digest()


def record(case):
    digest = namespace_digest(case["namespace"])
    name = bytes.fromhex(case["block_hash"])
    key = hashlib.sha256(digest + name).digest()[:24] + name[16:24]  # ends with the tenant tag
    payload = bytes(i * 7 % 251 for i in range(case["payload_bytes"]))
    unit = 4096 if 192 + len(payload) >= 65536 else 64
    body = payload + bytes(-(192 + len(payload)) % unit)
    head = b"quire-kv"
    head += field(case.get("major", 2), 2) + field(case.get("minor", 0), 2)
    head += field(case["group"], 2) + field(case["dtype"], 2)
    head += field(case["token_count"], 4) + field(0, 4)
    head += field(len(payload), 8) + field(case["generation"], 8)
    head += field(xxhash.xxh3_64_intdigest(body), 8)
    head += digest + key
    secret, key_id, mac = bytes.fromhex(case.get("secret", "")), bytes(8), bytes(32)
    reserved = field(case.get("reserved", 0), 32)
    if secret:
        key_id = hashlib.blake2b(key=secret, digest_size=8, person=b"quire-key-id").digest()
        signed = head + key_id + reserved + body
        mac = hashlib.blake2b(
            signed, key=secret, digest_size=32, person=b"quire-record-mac"
        ).digest()
    head += key_id + mac + reserved
    head += field(xxhash.xxh3_64_intdigest(head), 8)
    assert len(head) == 192
    return head + body


SPACE = {
    "model": "tiny",
    "dtype": "float16",
    "block_size": 16,
    "layout": "layer, K and V, token, head, dim",
    "layers": [0, 2, 5],
    "heads": [4, 8],
}
BLOCK_HASH = hashlib.sha256(b"a block").hexdigest()
PLAIN = {
    "namespace": SPACE,
    "block_hash": BLOCK_HASH,
    "payload_bytes": 100,
    "token_count": 16,
    "group": 0,
    "dtype": 2,
    "generation": 0,
}
STATE = SPACE | {"model": "modèle", "dtype": "float32", "layers": [1], "heads": [0, 0]}
CASES = {
    "plain": PLAIN,
    "empty": PLAIN | {"payload_bytes": 0, "token_count": 0},
    "exact": PLAIN | {"payload_bytes": 64},
    "state": PLAIN
    | {
        "namespace": STATE,
        "payload_bytes": 333,
        "token_count": 0,
        "group": 3,
        "dtype": 1,
        "generation": (1 << 63) + 5,
    },
    "paged": PLAIN | {"payload_bytes": 65_345, "dtype": 5, "generation": 1},
    "last_small": PLAIN | {"payload_bytes": 65_343, "dtype": 6},
    "later_minor": PLAIN | {"minor": 9, "reserved": 77},
    "later_major": PLAIN | {"major": 3},
    "signed": PLAIN | {"secret": hashlib.sha256(b"a tier key").hexdigest()},
    "signed_paged": PLAIN
    | {"secret": hashlib.sha256(b"another").hexdigest(), "payload_bytes": 70_001},
    "signed_later_minor": PLAIN
    | {"secret": hashlib.sha256(b"a tier key").hexdigest(), "minor": 1, "reserved": 1 << 200},
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, case in CASES.items():
        (FOLDER / f"{name}.quire").write_bytes(record(case))
    text = json.dumps(CASES, indent=1, ensure_ascii=False)
    (FOLDER / "records.json").write_text(text + "\n", encoding="utf-8")
