"""Numbers of code that is written down in Python and compiled by LLVM, one or 16 at a time.

Where a CPU has narrower vectors, LLVM divides these.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# llvmlite has no types, and what can be inferred from its sources is wrong.

from collections.abc import Sequence
from typing import Any

from llvmlite import binding, ir

LANES = 16

INT, WORD, FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
WORDS, FLOATS = ir.VectorType(WORD, LANES), ir.VectorType(FLOAT, LANES)
HALF = ir.IntType(16)
HALVES = ir.VectorType(HALF, 2 * LANES)


class _BFloat(ir.HalfType):
    """LLVM's bfloat, which llvmlite has no name for."""

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()  # noqa: SLF001 - types of floats have one instance each
PAIRS = ir.VectorType(_BFloat(), 2 * LANES)

HAS_PAIRS = bool(binding.get_host_cpu_features().get("avx512bf16", False))
"""Whether this CPU multiplies vectors of pairs of bfloat16."""

PAIRED = HAS_PAIRS and binding.get_host_cpu_name().startswith("znver")
"""Whether it does so as fast as it multiplies vectors of floats; where not, bfloat16s are widened to these.

Zen 4 and later do; Intel's take four times as long for a vector (Emerald Rapids: 84 GFLOP/s instead of 171 a core).
"""

WIDE = bool(binding.get_host_cpu_features().get("avx512f", False))
"""Whether a register has 16 lanes, of 32 registers; where not, two of 16 hold a vector."""

LOG2_E = 1.4426950408889634


class Number:
    """A number, or a vector of numbers, of the code that is written; operators write instructions.

    An operand that is a number of Python's stands for a constant of the same type. Comparisons are those of
    signed integers; division, remainder and `>>` are those of integers that are not negative.
    """

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder = builder
        self.value = value
        self.type: Any = value.type
        self.is_float = getattr(self.type, "element", self.type) == FLOAT

    def of(self, other: "Number | float") -> Any:
        """Return an operand beside this one."""
        if isinstance(other, Number):
            return other.value
        many = isinstance(self.type, ir.VectorType)
        return ir.Constant(self.type, [other] * self.type.count if many else other)

    def _make(self, floats: str, ints: str, other: "Number | float") -> "Number":
        make = getattr(self.builder, floats if self.is_float else ints)
        return Number(self.builder, make(self.value, self.of(other)))

    def __add__(self, other: "Number | float") -> "Number":
        return self._make("fadd", "add", other)

    def __sub__(self, other: "Number | float") -> "Number":
        return self._make("fsub", "sub", other)

    def __mul__(self, other: "Number | float") -> "Number":
        return self._make("fmul", "mul", other)

    def __truediv__(self, other: "Number") -> "Number":
        return self._make("fdiv", "udiv", other)

    def __floordiv__(self, other: int) -> "Number":
        return self._make("fdiv", "udiv", other)

    def divided(self, other: "Number") -> "Number":
        return Number(self.builder, self.builder.udiv(self.value, other.value))

    def __mod__(self, other: int) -> "Number":
        return self._make("frem", "urem", other)

    def __and__(self, other: "Number | int") -> "Number":
        return self._make("and_", "and_", other)

    def __or__(self, other: "Number") -> "Number":
        return self._make("or_", "or_", other)

    def __lshift__(self, other: int) -> "Number":
        return self._make("shl", "shl", other)

    def __rshift__(self, other: int) -> "Number":
        return self._make("lshr", "lshr", other)

    def compared(self, how: str, other: "Number | float") -> "Number":
        """Compare with `how`: "<", "<=", "==", "!=", ">"."""
        builder = self.builder
        make = builder.fcmp_ordered if self.is_float else builder.icmp_signed
        return Number(builder, make(how, self.value, self.of(other)))

    def __lt__(self, other: "Number | float") -> "Number":
        return self.compared("<", other)

    def __le__(self, other: "Number | float") -> "Number":
        return self.compared("<=", other)

    def __gt__(self, other: "Number | float") -> "Number":
        return self.compared(">", other)

    def any(self) -> "Number":
        """Return whether any lane is true."""
        return self.seen_as(ir.IntType(LANES)).compared("!=", 0)

    def where(self, seen: "Number", other: "Number | float") -> "Number":
        """Take this where `seen`, else the other."""
        return Number(self.builder, self.builder.select(seen.value, self.value, self.of(other)))

    def max(self, other: "Number | float") -> "Number":
        return self.where(self > other, other)

    def min(self, other: "Number | float") -> "Number":
        return self.where(self < other, other)

    def seen_as(self, kind: Any) -> "Number":
        """Take the same bits for another type."""
        return Number(self.builder, self.builder.bitcast(self.value, kind))

    def sign_extended(self) -> "Number":
        return Number(self.builder, self.builder.sext(self.value, INT))

    def narrowed(self, kind: Any = WORD) -> "Number":
        return Number(self.builder, self.builder.trunc(self.value, kind))

    def widened(self) -> "Number":
        """Take 16 bfloat16s as floats."""
        words = Number(self.builder, self.builder.zext(self.value, WORDS))
        return (words << 16).seen_as(FLOATS)

    def picked(self, places: Sequence[int], other: "Number | None" = None) -> "Number":
        """Take elements of this vector and, counted on, of another one."""
        order = ir.Constant(ir.VectorType(WORD, len(places)), list(places))
        second = ir.Constant(self.type, ir.Undefined) if other is None else other.value
        return Number(self.builder, self.builder.shuffle_vector(self.value, second, order))

    def spread(self) -> "Number":
        """Take this for all lanes of a vector."""
        none = ir.Constant(ir.VectorType(self.type, LANES), ir.Undefined)
        one = self.builder.insert_element(none, self.value, WORD(0))
        return Number(self.builder, one).picked([0] * LANES)
