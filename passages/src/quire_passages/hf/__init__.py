"""The KV of passages, reused wherever they stand, over models of transformers.

capture      K and V of passages: taken out of working caches, and put into others
shadow       a model whose decoder layers are called through another
attention    attention of rows, none over columns behind it
rows         a forward of chosen rows over K and V that are there
runs         plain forwards, of tokens at any position; isolated and contextual captures
gate         whether a model's keys can be rotated to another position
relocation   what the gate has found
weighing     attention masses of passages
blending     a working cache filled by a plan
beside       answers behind reused passages beside those of a full forward
audit        the comparison of policies on one prompt, in pieces of work
model        PassageModel: all of it over a bare model
holder       variants, the gate, verdicts, and the tier below, of a cache or an engine
passages     passages of a PrefixCache: captured, kept, and placed
warm         passages in a tier, in eight bits
remembered   what the gate has found, from one process to the next
"""

from quire_passages.hf.model import Blended, PassageModel
from quire_passages.hf.relocation import Relocation

__all__ = ["Blended", "PassageModel", "Relocation"]
