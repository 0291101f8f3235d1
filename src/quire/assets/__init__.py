"""What comes with quire beside its code: a small model."""

from pathlib import Path

from quire.errors import ConfigError


def demo_model() -> Path:
    """Return the folder of quire-tiny, a Llama of 3.8 M parameters over bytes, with its tokenizer.

    An ordinary folder of transformers: `AutoModelForCausalLM.from_pretrained(quire.demo_model())`.
    Raises `ConfigError` where it was left out of the installation.
    """
    folder = Path(__file__).parent / "quire-tiny"
    if not (folder / "config.json").is_file():
        raise ConfigError(f"the model is missing in {str(folder)!r}; install quire-kv again")
    return folder
