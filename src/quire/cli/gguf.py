"""`quire gguf`: the library that computes GGUF models."""

from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.options import AsJson
from quire.cli.output import answer, progress, stdout

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@app.callback()
def group() -> None:
    """The library of llama.cpp, which computes GGUF models as they are."""


@app.command()
def build(
    *,
    cuda: Annotated[bool, typer.Option("--cuda", help="Compute on NVIDIA GPUs.")] = False,
    vulkan: Annotated[bool, typer.Option("--vulkan", help="Compute with Vulkan.")] = False,
    source: Annotated[
        Path | None,
        typer.Option(
            "--source",
            help="The source package of llama.cpp.",
            show_default="downloaded by pip",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Build llama.cpp's library, and keep it in the user's cache; a second call finds it there.

    Needs cmake and a C++ compiler, and takes about five CPU minutes. On macOS it computes on Metal.

    [bold]Examples[/bold]

      quire gguf build
      quire gguf build --cuda
    """
    from quire.engines.gguf.building import build as made
    from quire.engines.gguf.library import find

    wanted = {"cuda": cuda, "vulkan": vulkan}
    with progress("llama.cpp") as tell:
        path = made([name for name, is_on in wanted.items() if is_on], source=source, tell=tell)
        first = find()
    answer(_told(path) | {"first": str(first)}, _show, as_json=as_json)


@app.command()
def which(*, as_json: AsJson = False) -> None:
    """Print which library computes GGUF models, and why bindings before it are passed over.

    [bold]Examples[/bold]

      quire gguf which
    """
    from quire.engines.gguf.library import find

    passed: list[str] = []
    path = find(passed.append)
    answer(_told(path) | {"passed_over": passed}, _show, as_json=as_json)


def _told(path: Path) -> dict[str, Any]:
    """Return what a library is, as plain data."""
    from quire.engines.gguf.library import load

    library = load(path)
    return {
        "library": str(path),
        "version": library.version,
        "gpu": bool(library.llama_supports_gpu_offload()),
        "attention": "quire" if library.has_attention else "llama.cpp",
    }


def _show(told: dict[str, Any]) -> None:
    """Print a library, those that were passed over, and one that comes first."""
    own, first = told["library"], told.get("first")
    gpu = "with" if told["gpu"] else "without"
    about = f"llama.cpp {told['version']}, {gpu} a GPU, attention by {told['attention']}"
    lines = [f"{about}: {own}", *told.get("passed_over", ())]
    if first not in (None, own):
        lines.append(f"{first} comes first; QUIRE_LLAMA_LIB={own} has this one used")
    for line in lines:
        stdout().print(line, highlight=False, soft_wrap=True, markup=False)
