"""Cost of a failing tier to a real vLLM on a CPU: time to first token behind each fault.

    python benchmarks/behind_vllm_faults.py [--rounds 4]

The tokens are compared too.

Needs the environment that `benchmarks/peers/vllm_environment.py` makes. One engine (quire-tiny in float32, one process) over one
disk tier behind `quire.tiers.Faulty`. In each round prompts of 1,600 tokens are stored, the fault begins, and they are asked again,
each beside a prompt that no tier has, in the same process without the connector: that is computing. `holds`: the first request
took at most 1.5 times computing and 50 ms in every round, those that follow at most 1.1 times by their median, as for the engines of
quire (`benchmarks/tiers/stops.py`).
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from behind_vllm import BLOCK, MODEL, PROMPT, PYTHON, REPOSITORY

FOLLOWING = 4
FIRST_SHARE, FIRST_MS, NEXT_SHARE = 1.5, 50.0, 1.1
HANG_S = 2.0
FAULTS = {
    "none": {},
    "hangs": {"hangs": 1.0, "hang_s": HANG_S},
    "refuses": {"errors": 1.0},
    "answers after 50 ms": {"latency_s": 0.05},
    "flipped bits": {"corruption": 1.0},
    "short reads": {"short_reads": 1.0},
    "all of it, one in ten": {
        "hangs": 0.1,
        "hang_s": HANG_S,
        "errors": 0.1,
        "corruption": 0.1,
        "short_reads": 0.1,
        "false_hits": 0.1,
        "losses": 0.1,
    },
}


class Asked:
    """One vLLM whose connector can be taken off, over a tier that fails as it is told."""

    def __init__(self, place):
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer import kv_transfer_state

        from quire.engines.vllm import connector
        from quire.tiers import Faulty, StackSettings, TierStack, open_tier

        def open_faulty(lines, _settings):
            self.tiers = [Faulty(open_tier(line)) for line in lines]
            return TierStack(self.tiers, StackSettings(cool_down_s=0.2))

        connector.open_free = open_faulty
        told = KVTransferConfig(
            kv_role="kv_both",
            kv_connector="QuireConnector",
            kv_connector_module_path="quire.engines.vllm",
            kv_connector_extra_config={"tiers": [f"disk:{place}?capacity=1GiB"]},
        )
        self._llm = LLM(
            model=str(MODEL),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=2048,
            block_size=BLOCK,
            num_gpu_blocks_override=2 * (PROMPT // BLOCK + 2)
            + 1,  # what is asked again is not there
            max_num_seqs=1,
            dtype="float32",
            kv_transfer_config=told,
        )
        self._scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        self._state = kv_transfer_state
        self._attached = self._scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT
        self.stack = self._scheduler.connector._side.stack

    def ask(self, seed, *, attached=True):
        """Return milliseconds to the first token, the token, and how many tokens were cached."""
        from vllm import SamplingParams

        with_it = self._attached if attached else (None, None)
        self._scheduler.connector, self._state._KV_CONNECTOR_AGENT = with_it
        rng = random.Random(seed)
        prompt = {"prompt_token_ids": [rng.randrange(5, 250) for _ in range(PROMPT)]}
        began = time.perf_counter()
        (out,) = self._llm.generate(
            [prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False
        )
        took_ms = 1e3 * (time.perf_counter() - began)
        return took_ms, out.outputs[0].token_ids[0], out.num_cached_tokens

    def break_it(self, plan):
        from quire.tiers import FaultPlan

        for tier in self.tiers:
            tier.plan = FaultPlan(**plan)

    def mend(self):
        """Take the fault away, and wait until the tier is trusted again."""
        self.break_it({})
        time.sleep(HANG_S)
        for turn in range(200):
            if self.stack.stats().tiers[0].reading == "closed":
                return
            self.ask(f"mended {turn}")
            time.sleep(0.1)
        raise RuntimeError("the tier is still left alone a while after its fault has ended")


def measure(asked, plan, rounds, name):
    """Return milliseconds of computing, of first requests, and ratios of following ones; whether tokens are the same."""
    computed, first, ratios, is_same, cached = [], [], [], True, 0
    for number in range(rounds):
        seeds = [f"{name} {number} {at}" for at in range(FOLLOWING + 1)]
        wanted = [asked.ask(seed)[1] for seed in seeds]
        asked.stack.drain(10)
        asked.break_it(plan)
        for at, seed in enumerate(seeds):
            plain_ms, _, _ = asked.ask(f"{seed} cold", attached=False)
            took_ms, token, num_cached = asked.ask(seed)
            is_same &= token == wanted[at]
            cached += num_cached
            computed.append(plain_ms)
            if at:
                ratios.append(took_ms / plain_ms)
            else:
                first.append(took_ms)
        asked.mend()
    return computed, first, ratios, is_same, cached / (rounds * len(seeds) * PROMPT)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    told = parser.parse_args()
    if Path(sys.executable).absolute() != PYTHON.absolute():
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "PYTHONPATH": str(REPOSITORY / "src"),
        }
        command = [PYTHON, __file__, *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=os.environ | environment, check=False).returncode)
    with tempfile.TemporaryDirectory() as folder:
        asked = Asked(f"{folder}/kv")
        for turn in range(6):
            asked.ask(f"warm {turn}")
        print(
            "| what | computed ms | first ms | worst first ms | following ratio | cached | same tokens | holds |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for name, plan in FAULTS.items():
            computed, first, ratios, is_same, cached = measure(asked, plan, told.rounds, name)
            usual_ms, ratio = median(computed), median(ratios)
            holds = max(first) <= FIRST_SHARE * usual_ms + FIRST_MS and ratio <= NEXT_SHARE
            print(
                f"| {name} | {usual_ms:.0f} | {median(first):.0f} | {max(first):.0f} | {ratio:.2f} | {cached:.0%} | "
                f"{'yes' if is_same else 'NO'} | {'yes' if holds and is_same else 'NO'} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
