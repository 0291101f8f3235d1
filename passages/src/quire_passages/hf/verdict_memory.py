"""Samples of verdicts on disk, from one process to the next: counts alone, no text.

A file for each owner, in a directory of its tenant. Its name covers all that the samples depend on: the model's
fingerprint, the owner, the settings that say what is placed, and the versions of quire, torch and transformers. A file
that is damaged or of something else counts as none: the policies are measured again.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from math import isfinite
from pathlib import Path

import msgspec
import torch
import transformers

from quire.core import Scope
from quire.exchange.hashing import root_digest, tenant_tag
from quire_passages.verdict import PolicyOutcome, Samples, Verdict

_FORM = "quire-verdict-1"


class _KeptCounts(msgspec.Struct, frozen=True):
    num_prompts: int
    samples: dict[str, list[tuple[int, int, float, float]]]
    digest: str


class VerdictMemory:
    """A directory of samples.

    facts  settings that say what is placed, and so what was measured

    A file that cannot be written is not kept.
    """

    def __init__(self, path: str | Path, facts: Sequence[object]) -> None:
        self.path = Path(path)
        versions = version("quire-passages"), torch.__version__, transformers.__version__
        self._facts = _FORM, *versions, *facts

    def recall(self, owner: Scope, name: str = "") -> tuple[int, Samples] | None:
        """Return the prompts that were compared for an owner, and the samples by policy; None: nothing that holds."""
        try:
            kept = msgspec.json.decode(self._file(owner, name).read_bytes(), type=_KeptCounts)
        except (OSError, msgspec.DecodeError):
            return None
        rows = [row for each in kept.samples.values() for row in each]
        if kept.digest != self._digest(owner, name, kept.num_prompts, kept.samples) or not all(
            map(_can_be, rows)
        ):
            return None
        found = {
            policy: [PolicyOutcome(*row) for row in each] for policy, each in kept.samples.items()
        }
        return kept.num_prompts, found

    def keep(self, owner: Scope, verdict: Verdict, name: str = "") -> None:
        """Write the samples of an owner, whole or not at all."""
        samples = {
            policy: [(row.tokens, row.agreed, row.kl, row.work) for row in each]
            for policy, each in verdict.samples.items()
        }
        digest = self._digest(owner, name, verdict.num_prompts, samples)
        file = self._file(owner, name)
        new = file.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(msgspec.json.encode(_KeptCounts(verdict.num_prompts, samples, digest)))
            new.replace(file)

    def forget(self, owner: Scope) -> None:
        """Remove all files of an owner's tenant."""
        shutil.rmtree(self._folder(owner), ignore_errors=True)

    def _folder(self, owner: Scope) -> Path:
        return self.path / tenant_tag(owner).hex()

    def _file(self, owner: Scope, name: str) -> Path:
        return self._folder(owner) / f"{self._named(owner, name)}.json"

    def _named(self, owner: Scope, name: str) -> str:
        return sha256(repr((self._facts, root_digest(owner), name)).encode()).hexdigest()

    def _digest(self, owner: Scope, name: str, num_prompts: int, samples: object) -> str:
        said = msgspec.json.encode((self._named(owner, name), num_prompts, samples))
        return sha256(said).hexdigest()


def _can_be(row: tuple[int, int, float, float]) -> bool:
    tokens, agreed, kl, work = row
    return 0 <= agreed <= tokens and tokens > 0 and isfinite(kl) and kl >= 0 and work >= 0
