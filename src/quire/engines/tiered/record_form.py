"""The form of records: their keys and seals, and the header by which a reader knows them."""

from msgspec.structs import replace

from quire.exchange.hashing import tag_of
from quire.tiers.format import (
    KEY_BYTES,
    DType,
    Header,
    Namespace,
    describes,
    payload_of,
    record_bytes,
    record_key,
    seal,
)
from quire.tiers.keys import TierKey

REMEMBERED_KEYS = 1 << 15
"""Keys that a form remembers by block digest: hashing each one anew is most of a lookup."""


class RecordForm:
    """Records of equal size and meaning: those of one layer group, or of one pool of pages.

    `namespace`      identity that must be equal for a record to be read
    `payload_bytes`  of each record; `record_bytes`: with its header
    `tokens`         tokens of a record; 0 for states
    `group`          index of the layer group
    `tier_key`       keys the tenant tags in records' keys, if it has `tenants`
    """

    def __init__(
        self,
        namespace: Namespace,
        payload_bytes: int,
        tokens: int,
        group: int = 0,
        *,
        dtype: str,
        tier_key: TierKey | None = None,
    ) -> None:
        self.namespace = namespace
        self.payload_bytes = payload_bytes
        self.record_bytes = record_bytes(payload_bytes)
        self._digest = namespace.digest
        kind = DType.__members__.get(dtype.upper(), DType.MIXED)
        self._header = Header(bytes(KEY_BYTES), self._digest, payload_bytes, tokens, group, kind)
        self._tier_key = tier_key
        self._keys: dict[bytes, bytes] = {}

    def key(self, digest: bytes) -> bytes:
        """Return the key of the block with this digest."""
        known = self._keys.get(digest)
        if known is None:
            if len(self._keys) >= REMEMBERED_KEYS:
                self._keys.clear()
            known = record_key(self._digest, digest, tag_of(digest), self._tier_key)
            self._keys[digest] = known
        return known

    def payload(self, record: memoryview) -> memoryview:
        """Return the payload of a record."""
        return payload_of(record, self.payload_bytes)

    def seal(self, record: memoryview, key: bytes, signer: TierKey | None = None) -> None:
        """Seal a record around its payload, signed with a tier key."""
        seal(record, replace(self._header, key=key), signer)

    def reads(self, record: memoryview) -> bool:
        """Return whether a verified record says that it is of this form.

        Its key alone does not prove that: a writer may give any record any key.
        """
        return describes(record, self._header)
