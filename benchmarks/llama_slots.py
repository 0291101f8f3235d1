"""Effects of `id_slot` on conversations of llama-server, and on requests beside them.

python benchmarks/peers/llama_server.py MODEL.gguf    # makes .llama/llama-server
python benchmarks/llama_slots.py .llama/model.gguf

computed  prompt tokens that four conversations in turn compute from their second turn on: where the server chooses a
          slot, with its default `--slot-prompt-similarity` of 0.1 and with 0.8, and with an `id_slot` for each
          conversation, of which the least recently used gives way
beside    whether a greedy answer stays as it is alone while another request names the same slot, and finds its prompt
          among the states that the server saved (`--cache-ram`, on by default)
"""

import argparse
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from quire.cli.server_process import ServerProcess

TALKS, OWN, MORE, TURNS = 4, 96, 32, 3
"""Conversations, tokens of one's own at first, tokens that each turn adds, and turns."""

COUNT = "Count: one, two, three, four, five, six, seven, eight, nine, ten,"
SAID = "The weather of tomorrow will be bright in the north, and there will be rain in the south. "


def asked(server: ServerProcess, prompt: str | list[int], num_new: int, slot: int | None) -> Any:
    """Return an answer to a greedy completion, which may name its slot."""
    body = {"prompt": prompt, "max_tokens": num_new, "temperature": 0}
    body |= {} if slot is None else {"id_slot": slot}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310 - of this script
        return json.load(answer)


def tokens(seed: object, num: int) -> list[int]:
    """Return random token ids, the same ones for the same seed."""
    source = Random(repr(seed))
    return [source.randrange(1000, 20_000) for _ in range(num)]


def computed(server: ServerProcess, slots: int | None, common: int) -> int:
    """Return the prompt tokens computed from the second turn on; `slots` are the server's, None to let it choose."""
    prompts = [tokens("head", common) + tokens(at, OWN) for at in range(TALKS)]
    used: dict[int, int] = {}  # slot by conversation, the least recently used first
    num = 0
    for turn in range(TURNS):
        for at, prompt in enumerate(prompts):
            slot = None
            if slots is not None:
                free = [each for each in range(slots) if each not in used.values()]
                slot = used.pop(at) if at in used else (free or [used.pop(next(iter(used)))])[0]
                used[at] = slot
            found = asked(server, prompt, 1, slot)["timings"]["prompt_n"]
            num += found if turn else 0
            prompts[at] = prompt + tokens((at, turn), MORE)
    return num


def beside(server: ServerProcess) -> Iterator[str]:
    """Yield an answer alone, and the same one while another request names its slot."""
    yield asked(server, COUNT, 60, 1)["choices"][0]["text"]
    asked(server, SAID * 4, 2, 0)
    found: list[str] = []

    def count() -> None:
        found.append(asked(server, COUNT, 60, 0)["choices"][0]["text"])

    counting = threading.Thread(target=count)
    counting.start()
    time.sleep(0.5)
    asked(server, SAID * 4 + "And then", 2, 0)
    counting.join()
    yield found[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--server", type=Path, default=Path(".llama/llama-server"))
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    command = [given.server, "-m", given.model, "--threads", given.threads, "--host", "127.0.0.1"]

    def started(*more: object) -> closing[ServerProcess]:
        return closing(ServerProcess([*map(str, command), *map(str, more)], None))

    print(f"computed, of at least {TALKS * (TURNS - 1) * MORE}: choice, choice with 0.8, id_slot")
    for slots, memory, common in product((4, 2), ("--no-kv-unified", "--kv-unified"), (0, 192)):
        nums: list[int] = []
        for similarity, pinned in ((0.1, None), (0.8, None), (0.1, slots)):
            more = ("-np", slots, "-c", slots * 1024, memory, "-sps", similarity)
            with started(*more) as server:
                nums.append(computed(server, pinned, common))
        print(f"  {slots} slots {memory}, {common} common tokens: {nums}", flush=True)
    for ram in (8192, 0):
        with started("-np", 2, "-c", 2048, "--cache-ram", ram) as server:
            alone, other = beside(server)
        print(f"beside, --cache-ram {ram}: {'equal' if other == alone else 'DIFFERS'}")
        print(f"  alone  {alone!r}\n  beside {other!r}")


if __name__ == "__main__":
    main()
