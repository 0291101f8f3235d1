"""Functions that are being written: loops, memory, and vector operations beside operators."""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# llvmlite has no types, and what can be inferred from its sources is wrong.

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from llvmlite import binding, ir

from quire.kernels.vectors import (
    FLOAT,
    FLOATS,
    HALF,
    HALVES,
    HAS_PAIRS,
    INT,
    LANES,
    PAIRS,
    WORD,
    WORDS,
    Number,
)

_POWER = (
    1.327647192e-03,
    9.675541334e-03,
    5.550713274e-02,
    2.402211972e-01,
    6.931469671e-01,
    1.000000072e00,
)
"""2 ** x for |x| <= 1/2, relative error 8e-8 (least over polynomials of degree 5)."""
_ROUGH_POWER = (5.517166954e-02, 2.426111254e-01, 6.932609857e-01, 9.999280733e-01)
"""The same, relative error 8e-5 (of degree 3): a 26th of what rounding to bfloat16 may take."""


def _within(lanes: Sequence[int]) -> list[int]:
    """Return the same lanes of each quarter of two vectors."""
    return [4 * quarter + lane for quarter in range(4) for lane in lanes]


def _whole(quarters: Sequence[int]) -> list[int]:
    """Return whole quarters of two vectors."""
    return [4 * quarter + lane for quarter in quarters for lane in range(4)]


_ADDED = {
    2: (_within([0, 16, 1, 17]), _within([2, 18, 3, 19])),
    4: (_within([0, 1, 16, 17]), _within([2, 3, 18, 19])),
    8: (_whole([0, 2, 4, 6]), _whole([1, 3, 5, 7])),
    16: (_whole([0, 2, 4, 6]), _whole([1, 3, 5, 7])),
}
"""The lanes of two vectors that are added, by the number of vectors whose sums these hold."""


_IS_X86 = binding.get_default_triple().startswith(("x86", "i686"))


class Variable:
    """A value that changes while the code runs."""

    def __init__(self, code: "Code", value: Number) -> None:
        self.code = code
        self.place = code.entry.alloca(value.type)
        self.set(value)

    @property
    def now(self) -> Number:
        return Number(self.code.builder, self.code.builder.load(self.place))

    @now.setter
    def now(self, value: Number) -> None:
        self.set(value)

    def set(self, value: Number) -> None:
        self.code.builder.store(value.value, self.place)


