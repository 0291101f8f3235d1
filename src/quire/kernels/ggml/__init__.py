"""Attention for llama.cpp on a CPU, in C++: `quire gguf build` compiles it."""

from pathlib import Path

SOURCES = tuple(Path(__file__).with_name(each) for each in ("backend.cpp", "attention.hpp"))
"""The source files: the one that is compiled, then the one that it includes."""
