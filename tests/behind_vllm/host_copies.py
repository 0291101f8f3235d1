"""vLLM's tiering with copies that need no GPU, for an engine on a CPU: its own manager and tiers, another worker."""

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostWorker(OffloadingWorker):
    """Copies blocks between vLLM's cache on a CPU and its host memory when it is told to; one block a chunk."""

    def __init__(self, caches, region):
        self.caches = [each.tensor for each in caches.tensors]
        self.chunks = [region.create_next_worker_view(each.shape[1]) for each in self.caches]
        self.refs = caches.group_data_refs
        self.region, self.done = region, []

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec, src_spec.block_ids, dst_spec.chunk_ids, out=True)

    def submit_load(self, job_id, src_spec, dst_spec, expedited=False):
        return self._copy(job_id, dst_spec, dst_spec.block_ids, src_spec.chunk_ids, out=False)

    def _copy(self, job_id, spec, blocks, chunks, *, out):
        at = 0
        for group, size in enumerate(spec.group_sizes):
            for block, chunk in zip(blocks[at : at + size], chunks[at : at + size], strict=True):
                for ref in self.refs[group]:
                    ours, theirs = self.caches[ref.tensor_idx], self.chunks[ref.tensor_idx]
                    if out:
                        theirs[chunk].copy_(ours[block])
                    else:
                        ours[block].copy_(theirs[chunk])
            at += size
        self.done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self):
        done, self.done = self.done, []
        return done

    def wait(self, job_ids):
        pass

    def shutdown(self):
        self.caches = self.chunks = None
        self.region.cleanup()


class HostCopySpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches):
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return HostWorker(kv_caches, region)
