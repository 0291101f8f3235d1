"""`quire gguf`: the library that computes GGUF models."""

from pathlib import Path
from typing import Annotated

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
    from quire.engines.gguf.library import load

    wanted = {"cuda": cuda, "vulkan": vulkan}
    with progress("llama.cpp") as tell:
        path = made([name for name, is_on in wanted.items() if is_on], source=source, tell=tell)
    library = load(path)
    told = {
        "library": str(path),
        "version": library.version,
        "gpu": bool(library.llama_supports_gpu_offload()),
    }
    answer(
        told,
        lambda told: stdout().print(
            f"llama.cpp {told['version']}, {'with' if told['gpu'] else 'without'} a GPU: {told['library']}",
            highlight=False,
            soft_wrap=True,
        ),
        as_json=as_json,
    )
