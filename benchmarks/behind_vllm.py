"""vLLM on a CPU alone, with its own offloading, with LMCache, and with quire: time to first token, throughput, restarts.

    python benchmarks/behind_vllm.py [--rounds 8] [--prompts 16] [--lmcache FOLDER] [--systems alone,quire]
    python benchmarks/behind_vllm.py --systems alone,quire --model FOLDER --length 3008 --host 2GiB --rounds 20 --prompts 4

Needs the environment that `benchmarks/peers/vllm_environment.py` makes; FOLDER has the package lmcache and what it needs
beside that environment (its server runs apart, as it does for engines without CUDA). All engines live at once, each in one
process, and what is not asked stands still, so each prompt goes to one after the other. The pool holds four prompts of eight:
what is asked again comes from below it. Medians; `no reuse` are 16 prompts (`--prompts`) of 480 tokens that no other shares, and
32 tokens for each, with the connector and, in turn, in the same process without it: two processes differ by more than a connector
costs (LMCache cannot be taken off; it is compared with vLLM alone). In the row `alone` both are without one: an equal pair.
Behind each round there is a rest, in which quire does
what stores it has put off; with more prompts it has to do more beside.
"""

import argparse
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from quire.config import parse_bytes

REPOSITORY = Path(__file__).parents[1]
PYTHON = Path(os.environ.get("QUIRE_VLLM", REPOSITORY / ".venv-vllm")) / "bin/python"
MODEL = REPOSITORY / "src/quire/assets/quire-tiny"
SYSTEMS = ("alone", "offloading", "lmcache", "quire")
ASKED, BLOCK = 8, 32


def connector(told, system, place, port):
    """Return the configuration of a system's connector, None for none; `told`: the options."""
    host_bytes = parse_bytes(told.host)
    if system == "alone":
        return None
    both = {"kv_role": "kv_both"}
    if system == "offloading":
        extra = {"cpu_bytes_to_use": host_bytes}
        return both | {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    if system == "lmcache":
        extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port}
        return both | {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}
    extra = {"tiers": [f"host:{host_bytes}B", f"disk:{place}?capacity=4GiB"]}
    both |= {"kv_connector": "QuireConnector", "kv_connector_module_path": "quire.engines.vllm"}
    return both | {"kv_connector_extra_config": extra}


def serve(model, length, told):
    """Answer jobs, a line of JSON each; in the environment of vLLM. `told`: of the connector."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import kv_transfer_state

    if told and told["kv_connector"].startswith("LMCache"):
        let_vllm_look_at_llvmlite()
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=length + 448,
        block_size=BLOCK,
        num_gpu_blocks_override=4 * (length // BLOCK + 2) + 1,
        max_num_seqs=4,
        dtype="float32",
        kv_transfer_config=KVTransferConfig(**told) if told else None,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    attached = scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT
    for line in sys.stdin:
        job = json.loads(line)
        with_it = attached if job["attached"] else (None, None)
        scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = with_it
        rng = random.Random(job["seed"])
        prompts = [
            {"prompt_token_ids": [rng.randrange(5, 250) for _ in range(job["length"])]}
            for _ in range(job["count"])
        ]
        params = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True)
        began = time.perf_counter()
        outs = llm.generate(prompts, params, use_tqdm=False)
        answer = {"seconds": time.perf_counter() - began}
        answer["cached"] = sum(out.num_cached_tokens for out in outs)
        print("ANSWER", json.dumps(answer), flush=True)
    llm.llm_engine.engine_core.shutdown()


def let_vllm_look_at_llvmlite():
    """LMCache imports llvmlite, whose library says that it has any attribute, `__dict__` too; vLLM's CPU worker looks into all."""
    from llvmlite.binding import ffi

    kind, function_of = type(ffi.lib), type(ffi.lib).__getattr__

    def attribute(self, name):
        if name == "__dict__":
            raise AttributeError(name)
        return function_of(self, name)

    kind.__getattr__ = attribute


