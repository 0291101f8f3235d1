"""The passes of a plain decoder over the rows of steps, made once and run for each."""

# pyright: basic

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quire.kernels.attention import AttentionPlan, Scoring
from quire.kernels.attention.compiled import Reading, attention_pass
from quire.kernels.attention.reference import KV
from quire.kernels.compiling import Program
from quire.kernels.norms import normed
from quire.kernels.products import RESULT, operands, product

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Passes:
    """The computation of up to `most_rows` rows of a step: all layers of a decoder, then logits.

    like   the inputs of some step
    rooms  inputs of each layer's attention: the number of its plan, and K and V of its pool

    Buffers between two passes are made for one layer, and used by all.
    """

    def __init__(
        self, decoder: Any, like: Inputs, rooms: Sequence[tuple[int, KV]], most_rows: int
    ) -> None:
        base, head = decoder.model, decoder.lm_head
        self._inputs = tuple(each.new_empty(most_rows, each.shape[1]) for each in like)
        self._hidden, *self._rotary = self._inputs
        self._count = np.zeros(1, np.int64)
        self.threads = torch.get_num_threads()
        self._rooms: dict[int, torch.Tensor] = {}
        self._heads: dict[int, torch.Tensor] = {}
        self._states = operands(most_rows, self._hidden.shape[1], self._hidden.dtype)
        self._passes: list[Any] = []

        self._readings: dict[tuple[int, int, torch.Size], Reading] = {}
        *early, (last, (_, pools)) = zip(base.layers, rooms, strict=True)
        for layer, (plan, both) in early:
            key = plan, _num_heads(layer), both[1].shape[2:]
            reading = self._readings.setdefault(key, Reading(key[1], both[1]))
            self._layer(layer, reading, both)
        self._begins_last = len(self._passes)
        self._written, self._last = (Reading(_num_heads(last), pools[1]) for _ in range(2))
        self._keep(last, pools)
        self._begins_some = len(self._passes)
        self._layer(last, self._last, pools)
        self._norm(base.norm)
        self._logits = self._hidden.new_empty(0, head.out_features)
        self._multiply(self._states, (head,), self._logits, "plain")
        self._program = Program(self._passes)

    @property
    def most_rows(self) -> int:
        """The rows that there is room for."""
        return len(self._hidden)

    def logits(
        self, inputs: Inputs, plans: Sequence[AttentionPlan], last: int, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Write K and V of a step's rows, and return the logits `[len(rows), vocab]` of some, None: of all.

        inputs  their hidden states `[N, width]`, and the cosines and sines `[N, D]` of their positions
        last    the number of the last layer's plan
        """
        num_rows, plan = len(inputs[0]), plans[last]
        self._take(inputs)
        for (number, *_), reading in self._readings.items():
            reading.take(plans[number])
        self._program.run(0, self._begins_last)
        if rows is not None and len(rows) < num_rows:
            # Nothing is asked of other rows behind their last K and V.
            self._written.take(plan)
            self._program.run(self._begins_last, self._begins_some)
            num_rows, plan = len(rows), plan.of(rows.numpy())
            self._take([each[rows] for each in self._inputs])
        found = self._logits.new_empty(num_rows, self._logits.shape[1])
        if num_rows:
            self._last.take(plan)
            self._program.last[RESULT] = found.data_ptr()
            self._program.run(self._begins_some)
        return found

    def wipe(self) -> None:
        """Overwrite all that lies between passes: queries, K, V and hidden states of steps before."""
        rooms = (*self._inputs, *self._rooms.values(), *self._heads.values(), self._states)
        with torch.inference_mode():  # in which they were made
            for each in rooms:
                each.zero_()

    def _take(self, inputs: Sequence[torch.Tensor]) -> None:
        self._count[0] = num_rows = len(inputs[0])
        for own, given in zip(self._inputs, inputs, strict=True):
            own[:num_rows] = given

    def _layer(self, layer: Any, reading: Reading, pools: KV) -> None:
        """Add the passes of a layer."""
        attention, mlp = layer.self_attn, layer.mlp
        attended, out = self._attended(layer, reading, pools)
        self._passes.append(attended)
        self._multiply(out, (attention.o_proj,), self._hidden, "added")
        self._norm(layer.post_attention_layernorm)
        gated = self._operands(mlp.gate_proj.out_features)
        self._multiply(self._states, (mlp.gate_proj, mlp.up_proj), gated, "gated")
        self._multiply(gated, (mlp.down_proj,), self._hidden, "added")

    def _keep(self, layer: Any, pools: KV) -> None:
        """Add the passes that write K and V of a layer, and do no more."""
        attended, _ = self._attended(layer, self._written, pools, asks=False)
        only_kv = attended.inputs._replace(group=0)  # no queries to turn
        self._passes.append(attended._replace(functions=attended.functions[:1], inputs=only_kv))

    def _attended(
        self, layer: Any, reading: Reading, pools: KV, *, asks: bool = True
    ) -> tuple[Any, torch.Tensor]:
        """Add what is before the attention of a layer; return its pass, and what that writes to, as operands.

        asks  whether there are queries
        """
        attention = layer.self_attn
        self._norm(layer.input_layernorm)
        modules = attention.q_proj, attention.k_proj, attention.v_proj
        widths = [each.out_features for each in modules]
        width, first = sum(widths), 0 if asks else 1
        if width not in self._heads:
            self._heads[width] = self._hidden.new_empty(self.most_rows, width)
        heads = self._heads[width]
        results = heads[:, sum(widths[:first]) :]
        self._multiply(self._states, modules[first:], results, "plain")
        by_heads = (-1, attention.head_dim)
        q, k, v = (each.unflatten(1, by_heads) for each in heads.split(widths, 1))
        out = self._operands(attention.o_proj.in_features)
        cos, sin = self._rotary
        scoring, how = Scoring(attention.scaling), {"out": out.unflatten(1, by_heads)}
        return attention_pass(reading, pools, q, (k, v), scoring, **how, rotary=(cos, sin)), out

    def _norm(self, norm: Any) -> None:
        how = norm.weight, norm.variance_epsilon, self._states, self.threads
        self._passes.append(normed(self._hidden, *how, count=self._count))

    def _multiply(
        self, rows: torch.Tensor, modules: tuple[Any, ...], out: torch.Tensor, become: str
    ) -> None:
        how: dict[str, Any] = {"become": become, "count": self._count}
        self._passes.append(product(rows, modules, out, self.threads, **how))

    def _operands(self, width: int) -> torch.Tensor:
        """Return room for operands of this width."""
        if width not in self._rooms:
            self._rooms[width] = operands(self.most_rows, width, self._hidden.dtype)
        return self._rooms[width]


def _num_heads(layer: Any) -> int:
    attention = layer.self_attn
    return attention.q_proj.out_features // attention.head_dim
