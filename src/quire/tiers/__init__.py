"""Tiers: where KV lives that outlives the pool, the process and the machine. Bytes, no tensors."""
