"""The rows of many requests in one forward of an unchanged model of transformers, K and V in pools by block tables.

model      PackedModel: one forward over packed rows
attention  over the block tables of a whole step
decoder    a plain decoder in `passes` of compiled code: `products`, `norms`, attention; on a GPU as `graphs`
proof      packed rows against plain ones, before a model serves
bound      a proven model, and what scopes are bound to

It knows neither requests nor steps: `engines.loop` says which rows. Needs the extra `hf`.
"""

# Before the rest: it sees their sources as they are imported.
from quire.engines.packed import kept as kept
