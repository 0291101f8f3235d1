"""LoRA adapters beside a model: one at a time is put into it, and it is the plain model otherwise."""

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from quire.engines.models.adapters import BASE_CHILDREN, is_adapted
from quire.errors import ConfigError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_CHANGES_MORE = (
    "alora_invocation_tokens",
    "layer_replication",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
)
"""Settings of PEFT by which an adapter is more than products beside linear layers."""


class _Swap(NamedTuple):
    """A module that an adapter replaces: its parent, its name there, the plain one, and the one around that."""

    parent: Any
    name: str
    plain: Any
    adapted: Any


class LoraAdapters:
    """Adapters of one model by name, each read from the folder that `save_pretrained` of PEFT wrote.

    The model is as it was but within `within`. Raises `ConfigError` for one that does not fit; then the model is as it was.
    """

    def __init__(self, model: Any, folders: Mapping[str, str | Path]) -> None:
        self._model = model
        if folders and any(
            is_adapted(cast("type[object]", type(each))) for each in model.modules()
        ):
            raise ConfigError(
                "the model has an adapter of its own; pass the plain model beside adapters"
            )
        for name, folder in folders.items():
            check_adapter(name, Path(folder))
        self._swaps = {name: self._read(name, Path(folder)) for name, folder in folders.items()}

    @contextmanager
    def within(self, name: str | None) -> Generator[None]:
        """Have an adapter in the model, None for none, within a block of code; nobody else may compute meanwhile."""
        swaps = self._swaps[name] if name is not None else ()
        for each in swaps:
            each.parent._modules[each.name] = each.adapted  # noqa: SLF001 - the register has no other name
        try:
            yield
        finally:
            for each in swaps:
                each.parent._modules[each.name] = each.plain  # noqa: SLF001

    def _read(self, name: str, folder: Path) -> list[_Swap]:
        """Put an adapter into the model, and take it out again."""
        peft: Any = import_module("peft")  # its types are not known

        inner = "quire"  # its name within its layers: PEFT takes no dots
        what = f"the adapter {name!r} at {str(folder)!r} does not fit the model"
        try:
            config: Any = peft.PeftConfig.from_pretrained(str(folder))
            config.inference_mode = True
            weights: Any = peft.load_peft_weights(str(folder), device=str(self._model.device))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what PEFT itself calls
                peft.inject_adapter_in_model(config, self._model, inner)
            found: Any = peft.set_peft_model_state_dict(self._model, weights, inner)
        except Exception as error:
            self._taken_out()
            raise ConfigError(f"{what}: {_first_line(error)}") from error
        swaps = self._taken_out()
        lacking = [each for each in found.missing_keys if "lora_" in each]
        if foreign := [*found.unexpected_keys, *lacking]:
            raise ConfigError(
                f"{what}: it has other layers, as {foreign[0]!r} says; is it of another model?"
            )
        for each in swaps:
            each.adapted.eval().requires_grad_(requires_grad=False)
        return swaps

    def _taken_out(self) -> list[_Swap]:
        """Put the model's own modules back, and return all that had been replaced."""
        swaps: list[_Swap] = []
        for parent in list(self._model.modules()):
            if is_adapted(cast("type[object]", type(parent))):
                continue
            for name, child in parent.named_children():
                if is_adapted(cast("type[object]", type(child))):
                    plain = next(each for at, each in child.named_children() if at in BASE_CHILDREN)
                    swaps.append(_Swap(parent, name, plain, child))
        for each in swaps:
            each.parent._modules[each.name] = each.plain  # noqa: SLF001
        if hasattr(self._model, "peft_config"):  # which PEFT leaves there
            del self._model.peft_config
        return swaps


class _LoraSettings(msgspec.Struct):
    """The settings of PEFT that are looked at here."""

    peft_type: str = ""
    r: int = 8
    bias: str = "none"
    rank_pattern: dict[str, int] = {}


def check_adapter(name: str, folder: Path) -> None:
    """Raise `ConfigError` unless a folder has an adapter that may be served, as far as is seen without the model."""
    safetensors: Any = import_module("safetensors")  # its types are not known

    what = f"the adapter {name!r} at {str(folder)!r}"
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise ConfigError(
                f"{what} has no {file}; pass the folder that save_pretrained of PEFT wrote"
            )
    every: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    try:
        text = (folder / CONFIG).read_bytes()
        settings, every = msgspec.json.decode(text, type=_LoraSettings), msgspec.json.decode(text)
        with safetensors.safe_open(folder / WEIGHTS, framework="pt") as file:
            shapes = {each: tuple(file.get_slice(each).get_shape()) for each in list(file.keys())}
    except (OSError, msgspec.MsgspecError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{what} cannot be read: {_first_line(error)}") from error
    if settings.peft_type != "LORA":
        raise ConfigError(f"{what} is of the type {settings.peft_type!r}; only LORA is served")
    if settings.bias != "none":
        raise ConfigError(
            f"{what} has bias={settings.bias!r}, which changes the model's own; train it with none"
        )
    for field in _CHANGES_MORE:
        if every.get(field):
            raise ConfigError(
                f"{what} has {field}, which is not served; train it without, or merge it into a model"
            )
    for key, shape in shapes.items():
        rank = (
            shape[0]
            if key.endswith("lora_A.weight")
            else shape[-1]
            if key.endswith("lora_B.weight")
            else None
        )
        if rank not in (None, settings.r, *settings.rank_pattern.values()):
            raise ConfigError(
                f"{what} has r={settings.r}, but {key} has rank {rank}; its files are of two adapters"
            )
    if not any("lora_" in key for key in shapes):
        raise ConfigError(f"{what} has no weights of LoRA in {WEIGHTS}")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:300] or type(error).__name__
