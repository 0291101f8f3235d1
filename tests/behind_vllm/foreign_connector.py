"""A connector of somebody else beside quire's: it needs its own handshake metadata, and loads and stores nothing."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)


@dataclass
class ForeignHandshake(KVConnectorHandshakeMetadata):
    address: str


class ForeignMetadata(KVConnectorMetadata):
    pass


class ForeignConnector(KVConnectorBase_V1, SupportsHMA):
    def get_handshake_metadata(self):
        return ForeignHandshake("worker")

    def set_xfer_handshake_metadata(self, metadata):
        assert [each.address for each in metadata.values()] == ["worker"]

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return ForeignMetadata()

    def request_finished_all_groups(self, request, block_ids):
        return False, None