class Engine:
    """One vLLM with one connector, standing still while it is not asked."""

    def __init__(self, told, system, place, port):
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # on two cores, a second process that spins takes half of one
            "VLLM_NO_USAGE_STATS": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY / "src"), told.lmcache])),
        }
        of_it = connector(told, system, place, port)
        self._length = told.length
        self._is_fixed = system == "lmcache"  # it cannot be taken off while it stores
        self.began = time.perf_counter()
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as this
        self._process = subprocess.Popen(
            [PYTHON, __file__, "--serve", json.dumps([told.model, told.length, of_it])],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            start_new_session=True,
        )
        self.first = self.ask("asked 0")  # the first answer, and how long it was to get it
        self.first_s = time.perf_counter() - self.began
        self.ask("warm", count=2, tokens=8)

    def ask(self, seed, count=1, length=None, tokens=1, *, attached=True):
        """Return how many seconds it took, and how many tokens were cached."""
        job = {"seed": seed, "count": count, "length": length or self._length, "tokens": tokens}
        job["attached"] = attached or self._is_fixed
        with suppress(BrokenPipeError, ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGCONT)
            print(json.dumps(job), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                os.killpg(self._process.pid, signal.SIGSTOP)
                return json.loads(line.removeprefix("ANSWER "))
        self._said.seek(0)
        said = self._said.read()
        reasons = re.findall(r"Error: .*|failed with error .*", said)
        raise RuntimeError(reasons[0] if reasons else said[-3000:])

    def work(self, seconds):
        """Let it do what it does behind its answers."""
        os.killpg(self._process.pid, signal.SIGCONT)
        time.sleep(seconds)
        os.killpg(self._process.pid, signal.SIGSTOP)

    def close(self):
        with suppress(ProcessLookupError, BrokenPipeError):
            os.killpg(self._process.pid, signal.SIGCONT)
            self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def lmcache_server(told, port):
    manager = {"type": "DRAM", "tag": "host", "size_gb": parse_bytes(told.host) / (1 << 30)}
    manager["eviction"] = {"eviction_policy": "LRU"}
    words = ["--port", str(port), "--chunk-size", str(BLOCK), "--l1-manager", json.dumps(manager)]
    words += ["--supported-transfer-mode", "engine_driven"]  # the one for engines on a CPU
    server = subprocess.Popen(
        [PYTHON, "-m", "lmcache.v1.multiprocess.server", *words],
        env=os.environ | {"PYTHONPATH": told.lmcache, "LMCACHE_TRACK_USAGE": "false"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for _ in range(300):
        with suppress(OSError), socket.create_connection(("localhost", port), timeout=1):
            break
        time.sleep(0.2)
    return server


def measure(engines, rounds, prompts):
    """Return figures by system, and by their name."""
    figures = {system: {} for system in engines}

    def note(name, ask):
        for system, engine in engines.items():
            answer = ask(engine)
            figures[system].setdefault(name, []).append(answer["seconds"])
            figures[system].setdefault(f"{name} cached", []).append(answer["cached"])

    for number in range(ASKED):
        note("miss", lambda engine, at=number: engine.ask(f"asked {at + 1}"))
    for engine in engines.values():
        engine.work(1)
    for number in range(ASKED):
        note("hit", lambda engine, at=number: engine.ask(f"asked {at + 1}"))
    for number in range(rounds):
        for attached in (number % 2 == 0, number % 2 == 1):
            name = "no reuse" if attached else "detached"
            seed = f"{name} {number}"
            note(
                name,
                lambda each, at=seed, to=attached: each.ask(at, prompts, 480, 32, attached=to),
            )
            for engine in engines.values():
                engine.work(0.2 * prompts / 16)
    return figures


def stored_per_token(place):
    """Return the bytes of a disk tier's records, headers included, for each token."""
    from quire.tiers import open_tier

    with open_tier(f"disk:{place}?capacity=4GiB") as tier:
        stats = tier.stats()
    return stats.num_bytes / stats.num_records / BLOCK


def show(told, figures, first_s):
    """Print the table."""
    print(
        "| system | TTFT miss, ms | TTFT hit, ms | cached | no reuse, tokens/s: best | detached | median ratio | start to first answer, s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for system, each in figures.items():
        miss, hit = (1e3 * statistics.median(each[name]) for name in ("miss", "hit"))
        cached = sum(each["hit cached"]) / (ASKED * told.length)
        without = figures.get("alone", each) if system == "lmcache" else each
        rate = told.prompts * 512 / min(each["no reuse"])
        plain = told.prompts * 512 / min(without["detached"])
        pairs = zip(without["detached"], each["no reuse"], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        print(
            f"| {system} | {miss:.0f} | {hit:.0f} | {cached:.0%} | {rate:.0f} | {plain:.0f} | {ratio:.3f} | {first_s[system]:.1f} |"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--lmcache")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--length", type=int, default=1600, help="tokens of what is asked again")
    parser.add_argument("--host", default="256MiB", help="memory of each host tier")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.serve:
        serve(*json.loads(told.serve))
        return
    asked = told.systems.split(",")
    systems = [each for each in asked if each != "lmcache" or told.lmcache]
    with socket.create_server(("localhost", 0)) as probe:
        port = probe.getsockname()[1]
    server = lmcache_server(told, port) if told.lmcache else None
    engines = {}
    with tempfile.TemporaryDirectory() as folder:
        place = f"{folder}/kv"
        try:
            for system in systems:
                try:
                    engines[system] = Engine(told, system, place, port)
                except RuntimeError as error:
                    print(f"{system} does not start: {error}")
            figures = measure(engines, told.rounds, told.prompts)
            first_s = {system: engine.first_s for system, engine in engines.items()}
            engines.pop("quire").close()
            again = engines["quire"] = Engine(told, "quire", place, port)
            show(told, figures, first_s)
            print(
                f"quire again: {again.first['cached']} of {told.length} tokens cached in its first answer, after "
                f"{1e3 * again.first['seconds']:.0f} ms, {again.first_s:.1f} s from its start (cold: {first_s['quire']:.1f} s)"
            )
        finally:
            for engine in engines.values():
                engine.close()
            if server is not None:
                server.kill()
                server.wait()
        print(f"quire: {stored_per_token(place):.0f} bytes stored for each token")


if __name__ == "__main__":
    main()
