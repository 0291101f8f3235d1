"""Tensors that consist of others: quantized weights, sparse ones, any subclass that says what it is made of."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors that are what their memory says."""

_no_dispatch = cast("Any", torch.Tensor).__torch_dispatch__
_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


class Fold(NamedTuple):
    """The parts of a tensor that consists of others, and the rest of what it says of itself.

    kind    its type
    about   values by name beside its parts: scales' block size, types, whatever it holds
    parts   tensors by name; None where they cannot be told
    """

    kind: type[torch.Tensor]
    about: dict[str, Any]
    parts: dict[str, torch.Tensor] | None


Mark = tuple[type[torch.Tensor], tuple[str, ...], dict[str, Any]]
"""Type, names of parts, and the rest of a folded tensor, to be compared."""


def is_folded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is more, or other, than its own memory says."""
    return type(tensor) not in PLAIN or tensor.layout != torch.strided or tensor.is_quantized


def fold_of(tensor: Any) -> Fold:
    """Return the parts of a folded tensor.

    A subclass that computes by itself names its parts by `__tensor_flatten__`. One that does not keeps its values in
    its own memory, which is its part without a name, and others as attributes.
    """
    kind = cast("type[Any]", type(tensor))
    if hasattr(kind, "__tensor_flatten__"):
        names, about = tensor.__tensor_flatten__()
        return Fold(
            kind,
            dict(cast("dict[str, Any]", about or {})),
            {name: getattr(tensor, name) for name in names},
        )
    computes = kind.__torch_dispatch__ is not _no_dispatch
    if computes or tensor.is_quantized:
        return Fold(kind, {}, None)
    about = {} if kind in PLAIN else dict(cast("dict[str, Any]", vars(tensor)))
    if tensor.layout != torch.strided:
        about = {**about, "shape": tensor.shape, "layout": str(tensor.layout)}
        names = _SPARSE.get(tensor.layout)
        parts = None if names is None else {name: getattr(tensor, name)() for name in names}
        return Fold(kind, about, parts)
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - its only name
        return Fold(kind, about, {"": tensor.detach()})


def unfolded(
    tensors: Sequence[torch.Tensor], *, folded: bool
) -> tuple[list[torch.Tensor], list[Mark]]:
    """Return the tensors that some consist of, and a mark of each that is folded; `folded`: whether any may be."""
    if not folded and PLAIN.issuperset(map(type, tensors)):
        return list(tensors), []
    plain: list[torch.Tensor] = []
    marks: list[Mark] = []
    for tensor in tensors:
        _unfold(tensor, plain, marks)
    return plain, marks


def _unfold(tensor: torch.Tensor, plain: list[torch.Tensor], marks: list[Mark]) -> None:
    if not is_folded(tensor):
        plain.append(tensor)
        return
    fold = fold_of(tensor)
    about = {name: _copied(value) for name, value in fold.about.items()}
    marks.append((fold.kind, tuple(fold.parts or ()), about))
    for part in (fold.parts or {}).values():
        _unfold(part, plain, marks)


def _copied(value: Any) -> Any:
    return copy.copy(cast("Any", value)) if isinstance(value, (list, dict, set)) else value
