"""Many replicas as one service.

index     which replica holds which prefix in which tier, from the events of their caches
keys      blocks by their tokens and all before them
numbers   64-bit names to small numbers, in arrays
"""
