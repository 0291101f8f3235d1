"""Results of benchmarks as recorded runs: vLLM's and SGLang's bench serve, guidellm, LLMServingSim.

They have each request's times and lengths. A device, and mostly the engine's settings, they do not have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from quire.errors import ConfigError, QuireError, TraceError
from quire_sim.trace.chunks import lines_of, open_text
from quire_sim.trace.schemas import MeasuredRow

Json = Mapping[str, Any]

DETAILS = ("input_lens", "output_lens", "ttfts", "itls")
"""Keys of vLLM's results that `--save-detailed` adds, in releases of all ages."""


class Benched(msgspec.Struct, frozen=True):
    """The requests of a benchmark.

    `header`     the settings that the file has, by the names of a recorded run's first line
    `rows`       requests that were answered, in order of arrival; arrivals count from the first
    `by_clients` times count from when a client sent a request; else from when the engine took it
    `notes`      sentences for people: what was left out
    """

    header: Json
    rows: list[MeasuredRow]
    by_clients: bool
    notes: list[str]


def read_benched(path: Path) -> Benched | None:
    """Return the requests of a benchmark's result; None for a file that is none.

    `report.json#2` is the second benchmark of a report that has several. Raises `TraceError` for
    results without times of requests, `ConfigError` for several results in a file.
    """
    file, number = _file_and_number(path)
    first = _beginning(file)
    if first is None:
        return None
    try:
        if "input_toks" in first or "sub_requests" in first:
            return _llmservingsim(file)
        if "benchmarks" in first:
            return _guidellm(file, first, number)
        if "request_throughput" in first or "ttfts" in first:
            return _bench_serve(file, first)
    except QuireError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TraceError(
            f"{file} begins as the result of a benchmark and goes on otherwise: {error!r:.200}"
        ) from error
    return None


def _file_and_number(path: Path) -> tuple[Path, int | None]:
    name, _, number = path.name.rpartition("#")
    if path.exists() or not name or not number.isdecimal():
        return path, None
    return path.with_name(name), int(number)


def _beginning(path: Path) -> Json | None:
    """Return the object that a file has, or that its first line has; None where there is none."""
    with open_text(path) as stream:
        head = stream.readline()
        if not head.lstrip().startswith(b"{"):
            return None
        try:
            found: Any = json.loads(head)
        except ValueError:
            try:
                found = json.loads(head + stream.read())
            except ValueError:
                return None
    return cast("Json", found) if isinstance(found, dict) else None


# -- vllm bench serve ----------------------------------------------------------------------


def _bench_serve(path: Path, result: Json) -> Benched:
    """Read a result of `vllm bench serve --save-result --save-detailed`, or of SGLang's bench_serving."""
    missing = [key for key in DETAILS if not result.get(key)]
    if missing:
        raise TraceError(
            f"{path} has means and no times of requests ({', '.join(missing)}); save them with vllm bench serve "
            "--save-result --save-detailed, or SGLang's --output-details"
        )
    if len(list(lines_of(path))) > 1 and _second(path) is not None:
        raise ConfigError(
            f"{path} has several results, a line each; keep one of them in a file of its own"
        )
    ttfts, itls = _list(path, result, "ttfts"), _list(path, result, "itls")
    count = len(ttfts)
    columns = [_list(path, result, key) for key in DETAILS[:2]]
    errors = result.get("errors") or [""] * count
    starts = result.get("start_times") or _starts(path, result, count)
    if {len(each) for each in (itls, *columns, errors, starts)} != {count}:
        raise TraceError(f"{path}: its lists of requests have different lengths")
    rows: list[MeasuredRow] = []
    for at, (prompt, output, ttft) in enumerate(zip(*columns, ttfts, strict=True)):
        if errors[at] or not ttft or not prompt or not output:
            continue
        took = max(ttft + sum(itls[at]), ttft)
        rows.append(_row(path, at + 1, starts[at], prompt, output, ttft, took))
    header = {
        key: _number(value) for key, value in result.items() if not isinstance(value, (list, dict))
    }
    header |= {"model": result.get("model_id") or result.get("model")}
    return _benched(path, header, rows, count, by_clients=True)


