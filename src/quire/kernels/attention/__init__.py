"""Attention of one step's rows over block tables: blocks that requests share are read once.

runs       blocks that several requests read, found from the tables
plan       Packed, AttentionPlan: which rows read what, kept from step to step
work       the same as tasks for threads
scoring    how a layer weighs keys
step       attend: one layer
compiled   the same as a pass over what a step reads
kernel     one layer as code for any number of threads: new rows, tasks, and the merge of what these find
few, many  a task's attention, by how many queries it has
layer      what such code is given
device     the same tasks and merge on a GPU, as Triton kernels
reference  attention as it is defined, one request after another
"""

from quire.kernels.attention.plan import AttentionPlan, Packed, Plans
from quire.kernels.attention.reference import attend_reference
from quire.kernels.attention.scoring import Scoring
from quire.kernels.attention.step import attend

__all__ = ["AttentionPlan", "Packed", "Plans", "Scoring", "attend", "attend_reference"]
