"""Assets of the package beside its code: small models, and rules of providers' caches."""

import tomllib
from pathlib import Path

from quire.errors import ConfigError

CACHE_RULES = Path(__file__).with_name("cache_rules.toml")
"""Rules of providers' prompt caches, with sources and dates; the head of the file says what each means."""


def cache_ttls(provider: str) -> dict[str, int]:
    """Return the TTLs that a provider's requests name, in seconds."""
    return tomllib.loads(CACHE_RULES.read_text("utf-8"))[provider]["ttls"]


def demo_model() -> Path:
    """Return the folder of quire-tiny, a Llama of 3.8 M parameters over bytes, with its tokenizer.

    An ordinary folder of transformers: `AutoModelForCausalLM.from_pretrained(quire.demo_model())`.
    Raises `ConfigError` where it was left out of the installation.
    """
    return model_folder(Path(__file__).parent, "quire-tiny")


def model_folder(place: Path, name: str) -> Path:
    """Return the folder of a model beside the code. Raises `ConfigError` where it was left out."""
    folder = place / name
    if not (folder / "config.json").is_file():
        raise ConfigError(f"the model is missing in {str(folder)!r}; install the package again")
    return folder
