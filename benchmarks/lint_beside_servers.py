"""Predicted cached tokens beside the servers' own counts, request by request.

    python benchmarks/lint_beside_servers.py vllm --requests 3000
    python benchmarks/lint_beside_servers.py quire --requests 3000
    python benchmarks/lint_beside_servers.py llama.cpp --requests 1000 --model .llama/model.gguf --tokenizer FOLDER
    python benchmarks/lint_beside_servers.py vllm --at-once 4

Starts the server with a small pool and `quire tap` before it, asks made-up chats with answers of one token, reads the
tap's log, renders each chat with the model's template, and sends it through the cache of that server. Prints how many
requests are equal and the difference of the totals in points, and shows each request that differs. vLLM is run by
`.venv-vllm` (`benchmarks/peers/vllm_environment.py`), llama-server by `.llama` (`benchmarks/peers/llama_server.py`).
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from random import Random

import httpx

from quire import demo_model
from quire.cli.models import load_tokenizer
from quire.cli.server_process import ServerProcess
from quire_sim.caches import CacheOptions, ExactTokens, cache_of, cache_report, predictions
from quire_sim.logs import open_log
from quire_sim.rendering import PromptRenderer

WORDS = [
    "lighthouse",
    "keeper",
    "shelf",
    "rules",
    "harbour",
    "answer",
    "short",
    "river",
    "stone",
    "letter",
    "winter",
    "boat",
    "lamp",
]

VLLM_BLOCK = 32
"""Tokens of a block of vLLM; its kernels for CPUs take multiples of 32."""


def main():
    """Run one server and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("server", choices=("quire", "vllm", "llama.cpp"))
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=256, help="blocks of 16 tokens of the pool")
    parser.add_argument("--model", help="a folder or a GGUF file; else quire-tiny")
    parser.add_argument("--tokenizer", help="a folder, where the model is a GGUF file")
    parser.add_argument("--dtype", default="bfloat16", help="of quire's weights and KV")
    parser.add_argument("--max-tokens", type=int, default=1)
    parser.add_argument("--words", type=int, default=1, help="so many times as long texts")
    parser.add_argument("--stream", action="store_true", help="ask for streamed answers")
    parser.add_argument("--tools", default=".", help="the folder with .venv-vllm and .llama")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="keep the log here")
    parser.add_argument(
        "--replay", action="store_true", help="compare the kept log, without a server"
    )
    args = parser.parse_args()
    args.model = args.model or str(demo_model())
    with tempfile.TemporaryDirectory() as scratch:
        log = args.log or Path(scratch) / "log.jsonl"
        if not args.replay:
            log.unlink(missing_ok=True)
            recorded(args, log)
        sys.exit(not compared(args, log))


def recorded(args, log):
    """Ask the server through `quire tap`, which writes the log."""
    chats = made_chats(args.requests, args.seed, 3, args.words)
    command, environment = commands(args)
    started = time.monotonic()
    with closing(ServerProcess(command, environment)) as server:
        relay = [sys.executable, "-m", "quire", "tap", "--log", str(log)]
        relay += ["--upstream", f"http://127.0.0.1:{server.port}", "--private"]
        with closing(ServerProcess(relay, None)) as tap:
            print(f"started after {time.monotonic() - started:.0f} s", flush=True)
            asyncio.run(ask(tap.port, chats, args))
            time.sleep(1.0)
    print(f"asked after {time.monotonic() - started:.0f} s", flush=True)


def commands(args):
    """Return the command of a server with a small pool, and its environment."""
    model, tools = args.model, Path(args.tools)
    if args.server == "quire":
        size = token_bytes(model, args.dtype) * 16 * args.blocks
        words = ["-m", "quire", "serve", "--model", model, "--name", "m", "--kv-memory", str(size)]
        return [sys.executable, *words, "--dtype", args.dtype], None
    if args.server == "vllm":
        words = [
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            model,
            "--served-model-name",
            "m",
            "--enforce-eager",
            "--max-model-len",
            "2048",
        ]
        words += [
            "--block-size",
            str(VLLM_BLOCK),
            "--num-gpu-blocks-override",
            str(args.blocks * 16 // VLLM_BLOCK),
        ]
        words += ["--enable-prompt-tokens-details", "--max-num-batched-tokens", "2048"]
        more = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        more |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "PYTHONPATH": ""}
        return [str(tools / ".venv-vllm/bin/python"), *words], more
    words = [
        "-m",
        model,
        "--threads",
        "1",
        "--host",
        "127.0.0.1",
        "--ctx-size",
        "8192",
        "--alias",
        "m",
    ]
    return [str(tools / ".llama/llama-server"), *words, "--cache-ram", "64"], None


