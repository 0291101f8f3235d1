"""Passages: KV of a text, reused wherever it stands in a prompt.

Planning, without tensors:

variants   K and V of a passage as they were captured once
masses     the attention of a capture, and what Cache-Craft makes of it
company    the passages before a passage, and which variants cover most of these
store      variants in bounded memory, found by passage and scope
selectors  which rows are computed again
settings   the settings of all of it
verdict    the policy that is good enough for one tenant's texts, by samples
bounds     bounds of 95 % confidence over prompts
earned     rows of own work, paid by those of requests
planning   what of a prompt is exact, what is moved, and whether that is worth it
report     the account of a call

hf         capture, the relocation gate, blending, and the passages of a `PrefixCache`
engine     the passages of an `Engine`
bench      answers with passages beside full forwards: `quire bench passages`, `quire passages check`
assets     small models that are made for questions about passages

A prompt in parts is `quire.engines.segments.Segments`. Each name is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.engines.segments import Segments
    from quire_passages.masses import Masses
    from quire_passages.planning import PassagePlace, PassagePlan, Reach, make_plan
    from quire_passages.report import PassageReport, PassagesReport, report_of
    from quire_passages.selectors import (
        AllRows,
        CacheCraft,
        Epic,
        EpicShare,
        KVDeviation,
        Moved,
        NoRows,
        QuestionRows,
        RandomRows,
        Selector,
        named_selector,
    )
    from quire_passages.settings import Passages
    from quire_passages.store import PassageStore
    from quire_passages.variants import Variant

_HOME = {
    "AllRows": "quire_passages.selectors",
    "CacheCraft": "quire_passages.selectors",
    "PassagePlan": "quire_passages.planning",
    "PassagesReport": "quire_passages.report",
    "PassageStore": "quire_passages.store",
    "Passages": "quire_passages.settings",
    "Epic": "quire_passages.selectors",
    "EpicShare": "quire_passages.selectors",
    "KVDeviation": "quire_passages.selectors",
    "Masses": "quire_passages.masses",
    "Moved": "quire_passages.selectors",
    "NoRows": "quire_passages.selectors",
    "PassagePlace": "quire_passages.planning",
    "PassageReport": "quire_passages.report",
    "QuestionRows": "quire_passages.selectors",
    "RandomRows": "quire_passages.selectors",
    "Reach": "quire_passages.planning",
    "Segments": "quire.engines.segments",
    "Selector": "quire_passages.selectors",
    "Variant": "quire_passages.variants",
    "make_plan": "quire_passages.planning",
    "named_selector": "quire_passages.selectors",
    "report_of": "quire_passages.report",
}

__all__ = [
    "AllRows",
    "CacheCraft",
    "Epic",
    "EpicShare",
    "KVDeviation",
    "Masses",
    "Moved",
    "NoRows",
    "PassagePlace",
    "PassagePlan",
    "PassageReport",
    "PassageStore",
    "Passages",
    "PassagesReport",
    "QuestionRows",
    "RandomRows",
    "Reach",
    "Segments",
    "Selector",
    "Variant",
    "make_plan",
    "named_selector",
    "report_of",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
