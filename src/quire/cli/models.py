"""Models and tokenizers, from a folder or the hub."""

import io
import re
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

from quire.assets import demo_model
from quire.cli.assistant import ASSISTANT, assistant_model
from quire.errors import ConfigError
from quire.extras import require
from quire.plugins import load_offered, names_offered

TINY = "quire-tiny"
GROUP = "quire.models"
"""The entry points by which packages offer small models of their own, by name."""
HUB_TIMEOUT_S = 5
GGUF = ".gguf"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.ASCII)


def load(
    name: str = TINY,
    dtype: str = "float32",
    *,
    images: bool = False,
    lora: Path | None = None,
) -> tuple[Any, Any]:
    """Return model and tokenizer by a name of quire's own, from a folder, a GGUF file or the hub.

    The model is in eval mode, on a CUDA device when there is one. `dtype` is a name that
    transformers knows: "float32", "bfloat16", "auto"; the weights of a GGUF file are unpacked to
    it.
    With `images`, a model that reads them and its processor are returned. `lora` is the folder of
    a PEFT adapter, which is active then. Raises `ConfigError`.
    """
    check_installed()
    if lora is not None:
        _check_adapter(lora)
    source = source_of(name)
    import torch
    import transformers

    hush()
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ConfigError(f"{dtype!r} is not a dtype; use float32, bfloat16, float16 or auto")
    kinds = ("AutoProcessor", "AutoModelForImageTextToText") if images else (
        "AutoTokenizer", "AutoModelForCausalLM")  # fmt: skip
    readers, models = (getattr(transformers, kind) for kind in kinds)
    local = isinstance(source, Path) or not _hub_answers()
    place, more = source, {}
    if isinstance(source, Path) and source.suffix == GGUF:
        _check_whole(source)
        if images:
            raise ConfigError(f"{name!r} is a GGUF file, and images are not read with one; leave "
                              "--image out, or pass the folder of a vision model")  # fmt: skip
        require("gguf", "a GGUF file")
        place, more = source.parent, {"gguf_file": source.name}
    bars = redirect_stderr(io.StringIO()) if more else nullcontext()
    try:
        with bars:
            reader = readers.from_pretrained(place, local_files_only=local, **more)
            model = models.from_pretrained(place, local_files_only=local, dtype=dtype, **more)
    except Exception as error:
        raise ConfigError(_why_not(name, source, error)) from error
    if images and not hasattr(reader, "image_processor"):
        raise ConfigError(f"{name!r} reads no images; leave --image out, or pass a vision model")
    if lora is not None:
        try:
            model.load_adapter(str(lora), adapter_name=re.sub(r"\W", "_", lora.resolve().name))
        except Exception as error:
            raise ConfigError(
                f"the adapter {str(lora)!r} does not fit the model: {_reason(error)}"
            ) from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval(), reader


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a model, with its chat template, from what `load` takes. Raises `ConfigError`."""
    check_installed()
    source = source_of(name)
    import transformers

    hush()
    place, more = source, {}
    if isinstance(source, Path) and source.suffix == GGUF:
        require("gguf", "a GGUF file")
        place, more = source.parent, {"gguf_file": source.name}
    reader: Any = transformers.AutoTokenizer
    try:
        with redirect_stderr(io.StringIO()):
            return reader.from_pretrained(
                place, local_files_only=isinstance(source, Path) or not _hub_answers(), **more
            )
    except Exception as error:
        raise ConfigError(f"the tokenizer of {name!r} cannot be read: {_reason(error)}") from error


def load_engine_model(name: str, dtype: str, gguf: Sequence[str]) -> tuple[Any, Any, str]:
    """Return model and tokenizer for an `Engine`, and what computes a GGUF file, empty for other models.

    With the dtype "auto", llama.cpp computes a GGUF file as it is, where its library is there; `gguf` are settings of
    `GgufModel`, NAME=VALUE. Raises `ConfigError`.
    """
    check_installed()
    source, settings = source_of(name), _gguf_settings(gguf)
    is_gguf = isinstance(source, Path) and source.suffix == GGUF
    if settings and not (is_gguf and dtype == "auto"):
        raise ConfigError(
            f"--gguf is for a GGUF file with --dtype auto, and --model is {name!r}; leave it out"
        )
    if not is_gguf or dtype != "auto":
        return *load(name, dtype), ""
    from quire.engines.gguf.library import missing

    if (lacks := missing()) is not None:
        if settings:
            raise ConfigError(lacks)
        return *load(name, dtype), f"transformers, its weights unpacked; {lacks}"
    require("gguf", "a GGUF file")
    from quire.engines.gguf import GgufModel

    hush()
    model = GgufModel(source, **settings)
    try:
        with redirect_stderr(io.StringIO()):
            return model, model.tokenizer(), model.about
    except Exception as error:
        raise ConfigError(f"the tokenizer of {name!r} cannot be read: {_reason(error)}") from error


def _gguf_settings(given: Sequence[str]) -> dict[str, Any]:
    """Return settings of `GgufModel` from lines NAME=VALUE. Raises `ConfigError`."""
    found: dict[str, Any] = {}
    for each in given:
        name, is_there, value = each.partition("=")
        if not (name and is_there and value) or name in found:
            raise ConfigError(f"--gguf is NAME=VALUE, each name once, got {each!r}")
        found[name] = int(value) if re.fullmatch(r"-?\d+", value, re.ASCII) else value
    return found


def adapters_of(given: Sequence[str], names: Sequence[str]) -> dict[str, Path]:
    """Return the folders of adapters by their names, beside those of the model. Raises `ConfigError`."""
    found: dict[str, Path] = {}
    for each in given:
        name, is_there, folder = each.partition("=")
        if not (name and is_there and folder):
            raise ConfigError(f"--lora is NAME=FOLDER, got {each!r}")
        if name in found or name in names:
            raise ConfigError(f"--lora {each}: {name!r} is a name already; give each its own")
        found[name] = Path(folder).expanduser().resolve()
    if found:
        from quire.engines.models.lora import check_adapter  # imports torch

        for name, folder in found.items():
            check_adapter(name, folder)
    return found


def check_installed() -> None:
    """Raise `ConfigError` unless all is there that a model needs."""
    require("hf", "running a model")


def _check_adapter(folder: Path) -> None:
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{str(folder)!r} has no adapter_config.json; pass the folder that save_pretrained of "
            "a PEFT adapter wrote"
        )
    require("hf", "an adapter")


def hush() -> None:
    """Keep transformers from writing warnings and bars between the command's own lines."""
    import huggingface_hub
    import transformers

    huggingface_hub.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def source_of(name: str) -> str | Path:
    """Return the source of a model: a folder or a GGUF file that exists, or a hub id."""
    if name == TINY:
        return demo_model()
    if name == ASSISTANT:
        return assistant_model()
    if (folder := load_offered(GROUP, name)) is not None:
        return folder()
    path = Path(name).expanduser()
    if path.is_dir():
        return path if (path / "config.json").is_file() else _only_gguf(name, path)
    if path.exists():
        if path.suffix != GGUF:
            raise ConfigError(f"{name!r} is a file; pass the folder that save_pretrained wrote, or "
                              f"a file whose name ends with {GGUF}")  # fmt: skip
        return path
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise ConfigError(
            f"there is no file or folder {name!r}; pass a local folder, a GGUF file or a hub id"
        )
    return name


