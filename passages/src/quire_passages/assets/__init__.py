"""Small models that are made for questions about passages."""

from pathlib import Path

from quire.assets import model_folder


def facts_model() -> Path:
    """Return the folder of quire-facts, which answers questions about facts in passages. Raises as `quire.demo_model`."""
    return model_folder(Path(__file__).parent, "quire-facts")


def quotes_model() -> Path:
    """Return the folder of quire-quotes, which continues what stands in a passage. Raises as `quire.demo_model`."""
    return model_folder(Path(__file__).parent, "quire-quotes")
