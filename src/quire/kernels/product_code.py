"""The code of products: the inputs and the loops of its functions.

Panels of 64 columns of the result take turns with chunks of rows: the weights of a panel are laid out column beside
column (K. Goto and R. van de Geijn, Anatomy of high-performance matrix multiplication, 2008,
https://doi.org/10.1145/1356052.1356053), a part of their depth at a time, and `ROWS` rows of sums stay in registers.
Where tiles multiply, few rows are laid out instead (`product_few`); elsewhere few rows read the weights where they
stand (`product_streamed`).
"""

# pyright: basic

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from llvmlite import ir

from quire.kernels import tiles
from quire.kernels.code import Code, Variable
from quire.kernels.product_few import ROOM, are_few, multiply_few
from quire.kernels.product_inputs import COLUMNS, LINE, Panel, ProductInputs, Share
from quire.kernels.product_streamed import (
    PARTS,
    STEP,
    STREAMED,
    Streamed,
    in_lanes,
    lay_streamed,
    multiply_streamed,
)
from quire.kernels.vectors import FLOAT, FLOATS, HALF, LANES, LOG2_E, WIDE, WORD, Number

ROWS = 6
"""Rows whose sums are held at once: with four vectors of columns, 24 of a core's 32 registers."""

_VECTORS_AT_ONCE = 4 if WIDE else 1
"""Vectors of columns whose sums are held at once: of narrow registers, 12 of 16."""
_ROWS_BESIDE_TILES = 4
"""The same of what tiles leave: a divisor of a block of them."""
DEPTH = {False: 384, True: 512}
"""Operands of a row that are multiplied before its sums are put down, with tiles or without: what is laid out of a
panel stays in the second cache."""
EVEN_ROWS = 128
"""Rows of a chunk from which on a panel may be laid out once more, so that threads end at one time."""
MOST_ROWS = 384
"""Rows at most whose sums are put down."""
_VECTOR = 4 * LANES
_VECTORS = range(COLUMNS // LANES)


Finish = Callable[[Number, Number], None]
"""Makes the sums of a row of a share, at an address, what they become."""


class ProductCode(Code):
    """A function of the address of `ProductInputs` that is being written, which any number of threads call."""

    def __init__(
        self, module: ir.Module, become: str, bfloat16: bool, is_paired: bool, is_tiled: bool
    ) -> None:
        super().__init__(module, f"product_{become}", 1)
        self.become, self.bfloat16, self.paired = become, bfloat16, is_paired
        self.tiled = is_tiled
        self.widened = bfloat16 and not is_paired
        self.operand = WORD if is_paired else FLOAT
        self.size = 2 if self.widened else 4
        """Bytes of what becomes an operand of the weights."""
        self.given = ProductInputs(*self.numbers(self.arguments[0], ProductInputs))
        self.num_rows = self.number(self.given.count, 0)
        self.form = Streamed(self.operand, self.widened)
        self.is_gated = become == "gated"
        self.result_size = 2 if bfloat16 and not (self.is_gated and self.widened) else 4
        self.width = COLUMNS // 2 if self.is_gated else COLUMNS
        self.part = DEPTH[self.tiled]
        self.half = COLUMNS // 2 * self.size
        """Bytes of an operand of each column of half a panel."""

    def write(self) -> None:
        given, step = self.given, tiles.ROWS if self.tiled else ROWS
        laid, sums = self.room(4 * ROOM), self.room((MOST_ROWS + step) * LINE)
        bias, row_of_its_own = self.room(LINE), self.room(LINE)
        chunk_laid = Variable(self, self.constant(-1))
        # As few chunks as give each thread some of equal length.
        even = given.even.min(self.num_rows // EVEN_ROWS)
        fewest = self._parted(given.longest).max(given.chunks).max(even)
        chunk = (self._parted(fewest) + (step - 1)) // step * step
        streamed = self._is_streamed()
        chunk, parts = chunk.where(streamed < 1, STREAMED), streamed * (PARTS - 1) + 1
        chunks = self._parted(chunk)
        num_shares = given.num_panels * parts
        with (
            tiles.configured(self) if self.tiled else nullcontext(),
            self.claims(self.arguments[0], num_shares * chunks) as claimed,
        ):
            place_of_chunk = claimed.divided(num_shares)
            at = claimed - place_of_chunk * num_shares
            number = at.divided(parts)
            panel = self._panel(number, at - number * parts, parts)
            next_place = (number + given.ahead).min(given.num_panels - 1) * (8 * len(Panel._fields))
            self._next = Panel(*self.numbers(given.panels + next_place, Panel))
            self._lay_biases(panel, bias)
            first = place_of_chunk * chunk
            out = given.out + first * given.out_bytes + panel.place
            num_rows = (self.num_rows - first).min(chunk)
            rows = given.rows + first * given.row_bytes
            share = Share(panel, rows, given.row_bytes, num_rows, given.depth)

            def finish(row: Number, sums: Number) -> None:
                self._finish(sums, bias, panel.columns, out + row * given.out_bytes, row_of_its_own)

            full = panel.columns > self.width - 1
            is_few = full & are_few(self, share) if self.tiled else streamed > 0
            with self.either(is_few) as (few, many):
                with few:
                    is_new = place_of_chunk.compared("!=", chunk_laid.now)
                    if self.tiled:
                        multiply_few(self, share, (laid, is_new), sums, is_gated=self.is_gated)
                    else:
                        self._stream(share, (laid, is_new), sums)
                    chunk_laid.now = place_of_chunk
                    with self.loop(0, num_rows) as row:
                        finish(row, sums + row * LINE)
                with many:
                    self._write_many(share, laid, sums, finish)
                    chunk_laid.now = self.constant(-1)

    def _panel(self, number: Number, part: Number, parts: Number) -> Panel:
        """Return a panel, or one of its parts."""
        given = self.given
        place = given.panels + number * (8 * len(Panel._fields))
        panel = Panel(*self.numbers(place, Panel))
        first = part * (self.width // PARTS)
        most = self.constant(self.width // PARTS).where(parts > 1, self.width)
        ahead, beside = first * given.depth * self.size, first * (2 if self.bfloat16 else 4)
        return Panel(
            panel.weight + ahead,
            panel.second + ahead,
            (panel.bias + beside).where(panel.bias > 0, 0),
            (panel.second_bias + beside).where(panel.second_bias > 0, 0),
            panel.place + first * self.result_size,
            (panel.columns - first).min(most).max(0),
        )

    def _is_streamed(self) -> Number:
        """Return whether rows are so few that weights are read where they stand: 1 or 0."""
        if self.tiled:
            return self.constant(0)
        depth, form = self.given.depth, self.form
        fits = (self.num_rows < STREAMED + 1) & (depth % (STEP // form.size) < 1)
        num_laid = self.num_rows if form.widened else in_lanes(self.num_rows)
        fits &= num_laid * depth < ROOM + 1
        return self.constant(1).where(fits, 0)

    def _stream(self, share: Share, laid: tuple[Number, Number], sums: Number) -> None:
        """Write the sums of few rows; laid out at an address, if not done before."""
        with self.when(laid[1]):
            lay_streamed(self, share, self.form, laid[0])
        to = (sums, sums + LINE // 2) if self.is_gated else (sums,)
        multiply_streamed(self, share, self.form, laid[0], to)

    def _write_many(self, share: Share, laid: Number, sums: Number, finish: Finish) -> None:
        """Lay the panel's weights out, and multiply rows where they stand with them."""
        given, num_rows = self.given, share.num_rows
        step = tiles.ROWS if self.tiled else ROWS

        def sums_of(row: Number) -> Number:
            one_of_two = row // step % 2 * (step * LINE)
            return sums + (row * LINE).where(given.depth > self.part, one_of_two)

        with self.loop(0, given.depth, self.part) as start:
            depth = (given.depth - start).min(self.part)
            self._lay(share.panel, start, depth, laid)
            left = share.rows + start * 4
            is_last = start + depth > given.depth - 1
            # A block's sums become what they become while the next block is multiplied.
            with self.loop(0, num_rows + step, step) as row:
                before = row - step
                count = (num_rows - before).min(step).where(is_last & (row > 0), 0)

                def finish_one(i: Number, before: Number = before) -> None:
                    finish(before + i, sums_of(before) + i * LINE)

                finished = Variable(self, self.constant(0))
                with self.when(row < num_rows):
                    block = left + row * given.row_bytes, (num_rows - row).min(step)
                    to, span = sums_of(row), (start, depth)
                    by_tiles = self.constant(0)
                    if self.tiled:
                        beside = count, finish_one
                        by_tiles, done = self._multiply_tiles(block[0], laid, span, to, beside)
                        finished.now = done
                    ahead = self._ahead(row // step, start)
                    self._multiply(block, (laid, ahead), (*span, by_tiles), to)
                with self.loop(finished.now, count) as i:
                    finish_one(i)

    def _ahead(self, block: Number, start: Number) -> Number:
        """Return the address of what is fetched of the next panel while a block of rows is multiplied: half of it."""
        first = self._next.weight
        half = self._next.second if self.is_gated else first + self.given.depth * self.half
        return half.where(block > 0, first) + start * self.half

    def _parted(self, rows: Number) -> Number:
        """Return how many parts of so many rows there are."""
        return (self.num_rows + (rows - 1)).divided(rows)

    def _lay(self, panel: Panel, start: Number, depth: Number, to: Number) -> None:
        """Lay operands of a panel's weights down as [depth, COLUMNS]; where it has no column, its last one again."""
        step = self.given.depth * self.size
        whole = depth // LANES * LANES
        with self.loop(0, COLUMNS, LANES) as strip:
            weight, first = self._strip(panel, strip)
            weight += start * self.size
            last = panel.columns - 1
            columns = [weight + (first + i).min(last) * step for i in range(LANES)]
            weight, first = self._strip(panel, strip + LANES)
            next_one = weight + start * self.size + first * step
            to_strip = to + strip * 4
            with self.loop(0, whole, LANES) as at:
                for i in range(LANES):  # a CPU does not foresee that many rows of weights
                    self.fetch(next_one + step * i + at * self.size, 1)
                found = self.transposed([self._operands(each + at * self.size) for each in columns])
                for i, row in enumerate(found):
                    self.store(row, to_strip + (at + i) * LINE)
            with self.loop(whole, depth) as at:
                for i, each in enumerate(columns):
                    self.store(self._operand(each + at * self.size), to_strip + at * LINE + i * 4)

    def _strip(self, panel: Panel, strip: Number) -> tuple[Number, Number]:
        """Return the weight that has a strip of a panel, and its first column there; behind the last, the next panel's."""
        if not self.is_gated:
            return panel.weight, strip
        is_second = (strip > self.width - 1) & (strip < COLUMNS)
        weight = panel.second.where(is_second, panel.weight)
        return weight, (strip - self.width).where(strip > self.width - 1, strip)

    def _operands(self, address: Number) -> Number:
        if self.widened:
            return self.load_floats(address, LANES, bfloat16=True)[0]
        return self.load(address, ir.VectorType(self.operand, LANES))

    def _operand(self, address: Number) -> Number:
        return self.widened_at(address) if self.widened else self.load(address, WORD)

    def _multiply_tiles(
        self,
        first: Number,
        laid: Number,
        span: tuple[Number, Number],
        to: Number,
        beside: tuple[Number, Callable[[Number], None]],
    ) -> tuple[Number, Number]:
        """Add products of a block of rows to their sums as far as tiles go.

        span     the first operand that is multiplied, before which sums begin at 0, and how many
        beside   how many other things there are to do, and what writes one: a few are done at every step
        returns  how many operands are multiplied, and how many things are done
        """
        (start, depth), (count, do) = span, beside
        num_steps, halves = depth // tiles.STEP, COLUMNS // tiles.ROWS
        at_once = (num_steps * halves + (tiles.ROWS - 1)).divided((num_steps * halves).max(1))
        line, whole = self.given.row_bytes, num_steps * tiles.STEP
        left = tiles.Left(first, first + line * tiles.HALF, line)
        with self.when(num_steps > 0), self.loop(0, halves) as half:

            def meanwhile(at: Number) -> None:
                done = (half * num_steps + at // tiles.STEP) * at_once
                with self.loop(done, (done + at_once).min(count)) as i:
                    do(i)

            column, adds = half * (4 * tiles.ROWS), start > 0
            of_half = left, laid + column, whole
            tiles.multiply_tiles(self, to + column, of_half, LINE, adds=adds, meanwhile=meanwhile)
        return whole, (num_steps * halves * at_once).min(count)

    def _multiply(
        self,
        rows: tuple[Number, Number],
        columns: tuple[Number, Number],
        span: tuple[Number, Number, Number],
        to: Number,
    ) -> None:
        """Add products of a block of rows to their sums.

        rows     the address of the first, and how many; behind the last one that one stands again
        columns  the addresses of the weights that are laid out, and of some that are fetched meanwhile
        span     the first operand, before which sums begin at 0, how many, and how many of these have been multiplied
        """
        (first, count), (start, depth, done), (laid, ahead) = rows, span, columns
        at_once = _ROWS_BESIDE_TILES if self.tiled else ROWS
        with self.when(depth > done), self.loop(0, count, at_once) as row:
            left = [first + (row + i).min(count - 1) * self.given.row_bytes for i in range(at_once)]
            with self.loop(0, LINE, _VECTOR * _VECTORS_AT_ONCE) as column:
                place, adds = to + row * LINE + column, start + done > 0
                beside = laid + column, ahead
                self._multiply_rows(left, beside, (done, depth), place, adds)

    def _multiply_rows(
        self,
        left: Sequence[Number],
        columns: tuple[Number, Number],
        span: tuple[Number, Number],
        to: Number,
        goes_on: Number,
    ) -> None:
        """Add products of rows to their sums, from one operand to another, or begin these at 0."""
        (laid, ahead), vectors = columns, range(_VECTORS_AT_ONCE)
        places = [to + i * LINE + v * _VECTOR for i in range(len(left)) for v in vectors]
        sums = self.zeros(len(places))
        with self.when(goes_on):
            for each, place in zip(sums, places, strict=True):
                each.now = self.load(place)
        with self.loop(*span) as at:
            if WIDE and not self.tiled:
                self.fetch(ahead + at * self.half, self.half)
            found = [
                self.load(laid + at * LINE + v * _VECTOR, ir.VectorType(self.operand, LANES))
                for v in vectors
            ]
            for i, row in enumerate(left):
                element = self.load(row + at * 4, self.operand).spread()
                for each, column in zip(sums[i * len(found) :], found, strict=False):
                    each.now = self.multiply_add(element, column, each.now)
        for each, place in zip(sums, places, strict=True):
            self.store(each.now, place)

    def _lay_biases(self, panel: Panel, to: Number) -> None:
        """Lay a panel's biases down as floats; zeros where there are none."""
        for v in _VECTORS:
            self.store(self.constant(0, FLOATS), to + v * _VECTOR)
        biases = (panel.bias, panel.second_bias) if self.is_gated else (panel.bias,)
        for half, address in enumerate(biases):
            with self.when(address > 0), self.loop(0, panel.columns) as column:
                if self.bfloat16:
                    found = self.widened_at(address + column * 2)
                else:
                    found = self.load(address + column * 4, WORD)
                self.store(found, to + half * (LINE // 2) + column * 4)

    def _finish(
        self, sums: Number, bias: Number, columns: Number, to: Number, part: Number
    ) -> None:
        """Make a row of a panel's sums what they become; of a panel that is not full, in room of its own."""
        size = self.result_size
        kind = HALF if size == 2 else WORD
        with self.either(columns > self.width - 1) as (full, partly):
            with full:
                self._become(sums, bias, to)
            with partly:
                if self.become == "added":
                    with self.loop(0, columns) as i:
                        self.store(self.load(to + i * size, kind), part + i * size)
                self._become(sums, bias, part)
                with self.loop(0, columns) as i:
                    self.store(self.load(part + i * size, kind), to + i * size)

    def _become(self, sums: Number, bias: Number, to: Number) -> None:
        """Store what a row of sums becomes: with a bias, rounded as a module of the model would."""
        found = [self.load(sums + v * _VECTOR) + self.load(bias + v * _VECTOR) for v in _VECTORS]
        if self.bfloat16:
            found = [self.nearest(each) for each in found]
        if self.become == "added":
            before = self.load_floats(to, COLUMNS, bfloat16=self.bfloat16)
            found = [a + b for a, b in zip(before, found, strict=True)]
        if self.is_gated:
            half = len(found) // 2
            found = [
                gate / (self.exp2((gate * -LOG2_E).min(126.0)) + 1.0) * up
                for gate, up in zip(found[:half], found[half:], strict=True)
            ]
            if self.widened:
                found = [self.nearest(each) for each in found]
        self.store_floats(
            found, to, self.width, bfloat16=self.bfloat16 and not (self.is_gated and self.widened)
        )
