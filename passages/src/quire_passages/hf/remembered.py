"""Results of the relocation gate on disk: a file for each model, by its fingerprint."""

import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
import torch
import transformers

from quire.core import Scope
from quire.errors import NotRelocatable
from quire.tensors.rotary import Pairs, Rotation
from quire_passages.hf.gate import relocation_of
from quire_passages.hf.relocation import Relocation
from quire_passages.hf.runs import Runs

_FORM = "quire-gate-4"


class _Turn(msgspec.Struct, frozen=True):
    in_values: bool
    offset: int
    pairs: Pairs
    frequencies: list[float]


class _Found(msgspec.Struct, frozen=True):
    rotations: list[_Turn | None]
    positions: int
    error: float
    beyond: str | None
    drops_rows: str | None
    shows: str | None


class GateMemory:
    """A directory of results of the relocation gate.

    An unreadable result is computed again; one that cannot be written is not kept.
    A file name covers the model and adapter of a scope, and the versions of torch and transformers: another version may
    compute another way.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def recall(self, bound: Scope, num_layers: int) -> Relocation | NotRelocatable | None:
        """Return what was found of the model that a scope is bound to; None: nothing that holds."""
        try:
            data = self._file(bound).read_bytes()
            found = msgspec.json.decode(data, type=_Found | str)
        except (OSError, msgspec.DecodeError):
            return None
        if isinstance(found, str):
            return NotRelocatable(found)
        if len(found.rotations) != num_layers:
            return None
        rotations = tuple(
            each and Rotation(each.in_values, each.offset, each.pairs, np.asarray(each.frequencies))
            for each in found.rotations
        )
        return Relocation(
            rotations,
            found.positions,
            found.error,
            found.beyond,
            found.drops_rows,
            found.shows,
        )

    def keep(self, bound: Scope, found: Relocation | NotRelocatable) -> None:
        """Write a result of the gate, whole or not at all."""
        file = self._file(bound)
        new = file.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            self.path.mkdir(parents=True, exist_ok=True)
            new.write_bytes(msgspec.json.encode(_told(found)))
            new.replace(file)

    def _file(self, bound: Scope) -> Path:
        facts = (_FORM, torch.__version__, transformers.__version__, bound.model, bound.lora)
        return self.path / f"{sha256(repr(facts).encode()).hexdigest()}.json"


def relocation_by(
    memory: GateMemory | None, runs: Runs, bound: Scope
) -> Relocation | NotRelocatable:
    """Return the gate's result for the model that a scope is bound to, out of memory where it is there."""
    found = memory and memory.recall(bound, len(runs.kinds))
    if found is None:
        try:
            found = relocation_of(runs.model, runs.kinds)
        except NotRelocatable as refused:
            found = refused
        if memory is not None:
            memory.keep(bound, found)
    return found


def _told(found: Relocation | NotRelocatable) -> _Found | str:
    if isinstance(found, NotRelocatable):
        return str(found)
    turns = [
        each and _Turn(each.in_values, each.offset, each.pairs, each.frequencies.tolist())
        for each in found.rotations
    ]
    return _Found(turns, found.positions, found.error, found.beyond, found.drops_rows, found.shows)
