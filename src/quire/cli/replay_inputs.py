"""The inputs of `quire replay`: capacities, policies, a model, a trace."""

import re
import shlex
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from quire.config import format_bytes, parse_bytes
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.sim.hardware import ModelFacts, Roofline
    from quire.sim.service import Service
    from quire.sim.trace.rows import Trace

_AMOUNT = re.compile(r"(?P<number>[0-9]{1,18}(?:[.][0-9]{1,18})?)\s*(?P<unit>[A-Za-z]*|%)")

DEFAULT_CAPACITIES = ("1%", "5%", "10%", "25%", "50%")

HOW = "a capacity is a share like 10%, bytes like 64GiB, or a number of blocks like 18279"


class Asked(NamedTuple):
    """A command line: options with their values, None or False where one was left out."""

    trace: Path
    options: Mapping[str, Any]

    def command(self, **instead: Any) -> str:
        """Return the command line, with some options (underscores for dashes) replaced."""
        options = dict(self.options)
        options |= {f"--{name.replace('_', '-')}": value for name, value in instead.items()}
        words = ["quire", "replay", str(self.trace)]
        for option, value in options.items():
            if value is True:
                words.append(option)
            several = cast("list[Any]", value) if isinstance(value, list) else [value]
            for each in several:
                if each is not None and not isinstance(each, bool):
                    words += option, str(each)
        return shlex.join(words)

    def without_folders(self) -> "Asked":
        """Return the same with files by their names alone: for what is shown to others."""
        options = dict(self.options)
        for name in ("--model", "--gpu", "--report"):
            if options.get(name) and "/" in str(options[name]):
                options[name] = Path(str(options[name])).name
        return Asked(Path(self.trace.name), options)


def names(text: str) -> list[str]:
    """Return the words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def opened(path: Path, block_size: int | None) -> "Trace":
    """Open a trace, in blocks of another size if one is given."""
    from quire.sim.trace import open_trace, with_block_size

    trace = open_trace(path)
    return trace if block_size is None else with_block_size(trace, block_size)


def policies_of(text: str | None) -> list[str]:
    """Return the policies asked for, each once; without any, those worth a first look."""
    from quire.sim.optimum import OPTIMUM
    from quire.sim.sweep import check_policy

    if text is None:
        return ["lru", "learned", OPTIMUM]
    found = list(dict.fromkeys(names(text)))
    if not found:
        raise ConfigError(f"--policies names no policy, got {text!r}; for example lru,optimum")
    for name in found:
        check_policy(name)
    return found


def load_model(model: str | None, gpu: str | None, default_gpu: str) -> "Roofline | None":
    """Return the roofline of a known model, or of a config.json; None without a model."""
    if model is None:
        if gpu is not None:
            raise ConfigError(f"--gpu {gpu} says nothing without --model; add it, or leave it out")
        return None
    from quire.sim.hardware import Roofline, accelerator_named, model_named

    return Roofline(model_named(model), accelerator_named(gpu or default_gpu))


def service_of(
    rates: tuple[float | None, float | None], roofline: "Roofline | None", *, concurrent: bool
) -> "Service | None":
    """Return the durations of requests: as recorded, else by the rates given, else on the roofline."""
    from quire.sim.service import DECODE_RATE, PREFILL_RATE, AsRecorded, OnRoofline, Rates

    prefill, decode = rates
    given = prefill is not None or decode is not None
    if not concurrent:
        if given:
            raise ConfigError("--prefill-rate and --decode-rate say nothing without --concurrent")
        return None
    if roofline is not None and not given:
        return AsRecorded(OnRoofline(roofline))
    return AsRecorded(
        Rates(
            PREFILL_RATE if prefill is None else prefill, DECODE_RATE if decode is None else decode
        )
    )


def capacities_in_blocks(
    texts: Iterable[str], num_unique: int, block_size: int, model: "ModelFacts | None"
) -> list[int]:
    """Return capacities in blocks, each once, in the order given. Raises `ConfigError`.

    A share is of the different blocks of the trace; shares and bytes are rounded down.
    """
    from quire.sim.replay import check_capacity

    words = [word for text in texts for word in names(text)]
    if not words:
        raise ConfigError(f"--capacity is empty: {HOW}")
    found = (_capacity(word, num_unique, block_size, model) for word in words)
    return list(dict.fromkeys(check_capacity(blocks) for blocks in found))


def default_capacities(num_unique: int) -> list[str]:
    """Return the shares to look at first: those of the usual ones that are a block at least."""
    shares = [share for share in DEFAULT_CAPACITIES if int(share[:-1]) * num_unique >= 100]
    return shares or ["1"]


def _capacity(text: str, num_unique: int, block_size: int, model: "ModelFacts | None") -> int:
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise ConfigError(f"--capacity {text[:40]!r} is none: {HOW}")
    number, unit = match["number"], match["unit"]
    if unit not in ("", "%"):
        return _in_bytes(text, block_size, model)
    if unit:
        blocks = int(Fraction(number) * num_unique / 100)
    elif "." not in number:
        blocks = int(number)
    else:
        raise ConfigError(f"--capacity {text} is no whole number of blocks: {HOW}")
    if blocks < 1:
        what = f", of {num_unique:,} different blocks," if unit else ""
        raise ConfigError(f"--capacity {text}{what} is less than one block: {HOW}")
    return blocks


def _in_bytes(text: str, block_size: int, model: "ModelFacts | None") -> int:
    num_bytes = parse_bytes(text)
    if model is None:
        raise ConfigError(
            f"--capacity {text} needs --model, which says how many bytes a token takes; or give "
            "a share like 10%, or a number of blocks"
        )
    block_bytes = model.kv.per_token * block_size
    if not block_bytes:
        raise ConfigError(
            f"--capacity {text}: {model.name} stores nothing per token; give a share or blocks"
        )
    if num_bytes < block_bytes:
        raise ConfigError(
            f"--capacity {text} is less than one block: {block_size} tokens of {model.name} take "
            f"{format_bytes(block_bytes)}"
        )
    return num_bytes // block_bytes
