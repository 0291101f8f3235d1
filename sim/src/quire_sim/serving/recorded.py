"""Recorded runs of a real engine beside simulations of the same requests.

A recorded run is a file of JSON Lines. Its first line tells the engine's settings, the others each
a request: when it arrived, its tokens, its blocks, and the measured seconds to its first and last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire.errors import ConfigError, QuireError, TraceError
from quire.routing import LeastLoaded
from quire_sim.hardware import Accelerator, EngineTimes, ModelFacts, accelerator_named, model_named
from quire_sim.hardware.facts import number_format
from quire_sim.plan import Placement, blocks_that_fit
from quire_sim.serving.benched import Benched, read_benched
from quire_sim.serving.replica import ReplicaLimits, Timing
from quire_sim.serving.requests import Served
from quire_sim.serving.simulate import Cluster, Load, simulate
from quire_sim.trace import open_trace
from quire_sim.trace.chunks import lines_of
from quire_sim.trace.formats import RECORDED_BLOCK, recorded_setting
from quire_sim.trace.rows import NO_RUNS, TraceRequest
from quire_sim.trace.schemas import MeasuredRow, decode_lines

LARGE_BYTES = 70 << 30
"""Devices with more memory (A100 apart) get larger limits from vLLM, where a run names none."""


MODEL_KEYS, DEVICE_KEYS = ("model", "model_name"), ("device", "device_name", "gpu", "accelerator")
"""Names of settings, the first of which is there counts."""

QUANTIZED = {"fp8": "fp8", "awq": "int4", "gptq": "int4", "int4": "int4", "w4a16": "int4"}
"""Number formats of weights by what the names of models have that come so."""


class RecordedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an engine that a recorded run's first line tells, or that vLLM would take.

    `max_step_tokens`, `max_sequences`  the limits of each of `data_parallel` schedulers
    `scheduler`      whose rules the engine's schedule has: "first-come", vLLM's, or "quire"
    `num_blocks`     what the engine itself said that it has, each of its schedulers; None: nothing
    `given_blocks`, `given_bytes`  what it was told to have, in place of what fits; None: nothing
    """

    model: ModelFacts
    device: Accelerator
    tensor_parallel: int
    data_parallel: int
    max_step_tokens: int
    max_sequences: int
    block_size: int
    utilization: float
    plans_ahead: bool
    eager: bool
    prefix_caching: bool
    scheduler: str
    num_blocks: int | None
    given_blocks: int | None = None
    given_bytes: int | None = None

    @property
    def fitting_blocks(self) -> int:
        """Blocks of each scheduler: those it was told to have, else those that fit. Raises `ConfigError`."""
        if self.given_blocks is not None:
            return self.given_blocks
        if self.given_bytes is not None:
            devices, kv = self.tensor_parallel, self.model.kv
            copies = self.model.kv_copies(devices)
            return int(self.given_bytes * devices // (kv.per_token * self.block_size * copies))
        return blocks_that_fit(self.placement)

    @property
    def placement(self) -> Placement:
        """The model on the devices of one scheduler."""
        return Placement(
            model=self.model,
            accelerator=self.device,
            num_gpus=self.tensor_parallel,
            utilization=self.utilization,
            block_size=self.block_size,
            step_tokens=self.max_step_tokens,
            max_sequences=self.max_sequences,
            data_parallel=self._step_together,
        )

    @property
    def timing(self) -> EngineTimes:
        """Seconds of steps by the data sheets."""
        devices = self.tensor_parallel, self._step_together
        return EngineTimes(self.model, self.device, *devices, eager=self.eager)

    def cluster(self, num_blocks: int, timing: Timing) -> Cluster:
        """Return the service: groups that share experts step together, and are one replica."""
        together = self._step_together
        limits = ReplicaLimits(
            num_blocks,
            self.block_size,
            max_step_tokens=self.max_step_tokens,
            max_sequences=self.max_sequences,
            plans_ahead=int(self.plans_ahead),
        )
        return Cluster(
            limits,
            timing,
            num_replicas=self.data_parallel // together,
            scheduler=self.scheduler,
            num_ranks=together,
        )

    @property
    def _step_together(self) -> int:
        return self.data_parallel if self.model.expert_params else 1


class Figures(msgspec.Struct, frozen=True):
    """The measures of a run, in seconds.

    Times to the first token and per further token count from when the engine took a request over, as
    its own clocks do; the makespan ends with the last token.
    """

    ttft_mean: float
    ttft_p99: float
    tpot_mean: float
    makespan: float

    @classmethod
    def of(cls, ttfts: Sequence[float], tpots: Sequence[float], makespan: float) -> Figures:
        """Return the measures of requests from their times."""
        p99 = float(np.percentile(ttfts, 99))
        return cls(float(np.mean(ttfts)), p99, float(np.mean(tpots or [0.0])), makespan)

    def off(self, measured: Figures) -> Figures:
        """Return by which share each figure is above the measured one; below is negative."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(measured), strict=True)
        return Figures(*(mine / real - 1 if real else 0.0 for mine, real in pairs))


class Blocks(msgspec.Struct, frozen=True):
    """Blocks of K and V of each scheduler: by `blocks_that_fit`, and by the engine where it said so."""

    simulated: int
    engine: int | None


class Comparison(msgspec.Struct, frozen=True):
    """A recorded run beside its simulation; `errors` are signed shares of the measured values."""

    errors: Figures
    blocks: Blocks
    simulated: Figures
    measured: Figures


class RecordedRun:
    """A recorded run in a file. Raises `TraceError`, and `ConfigError` for settings that are not known.

    `said`        settings of the engine, by the names of a first line, for the result of a benchmark, which has few
    `benched`     whether the file is the result of a benchmark
    `by_clients`  whether times count from when a client sent a request
    """

    def __init__(self, path: str | Path, said: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path).expanduser()
        result = read_benched(self.path)
        self.benched = result is not None
        self.by_clients = False
        self.notes: list[str] = []
        if result is not None:
            self._take(result, said or {})
            return
        trace = open_trace(self.path, format="recorded")
        lines = lines_of(self.path)
        header = msgspec.json.decode(next(lines))
        try:
            self.settings = _settings(header, trace.block_size)
        except QuireError as error:
            raise type(error)(f"{self.path}, first line: {error}") from error
        self.requests: list[TraceRequest] = list(trace)
        rows: list[MeasuredRow] = list(decode_lines(self.path, lines, MeasuredRow))
        self.rows = [row for row in rows if row.input_length]

    def _take(self, result: Benched, said: Mapping[str, Any]) -> None:
        """Take the requests of a benchmark, and its settings with those that are said."""
        header = {"engine": "vLLM"} | dict(result.header) | dict(said)
        for names, option in ((MODEL_KEYS, "--model"), (DEVICE_KEYS, "--gpu")):
            if all(recorded_setting(header, name, None) is None for name in names):
                raise ConfigError(
                    f"{self.path} does not say which {names[0]} it measured: name it with {option}"
                )
        block_size = recorded_setting(header, "block_size", RECORDED_BLOCK)
        self.settings = _settings(header, block_size)
        self.by_clients, self.notes, self.rows = result.by_clients, result.notes, result.rows
        self.requests = [
            TraceRequest(
                at,
                row.timestamp,
                row.input_length,
                row.output_length,
                NO_RUNS,
                None,
                None,
                row.duration_s,
            )
            for at, row in enumerate(result.rows, 1)
        ]

    @property
    def measured(self) -> Figures:
        """The measures that the engine's users saw."""
        rows = self.rows
        further = [row for row in rows if row.output_length > 1]
        return Figures.of(
            [row.ttft_s for row in rows],
            [(row.duration_s - row.ttft_s) / (row.output_length - 1) for row in further],
            max(row.timestamp + row.duration_s for row in rows),
        )

    def compare(self, timing: Timing | None = None) -> Comparison:
        """Simulate the same requests and put both beside each other; times are by the data sheets."""
        served = self.served(timing)
        simulated = Figures.of(
            [
                each.ttft_s if self.by_clients else each.first_token_s - each.queued_s
                for each in served
            ],
            [each.tpot_s for each in served if each.tpot_s is not None],
            max(each.finished_s for each in served),
        )
        blocks = Blocks(self.settings.fitting_blocks, self.settings.num_blocks)
        return Comparison(simulated.off(self.measured), blocks, simulated, self.measured)

    def served(self, timing: Timing | None = None) -> list[Served]:
        """Simulate the same requests and return their accounts, in the order of the rows."""
        settings, requests = self.settings, self.requests
        if not settings.prefix_caching:
            requests = [msgspec.structs.replace(each, runs=NO_RUNS) for each in requests]
        served: list[Served] = []
        cluster = settings.cluster(settings.fitting_blocks, timing or settings.timing)
        simulate(cluster, Load(requests), LeastLoaded(), observers=[served.append])
        return sorted(served, key=lambda each: each.number)


def _settings(header: Any, block_size: int) -> RecordedSettings:
    """Return the settings in a first line. Raises `ConfigError`, `TraceError`."""
    given = _Given(header)
    device = accelerator_named(given.text(*DEVICE_KEYS))
    memory_bytes = given.count("device_total_memory_bytes", default=device.memory_bytes)
    device = msgspec.structs.replace(device, memory_bytes=memory_bytes)
    stages = given.count("pipeline_parallel_size", default=1)
    if stages != 1:
        raise ConfigError(
            f"pipeline_parallel_size is {stages}; pipelines are not simulated, only 1"
        )
    name = given.text(*MODEL_KEYS)
    said = (given.text(key, default="auto") for key in ("quantization", "dtype", "kv_cache_dtype"))
    quantized, dtype, kv = map(number_format, said)
    named = next((bits for part, bits in QUANTIZED.items() if part in name.lower()), None)
    model = model_named(name).stored_as(quantized or named or dtype, kv)
    large = device.memory_bytes >= LARGE_BYTES and "a100" not in device.name
    return RecordedSettings(
        model=model,
        device=device,
        tensor_parallel=given.count("tensor_parallel_size", "tp", default=1),
        data_parallel=given.count("data_parallel_size", "dp", default=1),
        max_step_tokens=given.count("max_num_batched_tokens", default=8192 if large else 2048),
        max_sequences=given.count("max_num_seqs", default=1024 if large else 256),
        block_size=block_size,
        utilization=given.share("gpu_memory_utilization", default=0.9),
        plans_ahead=given.flag("async_scheduling", default=True),
        eager=given.flag("enforce_eager", default=False),
        prefix_caching=given.flag("enable_prefix_caching", default=True),
        scheduler="quire" if given.text("engine") == "quire" else "first-come",
        num_blocks=given.count("num_gpu_blocks", default=0) or None,
        given_blocks=given.count("num_gpu_blocks_override", default=0) or None,
        given_bytes=given.count("kv_cache_memory_bytes", default=0) or None,
    )


class _Given:
    """The settings that a first line has, by any of their names."""

    def __init__(self, header: Any) -> None:
        self._header = header

    def text(self, *names: str, default: str | None = None) -> str:
        return self._value(names, default, str, "text")

    def count(self, *names: str, default: int) -> int:
        value = self._value(names, default, int, "a whole number")
        if value < 0 or (value == 0 and default > 0):
            raise TraceError(f"{names[0]} is {value}; it is 1 or more")
        return value

    def share(self, *names: str, default: float) -> float:
        return float(self._value(names, default, (int, float), "a number"))

    def flag(self, *names: str, default: bool) -> bool:
        return self._value(names, default, bool, "true or false")

    def _value(self, names: Sequence[str], default: Any, kind: Any, what: str) -> Any:
        found = (recorded_setting(self._header, name, None) for name in names)
        value = next((each for each in found if each is not None), default)
        if value is None:
            raise TraceError(f"there is no {' or '.join(names)}; a recorded run says which it was")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise TraceError(f"{names[0]} is {value!r:.60}; it is {what}")
        return value
