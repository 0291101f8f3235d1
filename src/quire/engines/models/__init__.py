"""A model of transformers: its identity, the proof that its KV can be reused, and the caches it computes with.

supported         the models that are supported, and the attributes that pipelines ask of one
probe             a forward that finds which KV and states a model keeps
twin              the config of a tiny model of the same architecture
battery           requests to such a twin, with quire and without
distance          distances of tensors that are equal but for rounding
identity          the name of a model's present state, part of the key of its KV
inventory         Inventory: all tensors and settings that KV is computed from; `inventory_entries`, `tensor_stamps`
setting_names     texts of settings, equal for equal settings
adapters          adapters of PEFT around a model's layers
folded            tensors that consist of others: quantized, sparse
compiled          code that `torch.compile` has wrapped
quantized         quantization of a model, and what it rounds
weights           the identity of weights in files
working_cache     WorkingCache: the transformers `Cache` that a model computes with
layers, states    its layers: K and V, recurrent states
column_tokens     the token behind each of its columns
interception      the inputs of a model's forward, seen by a stand-in or in sessions at the model itself
cache_factory     working caches of a model: empty, or of rows that were computed one by one
"""