def token_bytes(model, dtype):
    """Return the bytes of K and V of a token."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    size = config.hidden_size // config.num_attention_heads
    item = getattr(torch, dtype).itemsize
    return 2 * item * config.num_hidden_layers * config.num_key_value_heads * size


def text(source, low, high):
    """Return made-up words."""
    return " ".join(source.choice(WORDS) for _ in range(source.randint(low, high)))


def made_chats(num, seed, num_systems, times=1):
    """Return chats of several users over a few system prompts: new ones, continued ones, repeated ones."""
    source = Random(seed)
    systems = [text(source, 5 * times, 60 * times) for _ in range(num_systems)]
    open_chats, asked = [], []
    for _ in range(num):
        kind = source.random()
        if not open_chats or kind < 0.4:
            open_chats.append([{"role": "system", "content": source.choice(systems)}])
        place = source.randrange(max(len(open_chats) - 12, 0), len(open_chats))
        chat = open_chats[place]
        if kind < 0.9 or len(chat) == 1:  # else it is asked once more as it is
            chat = chat[:1] if len(chat) > 8 else chat
            if len(chat) > 1:
                chat = [*chat, {"role": "assistant", "content": text(source, times, 20 * times)}]
            chat = [*chat, {"role": "user", "content": text(source, times, 25 * times)}]
        open_chats[place] = chat
        asked.append(chat)
    return asked


async def ask(port, chats, args):
    """Ask all chats, so many at once."""
    waiting = iter(chats)

    async def client(http):
        for chat in waiting:
            body = {"model": "m", "messages": chat, "max_tokens": args.max_tokens, "temperature": 0}
            if args.stream:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            answer = await http.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body)
            answer.raise_for_status()

    async with httpx.AsyncClient(timeout=600) as http:
        await asyncio.gather(*(client(http) for _ in range(args.at_once)))


def compared(args, log):
    """Print the comparison; return whether it is as it should be."""
    prompts = ExactTokens(PromptRenderer(load_tokenizer(args.tokenizer or args.model)))
    capacity = args.blocks * 16
    if args.server == "llama.cpp":
        capacity = (64 << 20) // 23_053
    size = VLLM_BLOCK if args.server == "vllm" else None
    cache = cache_of(args.server, CacheOptions(capacity_tokens=capacity, block_size=size))

    found = list(predictions(open_log(log, format="requests"), cache, prompts.prompt))
    report = cache_report(args.server, found)
    wrong = [each for each in found if each.told_prompt_tokens != each.hit.prompt_tokens]
    print(f"{args.server}: {report.told} requests, {args.at_once} at once; {report.equal} equal "
          f"({report.equal / report.told:.2%}), predicted {report.predicted_tokens:,} of {report.prompt_tokens:,}, "
          f"told {report.told_hit_tokens:,}, {report.points_off:+.3f} points; lost {report.lost}; "
          f"{len(wrong)} prompts of another length")  # fmt: skip
    for each in found:
        if each.differs:
            print(f"  line {each.hit.row}: {each.hit.prompt_tokens} tokens, seen {each.hit.seen_tokens}, "
                  f"predicted {each.hit.hit_tokens} ({each.hit.why or 'all'}), told {each.told_hit_tokens}: "
                  f"{each.differs}")  # fmt: skip
    share = 1.0 if args.at_once == 1 else 0.98
    return report.equal >= share * report.told and abs(report.points_off or 0) <= 0.5


if __name__ == "__main__":
    main()
