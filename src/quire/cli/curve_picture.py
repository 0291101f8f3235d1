"""Both curves of a trace drawn with characters: braille dots, or letters where those cannot be."""

from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from quire.sim.curves import Curve, Curves

HEIGHT = 10
"""Lines of the picture, axis apart."""

LEFT = 8
"""Characters before the picture: the scale of the hit ratio."""

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character, by column and by row."""

DECADES = 3
"""Powers of ten from the left end of the axis, 0.1 % of the blocks, to the right, all of them."""

LRU, OPTIMUM = "green", "magenta"


def picture(both: "Curves", *, width: int, utf8: bool) -> Text:
    """Draw hit ratio over capacity, the capacity in powers of ten, in `width` columns."""
    columns = max(width - LEFT - 2, 10)
    lower = _cells(both, both.lru, columns, utf8=utf8, letter="L")
    upper = _cells(both, both.optimum, columns, utf8=utf8, letter="o")
    text = Text(no_wrap=True)
    for line in range(HEIGHT):
        shown = line in {0, HEIGHT // 2}
        ratio = both.ceiling * (1 - line / HEIGHT)
        text.append(f"{100 * ratio:5.1f} % " if shown else " " * LEFT, "bright_black")
        text.append("┤" if utf8 and shown else "│" if utf8 else "|", "bright_black")
        for column in range(columns):
            below, above = lower[line][column], upper[line][column]
            mark = chr(0x2800 | below | above) if utf8 else chr(below or above or ord(" "))
            text.append(mark, LRU if below else OPTIMUM)
        text.append("\n")
    text.append(" " * LEFT + ("└" if utf8 else "+"), "bright_black")
    text.append(_axis(columns, utf8=utf8) + "\n", "bright_black")
    text.append(" " * (LEFT + 1) + _labels(columns) + "\n", "bright_black")
    text.append(" " * (LEFT + 1))
    text.append("LRU" if utf8 else "L LRU", LRU)
    text.append(" below, ")
    text.append("the optimum" if utf8 else "o the optimum", OPTIMUM)
    text.append(" above; capacity in % of the different blocks\n")
    return text


def _cells(
    both: "Curves", curve: "Curve", columns: int, *, utf8: bool, letter: str
) -> list[list[int]]:
    """Return code points (or braille bits) of one curve, [lines][columns]; 0 where nothing is."""
    across, down = (2, 4) if utf8 else (1, 1)
    cells = [[0] * columns for _ in range(HEIGHT)]
    steps = columns * across
    rows = HEIGHT * down
    for step in range(steps):
        share = 10 ** (DECADES * (step / max(steps - 1, 1) - 1))
        hit = curve.at(int(both.num_unique * share)) / (both.ceiling or 1)
        row = min(int((1 - hit) * rows), rows - 1)
        bits = DOTS[step % 2][row % 4] if utf8 else ord(letter)
        cells[row // down][step // across] |= bits
    return cells


def _axis(columns: int, *, utf8: bool) -> str:
    line = ["─" if utf8 else "-"] * columns
    for decade in range(DECADES + 1):
        line[_place(decade, columns)] = "┴" if utf8 else "+"
    return "".join(line)


def _labels(columns: int) -> str:
    line = [" "] * (columns + 8)
    for decade, label in enumerate(("0.1 %", "1 %", "10 %", "100 %")):
        at = max(_place(decade, columns) - (len(label) - 1 if decade == DECADES else 1), 0)
        line[at : at + len(label)] = label
    return "".join(line).rstrip()


def _place(decade: int, columns: int) -> int:
    return decade * (columns - 1) // DECADES
