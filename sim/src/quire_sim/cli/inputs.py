"""The words of commands: numbers, capacities, policies, models, traces, and the command line itself."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from quire.cli.options import names
from quire.cli.output import stderr
from quire.config import format_bytes, parse_bytes
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire_sim.concurrent import Service
    from quire_sim.hardware import ModelFacts, Roofline
    from quire_sim.trace.rows import ReportingTrace, Trace, TraceRequest

_AMOUNT = re.compile(r"(?P<number>[0-9]{1,10}(?:[.][0-9]{1,15})?)\s*(?P<percent>%?)")

DEFAULT_CAPACITIES = ("1%", "5%", "10%", "25%", "50%")

AMOUNT = "it is a whole number like 4096 or a share like 10%"
HOW = "a capacity is a share like 10%, bytes like 64GiB, or a number of blocks like 18279"


UNTOLD = ("--jobs", "--executor", "--csv", "--json")
"""Options of `quire replay` that change nothing of what it computes."""


class Asked(NamedTuple):
    """A command line of `quire replay`: the options that were given, with their values."""

    trace: Path
    options: Mapping[str, list[str]]
    """The values of each option; a flag has none."""

    @classmethod
    def of(cls, trace: Path, context: Any) -> "Asked":
        """Return the command line of a call of typer's."""
        options: dict[str, list[str]] = {}
        for option in context.command.params:
            name, value = option.opts[0], context.params[option.name]
            given = context.get_parameter_source(option.name).name == "COMMANDLINE"
            if given and name.startswith("--") and name not in UNTOLD:
                values = cast("list[Any]", value if isinstance(value, list) else [value])
                options[name] = [str(each) for each in values if each is not True]
        return cls(trace, options)

    def command(self, **instead: Any) -> str:
        """Return the command line, with some options replaced."""
        words = ["quire", "replay", str(self.trace)]
        others = {f"--{name}": [str(value)] for name, value in instead.items()}
        for option, values in {**self.options, **others}.items():
            words += [word for value in values for word in (option, value)] or [option]
        return shlex.join(words)

    def without_folders(self) -> "Asked":
        """Return the same with files by their names alone: for what is shown to others."""
        files = {
            name: [Path(value).name if "/" in value else value for value in self.options[name]]
            for name in ("--model", "--gpu", "--report")
            if name in self.options
        }
        return Asked(Path(self.trace.name), {**self.options, **files})


class ToldTrace:
    """A trace that prints the notes of its first whole pass on standard error."""

    def __init__(self, trace: "ReportingTrace") -> None:
        self.source, self.format, self.block_size = trace.source, trace.format, trace.block_size
        self._trace = trace
        self._is_told = False

    def __iter__(self) -> "Iterator[TraceRequest]":
        from quire_sim.trace import Findings

        report = Findings()
        yield from self._trace.read(report)
        if not self._is_told:
            self._is_told = True
            for note in report.notes:
                stderr().print(f"{Path(self.source).name}: {note}", markup=False, highlight=False)


def opened(path: Path, block_size: int | None, *, hits: bool = True) -> "Trace":
    """Open a trace, in blocks of another size if one is given.

    Raises `ConfigError` where hits are asked for and the trace names no blocks.
    """
    from quire_sim.trace import open_trace, with_block_size

    read = open_trace(path)
    if hits:
        check_names_blocks(read)
    trace = ToldTrace(read)
    return trace if block_size is None else with_block_size(trace, block_size)


def check_names_blocks(trace: "ReportingTrace") -> None:
    """Raise `ConfigError` for a trace of lengths and times, in which nothing is found again."""
    if not trace.names_blocks:
        raise ConfigError(
            f"{trace.source} has lengths and times, and does not say which prompts are alike, so no hits "
            "are found; quire simulate --trace plays it, and quire trace make makes traces with reuse"
        )


def amount(text: str, whole: int, option: str, how: str = AMOUNT) -> int:
    """Read a number, or a share of `whole`, rounded down. Raises `ConfigError`, which names the option."""
    match = _AMOUNT.fullmatch(text)
    if match is None or ("." in match["number"] and not match["percent"]):
        raise ConfigError(f"{option} {text[:40]!r} is none: {how}")
    return int(Fraction(match["number"]) * (Fraction(whole, 100) if match["percent"] else 1))


def blocks_that_hold(text: str, block_size: int, model: "ModelFacts", option: str) -> int:
    """Return the blocks for which bytes like 64GiB have room. Raises `ConfigError` for less than one."""
    block_bytes = model.kv.per_token * block_size
    if not block_bytes:
        raise ConfigError(
            f"{option} {text}: {model.name} stores nothing per token, so bytes are no limit"
        )
    num_blocks = parse_bytes(text) // block_bytes
    if not num_blocks:
        raise ConfigError(
            f"{option} {text} holds not one block of {block_size} tokens: {block_size} tokens of "
            f"{model.name} take {format_bytes(block_bytes)}"
        )
    return num_blocks


def policies_of(text: str | None) -> list[str]:
    """Return the policies asked for, each once; without any, those worth a first look."""
    from quire_sim.optimum import OPTIMUM
    from quire_sim.sweep import check_policy

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
    from quire_sim.hardware import Roofline, accelerator_named, model_named

    return Roofline(model_named(model), accelerator_named(gpu or default_gpu))


def service_of(
    rates: tuple[float | None, float | None], roofline: "Roofline | None", *, concurrent: bool
) -> "Service | None":
    """Return the durations of requests: as recorded, else by the rates given, else on the roofline."""
    from quire_sim.concurrent import AsRecorded, OnRoofline, Rates

    given = {
        name: rate
        for name, rate in zip(("prefill", "decode"), rates, strict=True)
        if rate is not None
    }
    if not concurrent:
        if given:
            raise ConfigError("--prefill-rate and --decode-rate say nothing without --concurrent")
        return None
    alone = OnRoofline(roofline) if roofline is not None and not given else Rates(**given)
    return AsRecorded(alone)


def capacities_in_blocks(
    texts: Iterable[str] | None, num_unique: int, block_size: int, model: "ModelFacts | None"
) -> list[int]:
    """Return capacities in blocks, each once, in the order given. Raises `ConfigError`.

    A share is of the different blocks of the trace; shares and bytes are rounded down. None: the
    shares to look at first, those of the usual ones that are a block at least.
    """
    from quire_sim.replay import check_capacity

    if texts is None:
        texts = [share for share in DEFAULT_CAPACITIES if int(share[:-1]) * num_unique >= 100]
        texts = texts or ["1"]
    words = [word for text in texts for word in names(text)]
    if not words:
        raise ConfigError(f"--capacity is empty: {HOW}")
    found = (_capacity(word, num_unique, block_size, model) for word in words)
    return list(dict.fromkeys(check_capacity(blocks) for blocks in found))


def _capacity(text: str, num_unique: int, block_size: int, model: "ModelFacts | None") -> int:
    if text[:1].isdigit() and text[-1].isalpha():
        parse_bytes(text)
        if model is None:
            raise ConfigError(
                f"--capacity {text} needs --model, which says how many bytes a token takes; or give "
                "a share like 10%, or a number of blocks"
            )
        return blocks_that_hold(text, block_size, model, "--capacity")
    blocks = amount(text, num_unique, "--capacity", HOW)
    if blocks < 1:
        what = f", of {num_unique:,} different blocks," if text.endswith("%") else ""
        raise ConfigError(f"--capacity {text}{what} is less than one block: {HOW}")
    return blocks