class Code:
    """A function `(integers) -> None` that is being written; addresses are integers."""

    def __init__(self, module: ir.Module, name: str, num_arguments: int) -> None:
        kind = ir.FunctionType(ir.VoidType(), [INT] * num_arguments)
        self.function = ir.Function(module, kind, name)
        top = ir.IRBuilder(self.function.append_basic_block("entry"))
        body = self.function.append_basic_block("body")
        top.branch(body)
        self.entry = ir.IRBuilder(top.block)
        self.entry.position_before(top.block.terminator)
        self.builder = ir.IRBuilder(body)
        self.arguments = [Number(self.builder, argument) for argument in self.function.args]

    def constant(self, number: float, kind: Any = INT) -> Number:
        many = isinstance(kind, ir.VectorType)
        return Number(self.builder, ir.Constant(kind, [number] * kind.count if many else number))

    def zeros(self, count: int) -> list[Variable]:
        return [Variable(self, self.constant(0, FLOATS)) for _ in range(count)]

    def lanes(self) -> Number:
        return Number(self.builder, ir.Constant(WORDS, list(range(LANES))))

    def room(self, num_bytes: int) -> Number:
        """Return the address of memory of this call."""
        place = self.entry.alloca(ir.ArrayType(ir.IntType(8), num_bytes))
        place.align = 64
        return Number(self.builder, self.entry.ptrtoint(place, INT))

    def content(self, name: str, content: bytearray) -> Number:
        """Return the address of bytes that are part of the module, once of each name."""
        module = self.function.module
        found = module.globals.get(name)
        if found is None:
            kind = ir.ArrayType(ir.IntType(8), len(content))
            found = ir.GlobalVariable(module, kind, name)
            found.linkage, found.global_constant = "internal", True
            found.initializer = ir.Constant(kind, content)
        return Number(self.builder, self.builder.ptrtoint(found, INT))

    def _pointer(self, address: Number, kind: Any) -> Any:
        return self.builder.inttoptr(address.value, kind.as_pointer())

    def load(self, address: Number, kind: Any = FLOATS) -> Number:
        found = self.builder.load(self._pointer(address, kind), align=2)
        found.type = kind
        return Number(self.builder, found)

    def store(self, value: Number, address: Number) -> None:
        self.builder.store(value.value, self._pointer(address, value.type), align=2)

    def fetch(self, address: Number, num_bytes: int) -> None:
        """Have memory come to the second cache while other code runs; in the first it would be in the way."""
        name, kind = "llvm.prefetch.p0", ir.IntType(8)
        order = ir.FunctionType(ir.VoidType(), [kind.as_pointer(), WORD, WORD, WORD])
        module = self.function.module
        function = module.globals.get(name) or ir.Function(module, order, name)
        for line in range(0, num_bytes, 64):
            place = self._pointer(address + line, kind)
            self.builder.call(function, [place, *map(WORD, (0, 2, 1))])

    def load_row(self, address: Number, count: int, kind: Any) -> list[Number]:
        """Load `count` elements; zeros behind them fill the last vector."""
        size = getattr(kind, "width", 32) // 8
        found = [
            self.load(address + size * at, ir.VectorType(kind, min(LANES, count - at)))
            for at in range(0, count, LANES)
        ]
        last = found[-1].type.count
        if last < LANES:
            none = Number(self.builder, ir.Constant(found[-1].type, [0] * last))
            places = [*range(last), *([last] * (LANES - last))]
            found[-1] = found[-1].picked(places, none)
        return found

    def store_row(self, row: Sequence[Number], address: Number, count: int) -> None:
        """Store the first `count` elements."""
        for at, vector in zip(range(0, count, LANES), row, strict=False):
            kept = min(LANES, count - at)
            part = vector if kept == LANES else vector.picked(range(kept))
            self.store(part, address + at * getattr(vector.type.element, "width", 32) // 8)

    def load_floats(self, address: Number, count: int, *, bfloat16: bool) -> list[Number]:
        """Load `count` elements of either type as floats; zeros behind them fill the last vector."""
        if not bfloat16:
            return self.load_row(address, count, FLOAT)
        return [each.widened() for each in self.load_row(address, count, HALF)]

    def widened_at(self, address: Number) -> Number:
        """Load a bfloat16 as the word of a float."""
        word = self.builder.zext(self.load(address, HALF).value, WORD)
        return Number(self.builder, word) << 16

    def nearest(self, floats: Number) -> Number:
        """Return the nearest bfloat16s, as floats."""
        return (self._rounded(floats) & -0x10000).seen_as(FLOATS)

    def transposed(self, rows: Sequence[Number]) -> list[Number]:
        """Return the columns of 16 vectors."""
        found = list(rows)
        for distance in (1, 2, 4, 8):
            lanes = range(LANES)
            low = [i if not i & distance else LANES + i - distance for i in lanes]
            high = [i + distance if not i & distance else LANES + i for i in lanes]
            before, found = found, list(found)
            for i in lanes:
                if not i & distance:
                    first, second = before[i], before[i + distance]
                    found[i] = first.picked(low, second)
                    found[i + distance] = first.picked(high, second)
        return found

    def store_floats(
        self, row: Sequence[Number], address: Number, count: int, *, bfloat16: bool
    ) -> None:
        """Store the first `count` of floats as elements of either type."""
        self.store_row([self.rounded(each) for each in row] if bfloat16 else row, address, count)

    @contextmanager
    def loop(self, start: Number | int, stop: Number | int, step: int = 1) -> Generator[Number]:
        """Do what is written inside for start, start + step, ... below stop."""
        at = Variable(self, start if isinstance(start, Number) else self.constant(start))
        with self.as_long_as(lambda: at.now < stop):
            now = at.now
            yield now
            at.now = now + step

    @contextmanager
    def claims(self, counter: Number, count: Number) -> Generator[Number]:
        """Do what is written inside for each number below a count that no other thread has claimed."""

        def claim() -> Number:
            place = self._pointer(counter, INT)
            return Number(self.builder, self.builder.atomic_rmw("add", place, INT(1), "monotonic"))

        at = Variable(self, claim())
        with self.as_long_as(lambda: at.now < count):
            yield at.now
            at.now = claim()

    def number(self, array: Number, at: Number | int) -> Number:
        """Return an element of an int64 array."""
        return self.load(array + at * 8, INT)

    def numbers(self, address: Number, kind: Any) -> list[Number]:
        """Return what stands at an address for each field of a named tuple."""
        return [self.number(address, i) for i in range(len(kind._fields))]

    @contextmanager
    def as_long_as(self, condition: Callable[[], Number]) -> Generator[None]:
        """Do what is written inside while a condition holds, which is computed each time."""
        head, inside, after = (self.builder.append_basic_block() for _ in range(3))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        self.builder.cbranch(condition().value, inside, after)
        self.builder.position_at_end(inside)
        yield
        self.builder.branch(head)
        self.builder.position_at_end(after)

    def when(self, condition: Number) -> AbstractContextManager[Any]:
        return self.builder.if_then(condition.value)

    def either(self, condition: Number) -> AbstractContextManager[Any]:
        """Do what is written inside the first of two, or what is written inside the second."""
        return self.builder.if_else(condition.value)

    def call(self, name: str, kind: Any, *values: Number) -> Number:
        """Call one of LLVM's own functions."""
        module = self.function.module
        order = ir.FunctionType(kind, [value.type for value in values])
        function = module.globals.get(name) or ir.Function(module, order, name)
        return Number(self.builder, self.builder.call(function, [value.value for value in values]))

    def multiply_add(self, left: Number, right: Number, sums: Number) -> Number:
        """Return `left * right + sums`: of words, each is a pair of bfloat16 whose two products are added."""
        if left.is_float:
            return self.call("llvm.fmuladd.v16f32", FLOATS, left, right, sums)
        pairs = (each.seen_as(PAIRS) for each in (left, right))
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, sums, *pairs)

    def exp2(self, power: Number, *, rough: bool = False) -> Number:
        """Return 2 ** power, to a few units in the last place.

        It is at least 2 ** -126, for powers up to 127.

        rough  to a few units in the last place of a bfloat16, which it is rounded to
        """
        power = power.max(-126.0)
        shifted = power + 12582912.0  # 1.5 * 2 ** 23: its last bits are the whole part
        rest = power - (shifted - 12582912.0)
        first, *factors = _ROUGH_POWER if rough else _POWER
        found = self.constant(first, FLOATS)
        for factor in factors:
            found = self.multiply_add(found, rest, self.constant(factor, FLOATS))
        return (found.seen_as(WORDS) + (shifted.seen_as(WORDS) << 23)).seen_as(FLOATS)

    def _rounded(self, floats: Number) -> Number:
        """Return words whose upper halves are the nearest bfloat16s, ties to even; the lower ones mean nothing."""
        bits = floats.seen_as(WORDS)
        return bits + ((bits >> 16) & 1) + 0x7FFF

    def rounded(self, floats: Number) -> Number:
        """Return the nearest bfloat16s, in half the memory."""
        return (self._rounded(floats) >> 16).narrowed(ir.VectorType(HALF, LANES))

    def pairs(self, first: Number, second: Number) -> Number:
        """Return words of two bfloat16 each: the nearest to an element of one vector and the same of another."""
        if HAS_PAIRS:
            both = self.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", PAIRS, second, first)
            places = [each for i in range(LANES) for each in (i, LANES + i)]
            return both.seen_as(HALVES).picked(places).seen_as(WORDS)
        return (self._rounded(first) >> 16) | (self._rounded(second) & -0x10000)

    def across(self, vector: Number, join: Callable[[Number, Number], Number]) -> Number:
        """Return what joining all lanes gives, in every lane."""
        for distance in (8, 4, 2, 1):
            vector = join(vector, vector.picked([i ^ distance for i in range(LANES)]))
        return vector

    def sums_by_lane(
        self, vectors: Callable[[int], list[Number]], first: int = 0, count: int = LANES
    ) -> list[Number]:
        """Return vectors whose lane i has the sum over the lanes of `vectors(i)`, of each that this returns.

        They are added in a tree, two vectors into one, so that few of them are held at once.
        """
        if count == 1:
            return vectors(first)
        half = count // 2
        left, right = _ADDED[count]
        both = zip(
            *(self.sums_by_lane(vectors, first + i * half, half) for i in range(2)), strict=True
        )
        return [a.picked(left, b) + a.picked(right, b) for a, b in both]

    def halves(self, words: Number) -> list[Number]:
        """Return the bfloat16s of 16 words as two vectors of floats: the even ones, and the odd ones."""
        return [each.seen_as(FLOATS) for each in (words << 16, words & -0x10000)]

    def in_order(self, halves: Sequence[Number]) -> list[Number]:
        """Return vectors of elements that follow each other, from those of even ones and of odd ones in turn."""
        return [
            even.picked([place for i in range(LANES // 2) for place in (f + i, LANES + f + i)], odd)
            for even, odd in zip(halves[::2], halves[1::2], strict=True)
            for f in (0, LANES // 2)
        ]

    def interleaved(self, first: Number, second: Number) -> list[Number]:
        """Return words of two bfloat16 each: an element of one vector of words and the same of another."""
        a, b = first.seen_as(HALVES), second.seen_as(HALVES)
        return [
            a.picked([p for i in range(LANES) for p in (f + i, 2 * LANES + f + i)], b).seen_as(
                WORDS
            )
            for f in (0, LANES)
        ]

    def call_at(self, address: Number, *values: Number, result: Any = None) -> Any:
        """Call a function at an address; return its result, of a type, if it has one."""
        kind = ir.FunctionType(result or ir.VoidType(), [value.type for value in values])
        place = self.builder.inttoptr(address.value, kind.as_pointer())
        found = self.builder.call(place, [value.value for value in values])
        return result and Number(self.builder, found)

    def counted_up(self, counter: Number, by: int) -> Number:
        """Count a counter up, and return what it was; who sees it sees what this thread has written before."""
        place = self._pointer(counter, INT)
        return Number(self.builder, self.builder.atomic_rmw("add", place, INT(by), "seq_cst"))

    def counted(self, counter: Number) -> Number:
        """Return a counter that other threads count up."""
        found = self.builder.load_atomic(self._pointer(counter, INT), "seq_cst", 8)
        return Number(self.builder, found)

    def pause(self) -> None:
        """Let the other thread of this core go first, where an instruction says so."""
        if _IS_X86:
            kind, module = ir.FunctionType(ir.VoidType(), []), self.function.module
            name = "llvm.x86.sse2.pause"
            self.builder.call(module.globals.get(name) or ir.Function(module, kind, name), [])

    def end(self) -> None:
        self.builder.ret_void()
