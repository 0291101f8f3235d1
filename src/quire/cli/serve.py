"""`quire serve`: an OpenAI-compatible server over a model of transformers."""

import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from quire.chat.conversation import check_template
from quire.chat.reasoning import check_parser
from quire.cli import options, output
from quire.cli.listening import is_local, listen, with_page
from quire.cli.models import TINY, adapters_of, load_engine_model, name_of, source_of
from quire.cli.reuse import made_passages
from quire.cli.tiers import TierFile, TierKeyFile, TierLines, opened
from quire.config import available_bytes, format_bytes, parse_bytes, read_bytes
from quire.errors import ConfigError
from quire.extras import lacking_package, require
from quire.plugins import load_offered

if TYPE_CHECKING:
    from quire.engines.loop import AsyncEngine, Engine
    from quire.serve.service import ServedModel
    from quire.web.keys import ApiKeys

MAX_EVENTS = 1_000_000
"""Events that wait to be published; beyond these the oldest are dropped, and subscribers see a gap."""

SLOW_S = 60.0
"""Seconds in which a body has to arrive, and in which a client has to take what it is sent."""

SAVING_S = 30.0
"""Seconds that tiers have at the end for what is to be written, unless their settings say otherwise."""


DRAIN_S = 30
"""Seconds that what runs on a replica has at its end, unless --grace says otherwise."""

OF_SHAPES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""Products of which oneDNN keeps the code, and torch the description, one per shape, unless the environment says otherwise.

