"""Attention of one step's rows over block tables: what requests share is read once.

runs       blocks that several requests read, found from the tables
plan       Packed, AttentionPlan: which rows read what, kept from step to step
parts      attention over a part of the keys, and its log-sum-exp
step       attend: the parts of a layer, merged
reference  the same, one request after another in float32
"""

from quire.engines.loop.attention.parts import Scoring
from quire.engines.loop.attention.plan import AttentionPlan, Packed
from quire.engines.loop.attention.reference import attend_reference
from quire.engines.loop.attention.step import attend

__all__ = ["AttentionPlan", "Packed", "Scoring", "attend", "attend_reference"]