def name_of(model: str) -> str:
    """Return the name to serve a model under: the end of a path without `.gguf`, else the name itself."""
    path = Path(model).expanduser()
    if model in {TINY, ASSISTANT, *names_offered(GROUP)} or not path.exists():
        return model
    return _PART.sub("", path.resolve().name).removesuffix(GGUF)


def _only_gguf(name: str, folder: Path) -> Path:
    """Return the one GGUF file of a folder, or its first part; that of an image encoder (`mmproj`) is none."""
    files = [each for each in sorted(folder.glob(f"*{GGUF}")) if "mmproj" not in each.name]
    if not files:
        raise ConfigError(f"{name!r} is a folder without config.json or a GGUF file, so no model; "
                          "pass the folder that save_pretrained wrote")  # fmt: skip
    if len({_PART.sub("", each.name) for each in files}) > 1:
        names = ", ".join(each.name for each in files)
        raise ConfigError(f"{name!r} has {len(files)} GGUF files and no config.json; pass one of "
                          f"them: {names}")  # fmt: skip
    return files[0]


def _check_whole(file: Path) -> None:
    """Raise `ConfigError` for a GGUF file that is one of several parts."""
    if part := _PART.search(file.name):
        raise ConfigError(f"{file.name!r} is one of {int(part[1])} parts, and transformers reads one "
                          "file; join them first: llama-gguf-split --merge FIRST_PART WHOLE")  # fmt: skip


def _hub_answers() -> bool:
    """Ask the hub once, for seconds; transformers would try for a minute. It may still be cached."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    session: Any = get_session()
    try:
        session.head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except Exception:  # noqa: BLE001 - the session's library differs between hub versions
        return False
    return True


def _why_not(name: str, source: str | Path, error: Exception) -> str:
    reason = _reason(error)
    if isinstance(source, Path):
        return f"{name!r} cannot be loaded: {reason}"
    return (
        f"{name!r} is no local folder, and the hub did not give it; pass a local folder, or leave "
        f"--model out for {TINY}. transformers says: {reason}"
    )


def _reason(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
