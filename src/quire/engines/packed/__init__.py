"""The rows of many requests in one forward of an unchanged model, with KV in paged pools.

model      PackedModel: one forward over packed rows
attention  over the block tables of a whole step
decoder    a plain decoder in `passes` of compiled code: `products`, `norms`, attention; on a GPU as `graphs`
proof      packed rows against plain ones, before a model serves
bound      a proven model, and what scopes are bound to

The model is one of transformers. The package knows neither requests nor steps: `engines.loop` chooses the rows.
Needs the extra `hf`.
"""

# Before the rest: it sees their sources as they are imported.
from quire.engines.packed import kept as kept
