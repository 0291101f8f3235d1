"""Chunks: the KV of a passage, reused wherever it stands. Planning, without tensors.

segments   a prompt as a head, passages and a question
variants   K and V of a passage as they were captured once
masses     the attention of a capture, and what Cache-Craft makes of it
store      variants in bounded memory, found by passage and scope
selectors  which rows are computed again
settings   the settings of all of it
planning   what of a prompt is exact, what is moved, and whether that is worth it
report     the account of a call
"""

from quire.engines.segments import Segments
from quire_passages.masses import Masses, Measured
from quire_passages.planning import ChunkPlan, PassagePlace, Reach, make_plan
from quire_passages.report import ChunkReport, PassageReport, report_of
from quire_passages.selectors import (
    AllRows,
    CacheCraft,
    Epic,
    EpicShare,
    KVDeviation,
    Moved,
    NoRows,
    RandomRows,
    Selector,
    named_selector,
)
from quire_passages.settings import Chunks
from quire_passages.store import ChunkStore
from quire_passages.variants import Variant

__all__ = [
    "AllRows",
    "CacheCraft",
    "ChunkPlan",
    "ChunkReport",
    "ChunkStore",
    "Chunks",
    "Epic",
    "EpicShare",
    "KVDeviation",
    "Masses",
    "Measured",
    "Moved",
    "NoRows",
    "PassagePlace",
    "PassageReport",
    "RandomRows",
    "Reach",
    "Segments",
    "Selector",
    "Variant",
    "make_plan",
    "named_selector",
    "report_of",
]
