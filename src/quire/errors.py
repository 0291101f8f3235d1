"""Everything quire raises, as one tree.

    QuireError
    ├── ConfigError (ValueError)      a setting that cannot work
    ├── TokensError (ValueError)      token ids of a wrong type, shape or range; an empty prompt
    ├── MediaError (ValueError)       media items outside the prompt, out of order, overlapping
    ├── ScopeError (TypeError)        a scope that is not a Scope
    ├── TraceError (ValueError)       a file that is no trace, or a row of one that cannot be
    ├── SequenceError                 an unknown, closed, suspended or foreign sequence
    │   ├── CommitError               more tokens than reserved, or other tokens than the prompt's
    │   ├── TruncateError             beyond what is there, or into a block that others read
    │   ├── CopyError                 a commit into blocks that a copy waits for, or a move of such blocks
    │   └── CheckpointError           a state to keep where no block ends or nothing was computed
    ├── PinError                      a pin closed twice
    ├── OutOfBlocks                   the pool cannot give what was asked, even after eviction
    │   └── PinBudgetExceeded         pins would hold more than their share
    ├── SlotError                     an unknown or busy slot; a handle that is closed or foreign
    │   └── StaleSlot                 a slot whose content is not what it was
    ├── OutOfSlots                    every slot is busy or pinned
    ├── RecordError (ValueError)      bytes that are no record, or not the one they should be
    ├── TierError                     a tier that cannot be opened, or failed
    │   └── TierBusy                  a directory that another process has open
    ├── DeadlinePassed                a job that was not finished in its time
    ├── QueueTimeout                  a job that had not begun when its wait was over
    ├── RequestFailed                 a request whose step the model could not compute
    │   └── TenantPurged              a request whose tenant was purged
    ├── CacheBusy                     a cache that another thread is using
    ├── UnsupportedModel              a model with layers that cannot be cached exactly
    │   └── NotRelocatable            a model whose keys cannot be rotated to another position
    └── InvariantError                a broken invariant: a bug in quire, never in the caller
        └── Interrupted               a call before was cut off half-way, by Ctrl-C for instance

Each message says what was wrong, the value, the limit, and what to do. An operation that
raises leaves all state as it was; only after `InvariantError` there is no such promise, and the
cache that raised it takes no further call but `reset`.
"""


class QuireError(Exception):
    """Base of all errors that quire raises."""


class ConfigError(QuireError, ValueError):
    """A setting that cannot work."""


class TokensError(QuireError, ValueError):
    """Token ids of a wrong type, shape or range, or an empty prompt."""


class MediaError(QuireError, ValueError):
    """Media items outside the prompt, out of order or overlapping."""


class ScopeError(QuireError, TypeError):
    """A scope that is not a `Scope`, or one with parts of a wrong type."""


class TraceError(QuireError, ValueError):
    """A file that is no trace, or a row that cannot be; the message says which row."""


class SequenceError(QuireError):
    """An operation on an unknown, closed, suspended or foreign sequence."""


class CommitError(SequenceError):
    """A commit of more tokens than reserved, or of other tokens than the prompt's."""


class TruncateError(SequenceError):
    """A truncation beyond what is there, or into a published block that others read."""


class CopyError(SequenceError):
    """A commit into, or a move of, blocks that are being copied.

    A planned copy waits, or a restore or hold is open.
    """


class CheckpointError(SequenceError):
    """A state to keep at a length that is no block boundary, or was not computed."""


class PinError(QuireError):
    """A pin that was closed twice."""


class OutOfBlocks(QuireError):  # noqa: N818 - the field's name for it
    """The pool cannot give the blocks asked for, even after evicting all it may.

    Attributes: `group`, the name of the layer group that fell short, and `needed`, `free`, `cached`,
    `active`, blocks of that group.
    """

    def __init__(
        self, message: str, *, group: str, needed: int, free: int, cached: int, active: int
    ) -> None:
        super().__init__(message)
        self.group = group
        self.needed = needed
        self.free = free
        self.cached = cached
        self.active = active


class PinBudgetExceeded(OutOfBlocks):
    """A pin that would hold more blocks than the budget for pins allows."""


class SlotError(QuireError):
    """An unknown or busy slot, or a handle that is closed or another cache's."""


class StaleSlot(SlotError):  # noqa: N818 - reads as what it says
    """A slot whose content was overwritten or cut since its generation was read."""


class OutOfSlots(QuireError):  # noqa: N818 - as OutOfBlocks
    """No slot can be given away: all are busy or pinned.

    Attributes: `num_slots`, `busy` (held by requests), `pinned` (free, but kept by pins).
    """

    def __init__(self, message: str, *, num_slots: int, busy: int, pinned: int) -> None:
        super().__init__(message)
        self.num_slots = num_slots
        self.busy = busy
        self.pinned = pinned


class RecordError(QuireError, ValueError):
    """Bytes that are no record, or not the one they should be.

    Attribute: `is_foreign`, whether it may be a good record of another version or size.
    """

    def __init__(self, message: str, *, is_foreign: bool = False) -> None:
        super().__init__(message)
        self.is_foreign = is_foreign


class TierError(QuireError):
    """A tier that cannot be opened, or that failed. Requests never see it: they see a miss."""


class TierBusy(TierError):  # noqa: N818 - as OutOfBlocks
    """A directory that another process has open for writing."""


class DeadlinePassed(QuireError):  # noqa: N818 - as OutOfBlocks
    """A job that was given up: its deadline came before its end."""


class QueueTimeout(QuireError):  # noqa: N818 - as OutOfBlocks
    """A job that was given up: it had waited for its longest and had not begun."""


class RequestFailed(QuireError):  # noqa: N818 - as OutOfBlocks
    """A request that ended because a step of it could not be computed."""


class TenantPurged(RequestFailed):
    """A request that ended because its tenant was purged."""


class CacheBusy(QuireError):  # noqa: N818 - as TierBusy
    """A cache that another thread is using."""


class UnsupportedModel(QuireError):  # noqa: N818 - reads as what it says
    """A model with layers that quire cannot cache exactly yet."""


class NotRelocatable(UnsupportedModel):
    """A model whose K and V of a passage cannot be moved to another position."""


class InvariantError(QuireError):
    """A broken invariant: a bug in quire."""


class Interrupted(InvariantError):  # noqa: N818 - what became of the cache
    """A use of a cache of which a call was cut off half-way; only `reset` is left."""
