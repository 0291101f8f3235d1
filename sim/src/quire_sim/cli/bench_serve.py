"""`quire bench serve`: many requests at once, beside other systems."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.bench_tables import listed, tell
from quire.cli.files import check_writable, write_text
from quire.cli.models import check_installed, hush
from quire.cli.options import AsJson, MaybeModel, Quick, ReportTo, Rows, names
from quire.errors import ConfigError
from quire.extras import require


def serve(
    *,
    rows: Rows = None,
    among: Annotated[
        str | None, typer.Option(help="Only these systems, separated by commas.")
    ] = None,
    precisions: Annotated[
        str | None, typer.Option(help="Only float32 or bfloat16, separated by commas.")
    ] = None,
    vllm: Annotated[
        Path, typer.Option(help="The interpreter of an environment that has vLLM.")
    ] = Path(".venv-vllm/bin/python"),
    model: MaybeModel = None,
    llama: Annotated[Path, typer.Option(help="The folder of llama-server and model.gguf.")] = Path(
        ".llama"
    ),
    open_loop: Annotated[
        bool, typer.Option("--open-loop", help="Ask servers over HTTP, as requests come.")
    ] = False,
    rate: Annotated[
        float | None,
        typer.Option(help="Expected requests per second.", show_default="half of vLLM's"),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="A trace file.", show_default="Poisson"),
    ] = None,
    slo_ttft: Annotated[
        float | None,
        typer.Option(help="Seconds to the first token that are still good.", show_default="0.5"),
    ] = None,
    slo_tpot: Annotated[
        float | None,
        typer.Option(help="Seconds per further token that are still good.", show_default="0.05"),
    ] = None,
    report: ReportTo = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Time many requests at once: quire's engine, vLLM on the CPU, transformers, one by one.

    Requests that share a prefix and requests that share none, chats, agents and documents, on
    quire-tiny and on a random Llama of 76 M parameters. The systems take turns, the best of five
    rounds counts. vLLM is measured where benchmarks/peers/vllm_environment.py has made its
    environment. --quick: the small model, one round.
    With --open-loop, `quire serve` and `vllm serve` are asked over HTTP by one client, requests
    come as a Poisson process or at the times of a trace, and goodput is what meets both objectives.
    With --model, the servers of quire, vLLM and llama.cpp are asked over HTTP, one request at a
    time and many at once, and medians of five rounds count. benchmarks/peers/llama_server.py builds
    llama.cpp's server.

    [bold]Examples[/bold]

      quire bench serve --quick --rows shared_32 --among quire,prefix-cache
      quire bench serve --model smollm2-bf16 --among quire,llama
      quire bench serve --open-loop --rows shared_128,chat --precisions bfloat16 --report open.svg
    """
    check_installed()
    check_writable(report, ".svg")
    from quire_sim.bench import serve_picture, serve_rows
    from quire_sim.bench.serve_http import OpenLoop
    from quire_sim.bench.serve_model import ModelServers

    hush()
    way = serve_rows.AtOnce()
    given = {"rate": rate, "trace": trace, "ttft_s": slo_ttft, "itl_s": slo_tpot}
    given = {name: value for name, value in given.items() if value is not None}
    if open_loop:
        require("serve", "a server")
        way = OpenLoop(**given)  # pyright: ignore[reportArgumentType] - each by its name
    elif given:
        raise ConfigError("--rate, --trace, --slo-ttft and --slo-tpot are of --open-loop; add it")
    folder = None if model is None else Path(model)
    if folder is not None:
        if open_loop or report is not None:
            raise ConfigError("--model has rows of its own; leave --open-loop and --report out")
        is_file = folder.suffix == ".gguf" and folder.is_file()
        if not is_file and not (folder / "config.json").is_file():
            raise ConfigError(
                f"--model is a GGUF file or the folder of a model here, got {model!r}; it has no config.json"
            )
        require("serve", "a server")
        way = ModelServers(llama)
    choice = serve_rows.ServeChoice(
        names(rows) or None,
        names(among) or None,
        names(precisions) or None,
        vllm,
        quick,
        way,
        folder,
    )
    title = "requests as they come" if open_loop else "requests at once"
    title = title if model is None else "requests over HTTP"
    found = tell(partial(serve_rows.rows, choice), title, listed, as_json=as_json)
    if report is not None:
        write_text(report, serve_picture.picture(found))
