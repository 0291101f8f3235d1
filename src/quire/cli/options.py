"""Options that several commands have: one name, one meaning, one text."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

AllowOrigin: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-origin",
        help="Another site whose pages may ask from a browser: https://HOST, several times; *: any.",
        show_default=False,
    ),
]
AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON document only; of an error, too.")
]
BlockSize: TypeAlias = Annotated[
    int, typer.Option("--block-size", min=1, max=2**20, help="Tokens per block.")
]
MaybeBlockSize: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--block-size", min=1, max=2**20, help="Tokens per block.", show_default="the trace's"
    ),
]
Jobs: TypeAlias = Annotated[
    int | None,
    typer.Option("--jobs", min=1, help="Replays or curves at a time.", show_default="CPU cores"),
]
CsvTo: TypeAlias = Annotated[
    Path | None,
    typer.Option("--csv", help="Write the rows to this file as CSV.", show_default=False),
]
_DTYPE = "Format of the weights, such as float32 or bfloat16."
Dtype: TypeAlias = Annotated[str, typer.Option("--dtype", help=_DTYPE)]
MaybeDtype: TypeAlias = Annotated[
    str | None,
    typer.Option("--dtype", help=_DTYPE, show_default="as published"),
]
GgufLines: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--gguf",
        help="A setting of a GGUF model: n_ctx=N, device_memory=2GiB, type_k=q8_0, n_gpu_layers=N, ...",
        show_default=False,
    ),
]
_GPU = "An accelerator: h100, mi300x, cpu, ...; or a .json file of yours."
Gpu: TypeAlias = Annotated[str, typer.Option("--gpu", help=_GPU)]
MaybeGpu: TypeAlias = Annotated[str | None, typer.Option("--gpu", help=_GPU, show_default="h100")]
Host: TypeAlias = Annotated[str, typer.Option("--host", help="The address to listen at.")]
Keys: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        help="API keys: a file of lines NAME KEY, or NAME KEY priority=N: the highest it may ask for, 0 without; higher goes first. pin=N: tokens that breakpoints may pin.",
        show_default=False,
    ),
]
KV_MEMORY = "Memory for cached K and V."
KvMemory: TypeAlias = Annotated[str, typer.Option("--kv-memory", help=KV_MEMORY)]
MaybeKvMemory: TypeAlias = Annotated[
    str | None, typer.Option("--kv-memory", help=KV_MEMORY, show_default="what fits")
]
LoadLimit: TypeAlias = Annotated[
    float,
    typer.Option("--load-limit", help="The prefix router's limit: times a replica's even share."),
]
Loras: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        help="A PEFT adapter: its folder; for a server NAME=FOLDER, asked for as the model NAME, several times.",
        show_default=False,
    ),
]
MaxBody: TypeAlias = Annotated[str, typer.Option("--max-body", help="Size of a request.")]
MaxNewTokens: TypeAlias = Annotated[
    int, typer.Option("--max-new-tokens", min=1, help="Tokens of a reply, at most.")
]
KvDtype: TypeAlias = Annotated[
    str | None,
    typer.Option("--kv-dtype", help="Format of K and V: fp8, ...", show_default=False),
]
MaxBatchedTokens: TypeAlias = Annotated[
    int, typer.Option("--max-num-batched-tokens", help="Tokens of all sequences in a step.")
]
MaxNumSeqs: TypeAlias = Annotated[
    int, typer.Option("--max-num-seqs", help="Sequences that a step has at most.")
]
Measured: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--measured",
        help="Times from measured steps: a profile (see calibrate), or tokens[+cached]=time by comma.",
        show_default=False,
    ),
]
Mends: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--mend",
        help="Apply this mend, once for each: sort-tools, blanks, ...; on the way also drop-lines, pin-lines.",
        show_default=False,
        metavar="RULE",
    ),
]
Mfu: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--mfu", help="Times from a roofline at this share of the peak FLOP/s.", show_default=False
    ),
]
_MODEL = "A model: a local folder or file, or a name."
Model: TypeAlias = Annotated[str, typer.Option("--model", help=_MODEL)]
MaybeModel: TypeAlias = Annotated[
    str | None, typer.Option("--model", help=_MODEL, show_default=False)
]
NumGpus: TypeAlias = Annotated[
    int, typer.Option("--num-gpus", min=1, help="Accelerators that share the model's tensors.")
]
Passages: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--passages",
        help="Bytes for K and V of documents that chats bring, reused in any order: answers are approximate.",
        show_default=False,
    ),
]
PassageCapture: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--passage-capture",
        help="Where documents' K and V come from, with --passages: contextual, copied from prompts that were computed "
        "exactly; isolated, computed once more, each alone.",
        show_default="contextual; isolated beside --passage-tier",
    ),
]
PassageRows: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--passage-rows",
        help="Rows of documents to compute again, with --passages: question:0.33, epic:16, ...",
        show_default="the cheapest that agrees",
    ),
]
PassageTexts: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(
        "--passage-texts",
        help="Texts like those of users, on which reuse of documents is measured from the start; *.gz: man pages.",
        show_default=False,
    ),
]
PassageTier: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--passage-tier",
        help="A tier for documents' K and V in eight bits, with --passages: disk:/var/kv?capacity=20GiB, ...",
        show_default=False,
    ),
]
PassagesTarget: TypeAlias = Annotated[
    float,
    typer.Option(
        "--passages-target",
        min=0.5,
        max=0.999,
        help="Reuse documents only where next tokens agree so often with a full forward, as measured.",
    ),
]
PassagesAudit: TypeAlias = Annotated[
    int,
    typer.Option(
        "--passages-audit", min=1, help="Compare one of so many prompts with a full forward."
    ),
]
Port: TypeAlias = Annotated[int, typer.Option("--port", min=0, max=65535, help="Its port; 0: any.")]
Quick: TypeAlias = Annotated[bool, typer.Option("--quick", help="Fewer rows and rounds.")]
TrustTemplates: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--trust-request-chat-template",
        help="Requests may bring a chat template of their own (chat_template).",
    ),
]
ReasoningParser: TypeAlias = Annotated[
    str,
    typer.Option(
        "--reasoning-parser",
        help="Reasoning apart from content: auto, by the chat template; none; or qwen3, deepseek_r1, mistral, ...",
    ),
]
RecordTo: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--record",
        help="Record requests, without content, as a trace for "
        "[bold]quire replay[/bold]: a new file.",
        show_default=False,
    ),
]
ReportTo: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--report",
        help="Write it as a page (.html) or picture (.svg), too, whichever the command has.",
        show_default=False,
    ),
]
Router: TypeAlias = Annotated[
    str,
    typer.Option("--router", help="prefix, session, power-of-two, least-loaded or round-robin."),
]
Rows: TypeAlias = Annotated[
    str | None,
    typer.Option("--rows", help="Only these rows, separated by commas.", show_default=False),
]
SaveTo: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--save",
        help="Write the cache's final state for [bold]quire inspect[/bold].",
        show_default=False,
    ),
]
Seed: TypeAlias = Annotated[int, typer.Option("--seed", help="Seed of all random numbers.")]
Tap: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--tap", help="Show each request at /tap: its kind, its hits, and where it changes."
    ),
]
Utilization: TypeAlias = Annotated[
    float, typer.Option("--utilization", help="Share of the device memory that may be used.")
]
Below: TypeAlias = Annotated[
    str,
    typer.Option(
        "--below", help="Memory below the device: name=size@speed, by commas.", show_default=False
    ),
]


def names(text: str | None) -> list[str]:
    """Return the words between commas."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]
