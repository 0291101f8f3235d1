"""Requests of a log as token ids: by a model's tokenizer and chat template, as `quire serve` reads them."""

from quire_sim.rendering.pieces import PieceTokenizer
from quire_sim.rendering.prompts import PromptRenderer

__all__ = ["PieceTokenizer", "PromptRenderer"]
