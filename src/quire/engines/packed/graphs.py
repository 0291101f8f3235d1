"""Decode steps of a plain decoder on a GPU as CUDA graphs: launched at once, where Python would launch each kernel.

There is one for each number of rows, rounded up, and it serves every such step that it has room for: what a step reads
is sent to where the graph reads it, and what it has too many of are tasks and rows that write nothing. For a step that
does not fit it is captured again, with room for that one and for those before.
"""

# pyright: basic

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from quire.engines.packed.attention import AttentionPlan, Scoring
from quire.engines.packed.attention.device import attend_sent, num_threads
from quire.engines.packed.attention.work import Sent, Shapes
from quire.tensors.pool import KVPool

MOST_ROWS = 512
"""Rows of a step above which launching is a small part of it."""
_ROW_SHAPES = {1: 0, 2: 0, 5: 1, 6: 0}
"""Which arrays of `Sent` have a number for each row of the step, and how many more."""

Key = tuple[int, int]
"""A layer group, and the query heads that read each of its kv heads."""
Tokens = tuple[torch.Tensor, torch.Tensor]
Arrays = Sequence[Any]


class _Graph(NamedTuple):
    """A captured step: what it reads, and where its logits are."""

    ids: torch.Tensor
    positions: torch.Tensor
    sent: Mapping[Key, Sent]
    logits: torch.Tensor
    captured: torch.cuda.CUDAGraph

    def room(self, key: Key) -> Shapes:
        """Return the shapes that it has room for."""
        return tuple(tuple(each.shape) for each in self.sent[key][1:])


class Graphs:
    """Computes decode steps of a model, for as long as its weights and its pools lie where they lay.

    heads   query heads of each attention
    places  the group of each attention, and its place there
    pools   not kept alive
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
        self._keys = {
            module: (group, heads[module] // both[1].shape[2])
            for module, (group, both) in self._places.items()
        }
        self._kv_heads = [pool.k.shape[3] for pool in pools]
        self._device = pools[0].k.device
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
        shapes = {key: _rooms(num_rows, found) for key, found in arrays.items()}
        rows = _rounded(num_rows)
        with torch.inference_mode(), torch.cuda.device(self._device):
            graph = self._graphs.get(rows)
            if graph is not None:
                wider = {key: _wider(graph.room(key), shape) for key, shape in shapes.items()}
                if any(shape != graph.room(key) for key, shape in wider.items()):
                    shapes, graph = wider, None
                    del self._graphs[rows]
            if graph is None:
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
        sent = {key: Sent.room(shape, self._device) for key, shape in shapes.items()}

        def attention(module: Any, q: Any, k: Any, v: Any, how: Mapping[str, Any]) -> torch.Tensor:
            _, both = self._places[module]
            scoring = Scoring(how.get("scaling") or q.shape[-1] ** -0.5)
            return attend_sent(sent[self._keys[module]], both, q, (k, v), scoring)

        captured = torch.cuda.CUDAGraph()
        graph = _Graph(ids, positions, sent, ids, captured)
        _fill(graph, tokens, arrays)
        beside, current = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            run(ids, positions, None, attention)
        current.wait_stream(beside)
        with torch.cuda.graph(captured, pool=self._memory, capture_error_mode="thread_local"):
            logits = run(ids, positions, None, attention)
        return graph._replace(logits=logits)


def _fill(graph: _Graph, tokens: Tokens, arrays: Mapping[Key, Arrays]) -> None:
    """Send what a step reads to where a graph reads it."""
    for own, given in zip((graph.ids, graph.positions), tokens, strict=True):
        own[: len(given)].copy_(given)
    for key, found in arrays.items():
        graph.sent[key].take(found)


def _rooms(num_rows: int, arrays: Arrays) -> Shapes:
    """Return the shapes of room for a step's arrays, and for those of steps that differ a little."""
    rows = _rounded(num_rows)
    return tuple(
        (rows + _ROW_SHAPES[at],)
        if at in _ROW_SHAPES
        else (_rounded(len(each)), *((_rounded(each.shape[1]),) if at == 0 else each.shape[1:]))
        for at, each in enumerate(arrays)
    )


def _wider(one: Shapes, other: Shapes) -> Shapes:
    """Return the shapes of room for both."""
    return tuple(tuple(map(max, *both)) for both in zip(one, other, strict=True))


def _rounded(count: int) -> int:
    """Return the next power of 2; 0 stays."""
    return 1 << (count - 1).bit_length() if count else 0
