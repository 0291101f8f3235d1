"""Decode steps of a plain decoder on a GPU as CUDA graphs: launched at once, where Python would launch each kernel.

A graph is captured for a number of rows and of tasks, rounded up, and serves every step that it has room for: what a
step reads is sent to where the graph reads it, and rows that it has too many of write nothing and are not returned.
"""

# pyright: basic

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from quire.engines.packed.attention import AttentionPlan, Scoring
from quire.engines.packed.attention.device import attend_sent, num_threads
from quire.engines.packed.attention.work import Sent, Shapes
from quire.tensors.pool import KVPool

MOST_ROWS = 512
"""Rows of a step above which launching is a small part of it."""
_MOST_GRAPHS = 48
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
        self._graphs: OrderedDict[tuple[Shapes, ...], _Graph] = OrderedDict()

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
        which = tuple(shapes.values())
        with torch.inference_mode():
            graph = self._graphs.get(which)
            if graph is None:
                graph = self._graphs[which] = self._captured(shapes, tokens, arrays, run)
                if len(self._graphs) > _MOST_GRAPHS:
                    self._graphs.popitem(last=False)
            else:
                _fill(graph, tokens, arrays)
            self._graphs.move_to_end(which)
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


def _rounded(count: int) -> int:
    """Return the next power of 2; 0 stays."""
    return 1 << (count - 1).bit_length() if count else 0