def _number(value: Any) -> Any:
    """Return a value, as a number where it is one in text: `--metadata` makes texts of all."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _starts(path: Path, result: Json, count: int) -> list[float]:
    """Return when requests came that the result has no times of: at once, or not known."""
    if str(result.get("request_rate")) != "inf" or result.get("max_concurrency"):
        raise TraceError(
            f"{path} does not say when requests came (start_times), as those of older releases; measure with "
            "a newer vllm bench serve, or at --request-rate inf without --max-concurrency"
        )
    return [0.0] * count


def _second(path: Path) -> Json | None:
    """Return the object in the second line of a file, where it is one by itself."""
    lines = lines_of(path)
    next(lines)
    try:
        found: Any = json.loads(next(lines))
    except (ValueError, StopIteration):
        return None
    return cast("Json", found) if isinstance(found, dict) else None


def _list(path: Path, result: Json, key: str) -> list[Any]:
    found = result[key]
    if not isinstance(found, list):
        raise TraceError(f"{path}: {key} is no list, one entry a request")
    return cast("list[Any]", found)


# -- guidellm ------------------------------------------------------------------------------


def _guidellm(path: Path, report: Json, number: int | None) -> Benched:
    """Read a benchmark in a report of guidellm, in its releases from 0.2 on."""
    benchmarks: list[Any] = report["benchmarks"]
    if not benchmarks:
        raise TraceError(f"{path} is a report without benchmarks")
    if number is None and len(benchmarks) > 1:
        raise ConfigError(
            f"{path} has {len(benchmarks)} benchmarks; name one, from {path.name}#1 to "
            f"{path.name}#{len(benchmarks)}"
        )
    if number is not None and not 1 <= number <= len(benchmarks):
        raise ConfigError(f"{path} has {len(benchmarks)} benchmarks, and no #{number}")
    benchmark: Any = benchmarks[(number or 1) - 1]
    requests: Any = benchmark.get("requests")
    lists: dict[str, Any] = requests if "successful" in requests else {"successful": requests}
    done: list[Any] = lists.get("successful") or lists.get("completed") or []
    if not done:
        raise TraceError(
            f"{path}: that benchmark has no requests with an answer; save all of them, unsampled"
        )
    rows: list[MeasuredRow] = []
    for at, each in enumerate(done, 1):
        timings = _part(each, "info", "timings") or _part(each, "scheduler_info", "request_timings")
        start = _first(
            each.get("request_start_time"), each.get("start_time"), timings.get("request_start")
        )
        end = _first(
            each.get("last_token_time"), timings.get("last_token_iteration"), timings.get("last_iteration"),
            each.get("request_end_time"), each.get("end_time"), timings.get("request_end"),
        )  # fmt: skip
        ttft = each.get("time_to_first_token_ms")
        prompt = _first(each.get("prompt_tokens"), _tokens(each, "input_metrics"))
        output = _first(each.get("output_tokens"), _tokens(each, "output_metrics"))
        if start is None or end is None or not ttft or not prompt or not output:
            continue
        rows.append(_row(path, at, start, prompt, output, ttft / 1e3, max(end - start, ttft / 1e3)))
    rest = sum(
        len(each) for name, each in lists.items() if name != "total" and each and each is not done
    )
    header = {"model": _model_of(report, benchmark)}
    return _benched(path, header, rows, len(done) + rest, by_clients=True)


def _model_of(*levels: Any) -> str | None:
    """Return the first model's name in nested objects, wherever it stands."""
    for level in levels:
        waiting: list[Any] = [level]
        while waiting:
            one = waiting.pop(0)
            for key, value in one.items():
                if key in {"model", "backend_model"} and isinstance(value, str):
                    return value
                if isinstance(value, dict):
                    waiting.append(value)
    return None


def _tokens(request: Json, key: str) -> int | None:
    usage: Json = request.get(key) or {}
    return _first(usage.get("total_tokens"), usage.get("text_tokens"))


def _part(request: Json, *keys: str) -> Json:
    found: Any = request
    for key in keys:
        known: Any = found or {}
        found = known.get(key)
    return cast("Json", found or {})


# -- LLMServingSim -------------------------------------------------------------------------


def _llmservingsim(path: Path) -> Benched:
    """Read `requests.jsonl` of LLMServingSim's bench, with `meta.json` beside it."""
    beside = path.with_name("meta.json")
    header: dict[str, Any] = json.loads(beside.read_bytes()) if beside.is_file() else {}
    rows: list[MeasuredRow] = []
    count = 0
    for count, line in enumerate(lines_of(path), 1):
        each = json.loads(line)
        if "arrival_time" not in each:
            raise TraceError(
                f"{path}, row {count:,} has no arrival_time and was not measured: a workload of LLMServingSim "
                "is none of its recorded runs; name the requests.jsonl that its bench wrote"
            )
        times = [
            each.get(key)
            for key in ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts")
        ]
        if None in times or not each["input_toks"] or not each["output_toks"]:
            continue
        arrived, queued, first, last = times
        sizes = each["input_toks"], each["output_toks"]
        rows.append(_row(path, count, arrived, *sizes, first - queued, last - queued))
    return _benched(path, header, rows, count, by_clients=False)


# -- all of them ---------------------------------------------------------------------------


def _row(path: Path, number: int, start: float, *rest: Any) -> MeasuredRow:
    """Return the row of a request: prompt and output tokens, seconds to the first and the last token."""
    keys = ("arrival_s", "input_tokens", "output_tokens", "ttft_s", "total_s")
    made: dict[str, Any] = dict(zip(keys, (start, *rest), strict=True))
    made["block_ids"] = []
    try:
        return msgspec.convert(made, MeasuredRow)
    except msgspec.ValidationError as error:
        raise TraceError(f"{path}, request {number:,}: {error}") from None


def _benched(
    path: Path, header: Json, rows: Sequence[MeasuredRow], count: int, *, by_clients: bool
) -> Benched:
    if not rows:
        raise TraceError(f"{path}: none of its {count:,} requests has an answer and its times")
    begin = min(row.timestamp for row in rows)
    moved = [msgspec.structs.replace(row, timestamp=row.timestamp - begin) for row in rows]
    notes = ["it names no blocks, so each prompt is new and nothing is found again"]
    if count > len(rows):
        notes.append(f"{count - len(rows):,} requests without an answer are left out")
    known = {key: value for key, value in header.items() if value is not None}
    return Benched(known, sorted(moved, key=_arrival), by_clients, notes)


def _arrival(row: MeasuredRow) -> float:
    return row.timestamp


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
