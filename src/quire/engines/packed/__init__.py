"""The rows of many requests in one forward of an unchanged model, with KV in paged pools.

model           PackedModel: one forward over packed rows
decoder         a plain decoder in few passes of `quire.kernels`, `decoder_passes`; on a GPU as `graphs`
proof           packed rows against plain ones, before a model serves
bound_model     a proven model, and the scopes that are bound to it

The model is one of transformers. The package knows neither requests nor steps: `engines.loop` chooses the rows.
Needs the extra `hf`.
"""
