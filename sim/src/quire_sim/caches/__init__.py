"""Caches of servers and providers: what each request of a log would find in them, and why not more."""

from quire_sim.caches.asking import ADVICE, REASONS, CacheHit, ServerCache, hits
from quire_sim.caches.exact import ExactTokens
from quire_sim.caches.opening import SERVERS, CacheOptions, cache_of
from quire_sim.caches.pieces import TextPieces, cache_prompt
from quire_sim.caches.predicting import (
    DIFFERENCES,
    CacheReport,
    Prediction,
    cache_report,
    predictions,
)
from quire_sim.caches.prompts import CachePrompt, PromptPart
from quire_sim.caches.rules import CacheRules, ProviderRules, read_rules

__all__ = [
    "ADVICE",
    "DIFFERENCES",
    "REASONS",
    "SERVERS",
    "CacheHit",
    "CacheOptions",
    "CachePrompt",
    "CacheReport",
    "CacheRules",
    "ExactTokens",
    "Prediction",
    "PromptPart",
    "ProviderRules",
    "ServerCache",
    "TextPieces",
    "cache_of",
    "cache_prompt",
    "cache_report",
    "hits",
    "predictions",
    "read_rules",
]
