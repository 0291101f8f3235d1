"""Assets of the package beside its code: small models."""

from pathlib import Path

from quire.errors import ConfigError


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
