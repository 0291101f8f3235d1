"""The base of all trainers: the command line, and the card that ends a folder."""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
OWN = {"quire-tiny": ROOT / "src" / "quire" / "assets"}
"""The folder of each model that does not come with passages."""


def command_line(about: str | None, name: str, minutes: float, of: str) -> argparse.ArgumentParser:
    """Build what a trainer is told: for how long, in minutes `of` some time, and where the folder goes."""
    folder = OWN.get(name, ROOT / "passages" / "src" / "quire_passages" / "assets")
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=minutes, help=f"{of} (default {minutes:g})"
    )
    parser.add_argument("--steps", type=int, default=0, help="count of steps, in place of minutes")
    parser.add_argument("--out", type=Path, default=folder / name, help="folder to write")
    return parser


def write_card(out: Path, card: str) -> None:
    """Write a model's card beside it, and show it."""
    (out / "README.md").write_text(card, "utf-8")
    sys.stdout.write(card)
