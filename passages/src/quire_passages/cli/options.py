"""Options that both commands of passages have."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

_PROMPTS = "Prompts of four to eight passages."
MaybePrompts: TypeAlias = Annotated[
    int | None, typer.Option("--prompts", min=1, help=_PROMPTS, show_default="200; --quick: 12")
]
Prompts: TypeAlias = Annotated[int, typer.Option("--prompts", min=1, help=_PROMPTS)]
_PASSAGE_TOKENS = "Tokens of the longest passage; the shortest has half."
MaybePassageTokens: TypeAlias = Annotated[
    int | None,
    typer.Option("--passage-tokens", min=32, help=_PASSAGE_TOKENS, show_default="150 to 400"),
]
PassageTokens: TypeAlias = Annotated[
    int, typer.Option("--passage-tokens", min=32, help=_PASSAGE_TOKENS)
]
Texts: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(
        "--texts",
        help="Texts that passages are cut from; *.gz: man pages.",
        show_default="Python's manual",
    ),
]
