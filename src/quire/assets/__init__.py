"""Assets of the package beside its code: small models."""

from pathlib import Path

from quire.errors import ConfigError


def demo_model() -> Path:
    """Return the folder of quire-tiny, a Llama of 3.8 M parameters over bytes, with its tokenizer.

    An ordinary folder of transformers: `AutoModelForCausalLM.from_pretrained(quire.demo_model())`.
    Raises `ConfigError` where it was left out of the installation.
    """
    return _folder("quire-tiny")


def facts_model() -> Path:
    """Return the folder of quire-facts, which answers questions about facts in passages. Raises as `demo_model`."""
    return _folder("quire-facts")


def quotes_model() -> Path:
    """Return the folder of quire-quotes, which continues what stands in a passage. Raises as `demo_model`."""
    return _folder("quire-quotes")


def _folder(name: str) -> Path:
    folder = Path(__file__).parent / name
    if not (folder / "config.json").is_file():
        raise ConfigError(f"the model is missing in {str(folder)!r}; install quire-kv again")
    return folder
