"""Counts of sentences that the project wants at 0: headless, too long, too wide.

    headless   first lines of docstrings that begin with a relative clause in place of a noun
    long       first lines of public docstrings over 20 words
    wide       lines of prose in docs over 120 characters; tables, code and the reference apart
    sentences  sentences of prose in docs over 30 words

Run it as `python tools/words.py`; with a name it prints the places.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("src", "sim", "router", "passages", "benchmarks", "tools", "tests", "examples")
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs")
HEADLESS = re.compile(
    r"(What|Who|Whoever|Whose|Which|How|Whatever|So many|Such)\b(?! (is|are) [^.]*\?)"
)
"""The beginning of a first line that names nothing. A question that ends with "?" is none."""

WIDEST, LONGEST_LINE, LONGEST_SENTENCE = 120, 20, 30


def docstrings() -> Iterator[tuple[str, bool, str]]:
    """Iterate over (place, whether it is public, first line) of all docstrings."""
    for root in SOURCES:
        for path in sorted((ROOT / root).rglob("*.py")):
            tree = ast.parse(path.read_text("utf-8"))
            is_public_file = root in ("src", "sim", "router", "passages")
            for node in ast.walk(tree):
                if isinstance(
                    node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
                ):
                    text = ast.get_docstring(node)
                    if text:
                        name = getattr(node, "name", "")
                        line = getattr(node, "lineno", 1)
                        where = f"{path.relative_to(ROOT)}:{line}"
                        yield (
                            where,
                            is_public_file and not name.startswith("_"),
                            text.split("\n")[0],
                        )


def prose() -> Iterator[tuple[str, str]]:
    """Iterate over (place, line) of the prose of all pages."""
    for page in PAGES:
        top = ROOT / page
        files = [top] if top.is_file() else sorted(top.rglob("*.md"))
        for path in files:
            if "api" in path.parts:
                continue
            in_code = False
            for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
                if line.lstrip().startswith("```"):
                    in_code = not in_code
                elif not in_code and not line.startswith(("|", "    ", "<", "#", "![")):
                    yield f"{path.relative_to(ROOT)}:{number}", line


def sentences() -> Iterator[tuple[str, str]]:
    """Iterate over (place, sentence) of the prose of all pages; bullets and paragraphs end one."""
    start, text = "", ""
    for where, line in [*prose(), ("", "")]:
        ends = (
            not line.strip()
            or line.lstrip().startswith(("- ", "* "))
            or re.match(r"\s*\d+\. ", line)
        )
        if ends or where.partition(":")[0] != start.partition(":")[0]:
            for each in re.split(r"(?<=[.!?:;])\s+", text):
                if each.strip():
                    yield start, each
            start, text = where, ""
        text = f"{text} {line.strip()}".strip()


def found() -> dict[str, list[str]]:
    """Return the places of each kind."""
    lines = list(docstrings())
    return {
        "headless": [f"{where}: {line}" for where, _, line in lines if HEADLESS.match(line)],
        "long": [
            f"{where}: {line}"
            for where, is_public, line in lines
            if is_public and len(line.split()) > LONGEST_LINE
        ],
        "wide": [f"{where}: {len(line)}" for where, line in prose() if len(line) > WIDEST],
        "sentences": [
            f"{where}: {text}"
            for where, text in sentences()
            if len(text.split()) > LONGEST_SENTENCE
        ],
    }


def main() -> None:
    """Print the counts, or the places of one kind."""
    kinds = found()
    for name in sys.argv[1:]:
        sys.stdout.write("\n".join(kinds[name]) + "\n")
    for name, places in kinds.items():
        sys.stdout.write(f"{name:10} {len(places)}\n")


if __name__ == "__main__":
    main()