Their own 1,024 take about 200 and 250 MiB as steps of ever other sizes come. Where each step has one of 400 sizes, products
take 8 % longer without oneDNN's, and as long without torch's, which is read as torch is loaded.
"""


def serve(
    *,
    model: options.Model = TINY,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="The model's name for clients; several times for several names.",
            show_default="the folder's, or the id",
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(help="A file with the template of chats.", show_default="the model's"),
    ] = None,
    trust_request_chat_template: options.TrustTemplates = False,
    reasoning_parser: options.ReasoningParser = "auto",
    generation_config: Annotated[
        str,
        typer.Option(
            help="Sampling of requests that do not name it: auto, the model's; quire, temperature 1."
        ),
    ] = "auto",
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    keys: options.Keys = None,
    allow_origin: options.AllowOrigin = None,
    mend: options.Mends = None,
    tap: options.Tap = False,
    kv_memory: options.KvMemory = "1GiB",
    max_model_len: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of a prompt and its answer.", show_default="the model's"),
    ] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 64,
    max_step_tokens: Annotated[int, typer.Option(min=1, help="Tokens per step.")] = 2048,
    max_inter_token: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds that a step may take, so that answers under way go on; long prompts are cut by it. 0: any.",
        ),
    ] = 0.25,
    max_prefill_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of one prompt in a step.", show_default="what the step has left"
        ),
    ] = None,
    max_inflight: Annotated[
        int, typer.Option(min=1, help="Sequences that run or wait; more are told to come back.")
    ] = 256,
    max_wait: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds that a request waits for its turn, then 503; 0: any time."
        ),
    ] = 60.0,
    max_body: options.MaxBody = "4MiB",
    grace: Annotated[
        int | None,
        typer.Option(
            min=0, help="Seconds that running requests have at shutdown.", show_default="no limit"
        ),
    ] = None,
    block_size: options.BlockSize = 16,
    tier: TierLines = None,
    tier_file: TierFile = None,
    tier_key_file: TierKeyFile = None,
    dtype: options.Dtype = "auto",
    gguf: options.GgufLines = None,
    lora: options.Loras = None,
    passages: options.Passages = None,
    passage_capture: options.PassageCapture = None,
    passage_rows: options.PassageRows = None,
    passage_texts: options.PassageTexts = None,
    passage_tier: options.PassageTier = None,
    passages_target: options.PassagesTarget = 0.98,
    passages_audit: options.PassagesAudit = 50,
    events: Annotated[
        str | None,
        typer.Option(
            help="Publish KV events at tcp://HOST:PORT; replays are answered at the next port.",
            show_default=False,
        ),
    ] = None,
    events_in_clear: Annotated[
        bool,
        typer.Option(
            "--events-in-clear", help="Let --events be beyond loopback: anybody there reads them."
        ),
    ] = False,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Replicas behind the router.", show_default=False),
    ] = None,
    max_replicas: Annotated[
        int | None,
        typer.Option(
            min=1, help="Largest number of replicas; the load decides.", show_default=False
        ),
    ] = None,
    router: options.Router = "prefix",
    load_limit: options.LoadLimit = 1.25,
    as_json: options.AsJson = False,
) -> None:
    """Serve a model as OpenAI's API does; prefixes that requests share are computed and read once.

    Clients ask at /v1/chat/completions, /v1/completions, /v1/models. At / is a page that shows the cache, at
    /metrics what Prometheus reads, at /v1/cache what is cached and why. It listens on loopback, without keys; beyond
    it there have to be some: from --keys, or one in QUIRE_API_KEY. Each name of a key is a tenant, and no two tenants
    share anything. The page, /metrics and /v1/cache then need the key in QUIRE_OPERATOR_KEY.
    Events carry the tokens of prompts, unencrypted and without a key: on loopback only, unless --events-in-clear is given.
    With --replicas, Ray Serve runs engines of as much memory each, and --router says which one answers; on the cluster
    of RAY_ADDRESS, where that is in the environment.
    With --passages, a chat that brings "documents" reuses their K and V in any order, and its answer says what of it
    is approximate, once that was measured on the tenant's prompts to keep --passages-target of next tokens.
    With --mend, requests are changed before they are read, and answers say so; --tap shows each of them at /tap.
    Ctrl-C or SIGTERM: what runs is finished, nothing new is taken, and tiers get what is cached.

    [bold]Examples[/bold]

      quire serve
      quire serve --model ./my-model --kv-memory 8GiB --port 8080
      quire serve --host 0.0.0.0 --keys keys.txt
      quire serve --tier disk:./kv?capacity=20GiB
      quire serve --passages 2GiB
      quire serve --model model.gguf --gguf type_k=q8_0 --gguf type_v=q8_0
      quire serve --events tcp://127.0.0.1:5557
      quire serve --replicas 3 --tier redis://127.0.0.1:6379
    """
    require("serve", "a server")
    if generation_config not in ("auto", "quire"):
        raise ConfigError(f"--generation-config is auto or quire, got {generation_config!r}")
    check_parser(reasoning_parser)
    source_of(model)  # what is not there is said before anything is loaded
    names = name or [name_of(model)]
    adapters = adapters_of(lora or (), names)
    if adapters and passages is not None:
        raise ConfigError("--passages are of the model without adapters; give --passages or --lora")
    if events is not None and not (events_in_clear or is_local(events)):
        raise ConfigError(
            f"--events {events} is beyond loopback, where anybody could read the tokens of "
            "prompts; use tcp://127.0.0.1:PORT, or add --events-in-clear if only you reach it"
        )
    from quire.web.keys import is_loopback, is_open_to_all, read_keys
    from quire.web.mends import Mends

    Mends(mend or ())  # a wrong rule is said, too

    if keys is not None and is_open_to_all(keys):
        output.stderr().print(
            f"everybody on this machine can read {keys}; chmod 600 keeps it yours"
        )
    exposed = not is_loopback(host)
    size, limit = parse_bytes(kv_memory), parse_bytes(max_body)
    warm = {"warm": passage_tier, "warm_key": tier_key_file}
    measured = {
        "capture": passage_capture,
        "target": passages_target,
        "audit": passages_audit,
    }
    kept = made_passages(passages, passage_rows, warm, measured, passage_texts or ())
    whole = size + (0 if passages is None else parse_bytes(passages))
    wanted = Wanted(
        model=model,
        dtype=dtype,
        name=names[0],
        other_names=names[1:],
        chat_template=None
        if chat_template is None
        else read_bytes(chat_template).decode("utf-8", "replace"),
        generation_config=generation_config,
        trusts_templates=trust_request_chat_template,
        reasoning_parser=reasoning_parser,
        mends=mend or (),
        gguf=gguf or (),
        keys=read_keys(keys, exposed=exposed, origins=allow_origin or ()),
        max_inflight=max_inflight,
        max_wait=max_wait,
        max_body=limit,
        passage_texts=passage_texts or (),
        tiers=tier,
        tier_file=tier_file,
        tier_key_file=tier_key_file if tier or tier_file or passage_tier is None else None,
        engine={
            "kv_memory": size,
            "block_size": block_size,
            "max_running": max_running,
            "max_step_tokens": max_step_tokens,
            "max_inter_token_s": max_inter_token or None,
            "max_prefill_tokens": max_prefill_tokens,
            "max_model_len": max_model_len,
            "passages": kept,
            "adapters": adapters,
        },
    )
    free, most = available_bytes(), max(replicas or 1, max_replicas or 1)
    if free is not None and whole * most > free:
        each = f", {most:,} times," if most > 1 else ""
        raise ConfigError(
            f"--kv-memory{' and --passages are' if kept else ' is'} {format_bytes(whole)}{each} and "
            f"{format_bytes(free)} are available; give less"
        )
    if replicas is not None:
        plan = {
            "num_replicas": replicas,
            "max_replicas": max_replicas,
            "max_inflight": max_inflight,
        }
        if tap:
            raise ConfigError("replicas have no page of --tap; start quire tap before them")
        plan |= {"router": router, "load_limit": load_limit, "running": max_running}
        plan |= {"max_body": limit, "grace_s": DRAIN_S if grace is None else grace}
        if events is not None:
            raise ConfigError("replicas tell their events to their router; leave --events out")
        if os.environ.get("RAY_ADDRESS") and not events_in_clear:
            raise ConfigError(
                "on a cluster, replicas tell the tokens of prompts to routers on other machines, unencrypted: "
                "add --events-in-clear if only you reach its network, or unset RAY_ADDRESS"
            )
        run_replicas = load_offered("quire.replicas", "ray")
        if run_replicas is None:
            raise ConfigError(lacking_package("--replicas", "quire-router"))
        run_replicas(wanted, plan, (host, port), as_json=as_json)
        return
    if max_replicas is not None:
        raise ConfigError("--max-replicas needs --replicas, how many there are at least")
    around = with_page(wanted.name, wanted.keys, limit) if tap else None
    listening, url = listen(host, port, SLOW_S)
    with opened_engine(wanted, events) as (engine, told):
        from quire.serve.server import serve as run

        def service_of(running: "AsyncEngine") -> "ServedModel":
            said = {"url": url, "model": wanted.name, "max_model_len": engine.max_model_len} | told
            if as_json:
                output.print_json(said)
            else:
                output.stdout().print(
                    f"{wanted.name} at {url}/v1, its cache at {url}", highlight=False
                )
            sys.stdout.flush()
            return wanted.service(running)

        run(engine, service_of, listening, grace, around)


class Wanted(NamedTuple):
    """The settings of a server: a model as `load` takes it, its names, API keys, limits, tiers.

    `engine` are options of `Engine`, `chat_template` is the text of one, None for the model's. `generation_config` is
    "auto", for the model's sampling parameters, or "quire"; `gguf` are lines of `--gguf`.
    """

    model: str
    dtype: str
    name: str
    keys: "ApiKeys"
    max_inflight: int
    max_wait: float
    max_body: int
    tiers: Sequence[str] | None
    tier_file: Path | None
    tier_key_file: Path | None
    engine: Mapping[str, Any]
    other_names: Sequence[str] = ()
    chat_template: str | None = None
    generation_config: str = "auto"
    reasoning_parser: str = "auto"
    gguf: Sequence[str] = ()
    trusts_templates: bool = False
    mends: Sequence[str] = ()
    passage_texts: Sequence[Path] = ()

    def service(self, running: "AsyncEngine") -> "ServedModel":
        """Return an engine as a server has it."""
        from quire.serve.service import Bounds, ServedModel
        from quire.web.mends import Mends

        bounds = Bounds(
            max_inflight=self.max_inflight,
            max_wait_s=self.max_wait or None,
            max_body=self.max_body,
            slow_s=SLOW_S,
        )
        is_own = self.generation_config == "auto"
        sampling: dict[str, Any] = running.engine.own_sampling if is_own else {}
        made = ServedModel(
            running, self.name, self.keys, bounds, other_names=self.other_names, sampling=sampling
        )
        made.read_reasoning(self.reasoning_parser)
        made.mends = Mends(self.mends, made.log.num_by_mend)
        if self.trusts_templates:
            made.reader.trust_templates()
        return made


@contextmanager
def opened_engine(
    wanted: Wanted, events: str | None
) -> Generator[tuple["Engine", dict[str, str | None]]]:
    """Open an engine over its tiers, and, with `events`, what publishes there; yield it and the endpoints of these."""
    for name, value in OF_SHAPES.items():
        os.environ.setdefault(name, value)
    with (
        opened(
            wanted.tiers, wanted.tier_file, wanted.tier_key_file, close_timeout_s=SAVING_S
        ) as stack,
        ExitStack() as publishing,
    ):
        with output.progress(f"loading {wanted.model}"):
            from quire.engines.loop import Engine
            from quire.exchange import EventLog
            from quire.foresight import LiveCurve
            from quire.observe.heat import Heat

            if wanted.chat_template is not None:
                check_template(wanted.chat_template)
            loaded, tokenizer, how = load_engine_model(wanted.model, wanted.dtype, wanted.gguf)
            if wanted.chat_template is not None:
                tokenizer.chat_template = wanted.chat_template
            given = dict(wanted.engine)
            if wanted.passage_texts:
                given["passages"] = given["passages"].on_texts(tokenizer, wanted.passage_texts)
            engine = Engine(
                loaded,
                tokenizer,
                watchers=[LiveCurve(), Heat(), *([EventLog(MAX_EVENTS)] if events else [])],
                tiers=stack,
                **given,
            )
        if how:
            output.stderr().print(f"computed by {how}", highlight=False, soft_wrap=True)
        told: dict[str, str | None] = {}
        if events is not None:
            from quire.observe.zmq import Publisher, beside

            publisher = publishing.enter_context(
                Publisher(engine.manager, events, replay=beside(events))
            )
            told = {"events": publisher.endpoint, "events_replay": publisher.replay}
        yield engine, told
