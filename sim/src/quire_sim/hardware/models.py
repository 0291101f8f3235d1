"""Published models, each as the keys of its config.json that sizes depend on: `models.json`.

Source: the `config.json` in each model's repository on the Hugging Face hub, by the name under
"hub"; everything else is derived from it. Qwen3.5 and Nemotron count the language model alone,
without vision towers and multi-token prediction layers.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from quire_sim.hardware.config import model_facts
from quire_sim.hardware.facts import ModelFacts
from quire_sim.names import plain, unknown

_ENDINGS = (
    "-instruct", "-it", "-base", "-chat", "-hf", "-thinking", "-fp8", "-bf16", "-fp8-dynamic",
    "-2501", "-2507", "-v0.1", "-v0.2", "-v0.3", "-awq", "-gptq", "-int4", "-gptq-int4", "-w4a16",
)  # fmt: skip
_OTHER_NAMES = {
    "llama-3-8b-instruct": "llama-3-8b",
    "nemotron-3-super-120b-a12b": "nemotron-3-super-120b",
    "nvidia-nemotron-3-super-120b-a12b": "nemotron-3-super-120b",
    "deepseek-v3.1": "deepseek-v3",
    "deepseek-v3-0324": "deepseek-v3",
    "kimi-k2-instruct-0905": "kimi-k2",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-70b": "llama-3.3-70b",
    "deepseek-r1-distill-qwen-14b": "qwen2.5-14b",
    "deepseek-r1-distill-qwen-32b": "qwen2.5-32b",
    "tiny": "quire-tiny",
}


def model_named(name: str) -> ModelFacts:
    """Return a published model, or the one whose config.json (or its folder) is at this path.

    Case, vendor and endings such as `-Instruct` do not matter. Raises `ConfigError`, for an
    unknown name with those that resemble it.
    """
    path = Path(name).expanduser()
    if path.suffix == ".json" or (path / "config.json").is_file():
        return model_facts(path)
    wanted = plain(name).removeprefix("meta-")
    while wanted not in published():
        other = _OTHER_NAMES.get(wanted) or next(
            (wanted.removesuffix(end) for end in _ENDINGS if wanted.endswith(end)), None
        )
        if not other:
            raise unknown("model", name, sorted(published()), "pass the path of its config.json")
        wanted = other
    return _facts(wanted)


@cache
def published() -> dict[str, dict[str, Any]]:
    """Return the models that are known, by name: "hub", where each was published, and "config"."""
    return json.loads(Path(__file__).with_name("models.json").read_text("utf-8"))


@cache
def _facts(name: str) -> ModelFacts:
    return model_facts(published()[name]["config"], name)
