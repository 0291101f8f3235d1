"""Decode steps of a plain decoder on a GPU as CUDA graphs: one launch replaces one per kernel.

There is one graph for each number of rows, rounded up, and it serves every step that fits: the inputs of a step
are sent to the graph's buffers, and superfluous tasks and rows write nothing. For a step that
does not fit, the graph is captured again with more room: for that step and for those before.
"""

# pyright: basic

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple

import torch

from quire.kernels.attention import AttentionPlan, Scoring
from quire.kernels.attention.device import attend_sent, num_threads
from quire.kernels.attention.work import SentWork, Shapes
from quire.tensors.pool import KVPool

_capturing = Lock()
"""A process captures one graph at a time."""

Key = tuple[int, int]
"""A layer group, and the query heads that read each of its kv heads."""
Tokens = tuple[torch.Tensor, torch.Tensor]
Arrays = Sequence[Any]


class _Graph(NamedTuple):
    """A captured step: what it reads, where its logits are, and what it has room for."""

    ids: torch.Tensor
    positions: torch.Tensor
    sent: Mapping[Key, SentWork]
    logits: torch.Tensor
    shapes: Mapping[Key, Shapes]
    captured: torch.cuda.CUDAGraph


class Graphs:
    """Computes decode steps of a model, for as long as its weights and its pools lie where they lay.

    heads   query heads of each attention
    places  the group of each attention, and its place there
    """

    def __init__(
        self,
        heads: Mapping[Any, int],
        places: Mapping[Any, tuple[int, int]],
        pools: Sequence[KVPool],
    ) -> None:
        self._places = {
            module: (group, (pools[group].k[index], pools[group].v[index]))
            for module, (group, index) in places.items()
        }
        self._kv_heads = [pool.k.shape[3] for pool in pools]
        self._keys = {
            module: (group, heads[module] // self._kv_heads[group])
            for module, (group, _) in self._places.items()
        }
        self._device = pools[0].k.device
        self._stream = torch.cuda.Stream(self._device)
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, _Graph] = {}

    def logits(
        self, tokens: Tokens, plans: Sequence[AttentionPlan], run: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Write K and V of a decode step's rows, and return the logits `[N, vocab]` of all (`PlainDecoder.logits`)."""
        num_rows = len(tokens[0])
        threads = num_threads(self._device)
        arrays = {
            (group, shared): plans[group].arrays(shared, self._kv_heads[group], threads)
            for group, shared in sorted(set(self._keys.values()))
        }
        rows = _rounded(num_rows)
        graph = self._graphs.get(rows)
        shapes = {key: _rooms(found) for key, found in arrays.items()}
        if graph is not None:
            shapes = {key: _wider(graph.shapes[key], shape) for key, shape in shapes.items()}
        with torch.cuda.device(self._device):
            if graph is None or shapes != graph.shapes:
                with _capturing:
                    # One before goes when this one is there: their memory is none's without a graph.
                    graph = self._graphs[rows] = self._captured(shapes, tokens, arrays, run)
            else:
                _fill(graph, tokens, arrays)
            graph.captured.replay()
            return graph.logits[:num_rows].clone()

    def _captured(
        self,
        shapes: Mapping[Key, Shapes],
        tokens: Tokens,
        arrays: Mapping[Key, Arrays],
        run: Callable[..., torch.Tensor],
    ) -> _Graph:
        """Compute a step once, so that all is loaded and compiled, and capture it."""
        room = _rounded(len(tokens[0]))
        ids, positions = (each.new_zeros(room) for each in tokens)
        sent = {key: SentWork.room(shape, self._device) for key, shape in shapes.items()}

        def attention(module: Any, q: Any, k: Any, v: Any, how: Mapping[str, Any]) -> torch.Tensor:
            _, both = self._places[module]
            scoring = Scoring(how.get("scaling") or q.shape[-1] ** -0.5)
            return attend_sent(sent[self._keys[module]], both, q, (k, v), scoring)

        captured = torch.cuda.CUDAGraph()
        graph = _Graph(ids, positions, sent, ids, shapes, captured)
        _fill(graph, tokens, arrays)
        run(ids, positions, None, attention)
        # A capture that fails may leave its stream the current one: the outer block puts that back.
        current = torch.cuda.stream(torch.cuda.current_stream(self._device))
        how = {"pool": self._memory, "stream": self._stream, "capture_error_mode": "thread_local"}
        with current, torch.cuda.graph(captured, **how):
            logits = run(ids, positions, None, attention)
        return graph._replace(logits=logits)


def _fill(graph: _Graph, tokens: Tokens, arrays: Mapping[Key, Arrays]) -> None:
    """Send what a step reads to where a graph reads it."""
    for own, given in zip((graph.ids, graph.positions), tokens, strict=True):
        own[: len(given)].copy_(given)
    for key, found in arrays.items():
        graph.sent[key].take(found)


def _rooms(arrays: Arrays) -> Shapes:
    """Return the shapes of room for a step's arrays, and for those of steps that differ a little."""
    shapes = [(_rounded(len(each)), *each.shape[1:]) for each in arrays]
    by_name = dict(zip(SentWork._fields[1:], range(len(shapes)), strict=True))
    rows, columns = map(_rounded, arrays[0].shape)
    shapes[by_name["tables"]] = rows, columns
    shapes[by_name["merged_starts"]] = (rows + 1,)
    return tuple(shapes)


def _wider(one: Shapes, other: Shapes) -> Shapes:
    """Return the shapes of room for both."""
    return tuple(tuple(map(max, *both)) for both in zip(one, other, strict=True))


def _rounded(count: int) -> int:
    """Return the next power of 2; 0 stays."""
    return 1 << (count - 1).bit_length() if count else 0
