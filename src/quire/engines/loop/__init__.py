"""quire's own engine: many requests at once, each shared prefix computed and read once.

attention  over the block tables of a whole step

Needs the extra `hf`.
"""
