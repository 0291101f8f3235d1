"""The gain that each mend promises beside the gain on a real vLLM, in points of the hit rate.

    python benchmarks/mends_on_vllm.py --model FOLDER

Makes a log with one cause for each mend and one with three causes, mends it, and asks both logs of vLLM, one request at
a time and each log under a `cache_salt` of its own. vLLM is run by `.venv-vllm` (`benchmarks/peers/vllm_environment.py`).
"""

import argparse
import json
import os
import sys
import tempfile
import time
import unicodedata
from contextlib import closing
from pathlib import Path
from random import Random

import httpx
from lint_beside_servers import VLLM_BLOCK, WORDS

from quire.cli.models import load_tokenizer
from quire.cli.server_process import ServerProcess
from quire_sim.caches import CacheOptions, ExactTokens
from quire_sim.cli.lint_mends import Replaying, chosen_mends, mends_of
from quire_sim.lint import lint_log
from quire_sim.lint.mends import mended
from quire_sim.lint.rewrites import ChangingParts
from quire_sim.logs import open_log
from quire_sim.rendering import PromptRenderer

NAMES = ("Ann Reed", "Bob Stone", "Cleo Hill", "Dan Wood", "Eve Lake", "Finn Moor")


def sentence(source, words=12):
    """Return a made-up sentence."""
    return " ".join(source.choices(WORDS, k=words)).capitalize() + "."


def line(kind, number, source):
    """Return a line that breaks a prefix, for a cause."""
    if kind == "time":
        return f"Now: 2026-11-{1 + number:02}T08:{number:02}:30Z"
    if kind == "identifier":
        return f"Request req_{source.getrandbits(60):015x}"
    if kind == "user-data":
        return f"User name: {NAMES[number % 6]} {number}"
    if kind == "whitespace":
        return "Be brief" + " " * (1 + number) + "and kind."
    if kind == "line-ends":
        ends = ["\r\n" if number >> n & 1 else "\n" for n in range(5)]
        return "".join(word + end for word, end in zip(WORDS, ends, strict=False))
    letters = "éüñôç"
    return " ".join(unicodedata.normalize("NFD", each) if number >> n & 1 else each for n, each in enumerate(letters))  # fmt: skip


def made_log(kinds, num):
    """Return bodies of chats whose system prompts have lines of these causes, or passages in another order."""
    source = Random(7)
    rules = [" ".join(sentence(source) for _ in range(4)) for _ in range(6)]
    bodies = []
    for number in range(num):
        parts = list(rules)
        if kinds == ("passage-order",):
            source.shuffle(parts)
        else:
            for place, kind in enumerate(kinds):
                parts.insert(1 + 2 * place, line(kind, number, source))
        said = [{"role": "system", "content": "\n\n".join(parts)}, {"role": "user", "content": sentence(source, 9)}]  # fmt: skip
        bodies.append({"model": "m", "messages": said})
    return bodies


def asked(client, bodies, salt):
    """Return the share of prompt tokens that vLLM found in its cache."""
    tokens = cached = 0
    for body in bodies:
        sent = body | {"max_tokens": 1, "temperature": 0, "cache_salt": salt}
        answer = client.post("/v1/chat/completions", json=sent)
        answer.raise_for_status()
        usage = answer.json()["usage"]
        tokens += usage["prompt_tokens"]
        cached += (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return cached / tokens


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tools", default=".", help="the folder with .venv-vllm")
    args = parser.parse_args()
    command = [str(Path(args.tools) / ".venv-vllm/bin/python"), "-m", "vllm.entrypoints.openai.api_server"]  # fmt: skip
    command += ["--model", args.model, "--served-model-name", "m", "--enforce-eager"]
    command += ["--max-model-len", "2048", "--block-size", str(VLLM_BLOCK), "--enable-prompt-tokens-details"]  # fmt: skip
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # fmt: skip
    environment |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "PYTHONPATH": ""}
    renderer = PromptRenderer(load_tokenizer(args.model))
    cases = [("time",), ("identifier",), ("user-data",), ("whitespace",), ("line-ends",), ("unicode",),
             ("passage-order",), ("time", "user-data", "whitespace")]  # fmt: skip
    worst = 0.0
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as scratch,
        closing(ServerProcess(command, environment)) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=300) as client,
    ):
        print(f"vLLM started after {time.monotonic() - started:.0f} s", flush=True)
        for kinds in cases:
            path = Path(scratch) / "log.jsonl"
            bodies = made_log(kinds, args.requests)
            path.write_text("".join(json.dumps(each) + "\n" for each in bodies))
            learned = ChangingParts()
            log = open_log(path)
            report = lint_log(log, learned=learned)
            mends = chosen_mends(report, set(), [])
            options = CacheOptions(block_size=VLLM_BLOCK)
            how = Replaying("vllm", options, ExactTokens(renderer), renderer, 1.0)
            saved = mends_of(log, mends, learned, how, None)
            was = asked(client, bodies, f"{kinds} as it is")
            chosen = [(each.name, [mend for mend in mends if mend.name == each.name], each.after) for each in saved.mends]  # fmt: skip
            if len(chosen) > 1:
                chosen.append(("together", mends, saved.together))
            for name, some, after in chosen:
                new = [mended(each, some, learned).body for each in log]
                real = asked(client, new, f"{kinds} {name}") - was
                promised = after.hit_tokens / after.prompt_tokens
                promised -= saved.before.hit_tokens / saved.before.prompt_tokens
                worst = max(worst, abs(promised - real))
                print(f"{', '.join(kinds):32} {name:14} {was:6.1%} before, promised {promised:+7.2%}, on vLLM {real:+7.2%}, "
                      f"{100 * (promised - real):+.2f} points", flush=True)  # fmt: skip
    print(f"largest difference: {100 * worst:.2f} points, after {time.monotonic() - started:.0f} s")
    sys.exit(worst > 0.01)


if __name__ == "__main__":
    main()
