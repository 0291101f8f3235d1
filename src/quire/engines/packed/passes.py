"""The passes of a plain decoder over the rows of a step, run in one call."""

# pyright: basic

from typing import Any

import torch

from quire.engines.packed.attention import AttentionPlan, Scoring
from quire.engines.packed.attention.reference import KV
from quire.engines.packed.attention.step import attention_pass
from quire.engines.packed.compiling import Program
from quire.engines.packed.norms import normed
from quire.engines.packed.products import RESULT, operands, product


class Passes:
    """What is to be computed of hidden states `[N, width]`, in place, with the cosines and sines of their positions.

    Room for what lies between two passes is made for one layer, and used by all.
    """

    def __init__(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.hidden = hidden
        self.rotary = cos, sin
        self._threads = torch.get_num_threads()
        self._states = operands(len(hidden), hidden.shape[1], hidden.dtype)
        self._rooms: dict[int, torch.Tensor] = {}
        self._heads: torch.Tensor | None = None
        self._passes: list[Any] = []
        self._program: Program | None = None

    def take(self, *inputs: torch.Tensor) -> None:
        """Take the hidden states, cosines and sines of another step of as many rows."""
        for own, given in zip((self.hidden, *self.rotary), inputs, strict=True):
            own.copy_(given)

    def layer(self, layer: Any, plan: AttentionPlan, pools: KV) -> None:
        """Add the passes of a layer."""
        attention, mlp = layer.self_attn, layer.mlp
        attended, out = self._attended(layer, plan, pools)
        self._passes.append(attended)
        self._multiply(out, (attention.o_proj,), self.hidden, "added")
        self._norm(layer.post_attention_layernorm)
        gated = self._room(mlp.gate_proj.out_features)
        self._multiply(self._states, (mlp.gate_proj, mlp.up_proj), gated, "gated")
        self._multiply(gated, (mlp.down_proj,), self.hidden, "added")

    def of(self, rows: torch.Tensor, layer: Any, plan: AttentionPlan, pools: KV) -> "Passes":
        """Run what there is, write K and V of all rows for a layer, and return what is to be computed of some rows."""
        attended, _ = self._attended(layer, plan, pools)
        writes, *_ = attended.functions
        self._passes.append(attended._replace(functions=[writes]))
        Program(self._passes).run()
        return Passes(*(each[rows] for each in (self.hidden, *self.rotary)))

    def logits(self, norm: Any, head: Any) -> torch.Tensor:
        """Run the layers; return the logits of the rows."""
        found = self.hidden.new_empty(len(self.hidden), head.out_features)
        if len(found):
            if self._program is None:
                self._norm(norm)
                self._multiply(self._states, (head,), found, "plain")
                self._program = Program(self._passes)
            self._program.last[RESULT] = found.data_ptr()
            self._program.run()
        return found

    def _room(self, width: int) -> torch.Tensor:
        """Return room for operands of this width."""
        if width not in self._rooms:
            self._rooms[width] = operands(len(self.hidden), width, self.hidden.dtype)
        return self._rooms[width]

    def _norm(self, norm: Any) -> None:
        epsilon = norm.variance_epsilon
        self._passes.append(normed(self.hidden, norm.weight, epsilon, self._states, self._threads))

    def _multiply(
        self, rows: torch.Tensor, modules: tuple[Any, ...], out: torch.Tensor, become: str
    ) -> None:
        self._passes.append(product(rows, modules, out, self._threads, become=become))

    def _attended(self, layer: Any, plan: AttentionPlan, pools: KV) -> tuple[Any, torch.Tensor]:
        """Add what is before the attention of a layer; return its pass, and what that writes to, as operands."""
        attention = layer.self_attn
        self._norm(layer.input_layernorm)
        modules = attention.q_proj, attention.k_proj, attention.v_proj
        widths = [each.out_features for each in modules]
        if self._heads is None or self._heads.shape[1] != sum(widths):
            self._heads = self.hidden.new_empty(len(self.hidden), sum(widths))
        self._multiply(self._states, modules, self._heads, "plain")
        by_heads = (-1, attention.head_dim)
        q, k, v = (each.unflatten(1, by_heads) for each in self._heads.split(widths, 1))
        out = self._room(attention.o_proj.in_features)
        scoring = Scoring(attention.scaling, rotary=self.rotary)
        found = out.unflatten(1, by_heads)
        return attention_pass(plan, pools, q, (k, v), scoring, out=found), out
