"""The server's CPU time for a refresh of its page, under load, and pictures of the page in headless Chromium.

    python benchmarks/page_load.py [--running 64] [--nodes 10000] [--refreshes 20] [--shots DIR] [--json]

A server of this process has 40 tenants, a host tier, so many running requests and a prefix tree of so many nodes. Real
requests run for some seconds, then none, then the long ones. Then a step of the engine is a pause that computes nothing, so that the CPU time of the
process is the server's own: first while nobody asks, then while a client of another process refreshes as the page does
(`/v1/cache?since=...` each time, and the tree with each fourth one). With `--shots`, Chromium opens the page in three looks
(dark, light, phone) and each is saved as a picture, with what goes beyond the window's width.
"""

import argparse
import asyncio
import base64
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx

from quire import Scope, demo_model
from quire.cli.listening import listen
from quire.engines.loop import AsyncEngine, Engine, SamplingParams
from quire.foresight import LiveCurve
from quire.observe.heat import Heat, TreePicture
from quire.serve.server import ModelServer
from quire.serve.service import Bounds, ServedModel
from quire.web.keys import ApiKeys

NUM_TENANTS, OPERATOR = 40, "the-operators-own-key"
LOOKS = (("dark", "dark", 1280), ("light", "light", 1280), ("phone", "light", 390))
HEAD = {"Authorization": f"Bearer {OPERATOR}"}
REFRESH = """
import json, sys, time, urllib.request
url, key, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
def asked(path):
    asked = urllib.request.Request(url + path, headers={"Authorization": "Bearer " + key})
    return json.loads(urllib.request.urlopen(asked).read())
since = asked("/v1/cache")["samples"][-1]["at"]
for at in range(count):
    state = asked(f"/v1/cache?since={since}")
    since = state["samples"][-1]["at"] if state["samples"] else since
    if at % 4 == 0: asked("/v1/cache/tree")
    time.sleep(2)
"""


@contextmanager
def served(max_running):
    """Serve quire-tiny to many tenants."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype="float32").eval()
    engine = Engine(
        model, AutoTokenizer.from_pretrained(demo_model()), num_blocks=24_000, block_size=4,
        max_running=max_running, watchers=[LiveCurve(), Heat()], tiers=["host:64MiB"],
    )  # fmt: skip
    keys = ApiKeys(
        [(f"team-{at:02}", f"key-of-team-{at:02}") for at in range(NUM_TENANTS)], OPERATOR
    )
    running = AsyncEngine(engine)
    service = ServedModel(running, "quire-tiny", keys, Bounds(max_inflight=4 * max_running))
    listening, url = listen("127.0.0.1", 0, 60.0)
    server = ModelServer(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield service, url
    finally:
        server.handle_exit(2, None)
        server.handle_exit(2, None)
        thread.join(20)
        running.close()


def plant(engine, num_nodes):
    """Fill the tree: prompts of tenants that share a head and a document, with ends of their own; some are found often."""
    draw, manager = random.Random(0), engine.manager
    heads = [[draw.randrange(256) for _ in range(64)] for _ in range(3)]
    documents = [[draw.randrange(256) for _ in range(16)] for _ in range(30)]
    num_made = 0
    while num_made < num_nodes:
        tenant = f"team-{int(draw.paretovariate(1)) % NUM_TENANTS:02}"
        scope = engine.scope(Scope(tenant=tenant))
        document = documents[min(int(draw.paretovariate(0.6)) - 1, 29)]
        own = [draw.randrange(256) for _ in range(4)]
        for _ in range(1 + (draw.random() < 0.2) * draw.randrange(1, 6)):
            prompt = [*heads[draw.randrange(3) % 2], *document, *own, 7]
            seq = manager.open(prompt, scope)
            manager.reserve(seq, len(prompt) - seq.num_cached)
            manager.take_copies()
            manager.commit(seq, prompt[seq.num_cached :])
            manager.close(seq)
        num_made += 1
    return sum(1 for _ in manager.kernel.tree.nodes())


async def load(service, num_running, seconds):
    """Run requests of all tenants, some short and some long, and leave the long ones running."""
    long = SamplingParams(max_tokens=1000, ignore_eos=True, temperature=0)
    draw, tasks = random.Random(1), []

    class Asked:
        num_answers = n = 1

    async def one(tenant, prompt, params):
        with service.admitted(tenant, [prompt], Asked) as told:
            async for output in service.running.generate(
                prompt, params, scope=Scope(tenant=tenant)
            ):
                told(0, output)

    def begin(params, lengths):
        tenant = f"team-{int(draw.paretovariate(1)) % NUM_TENANTS:02}"
        prompt = [*range(100), *[draw.randrange(3) for _ in range(draw.choice(lengths))]]
        tasks.append(asyncio.create_task(one(tenant, prompt, params)))

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        begin(SamplingParams(max_tokens=draw.randrange(4, 40), ignore_eos=True), (4, 60, 200))
        await asyncio.sleep(0.2)
    await asyncio.sleep(seconds / 2)  # nothing runs
    for _ in range(num_running + 8):
        begin(long, (4, 60, 200))
    for _ in range(600):
        if service.running.engine.stats().running >= num_running:
            break
        await asyncio.sleep(0.1)
    return tasks


def pause(engine):
    """Have the engine compute nothing: its requests run on, and a step takes 20 ms of no CPU time."""

    def step():
        time.sleep(0.02)
        return []

    engine.step = step


def cpu(function):
    begun = time.process_time()
    function()
    return time.process_time() - begun


def measure(service, url, num_refreshes):
    """Return CPU seconds per refresh, and of the parts that hold the engine's thread."""
    argv = [sys.executable, "-c", REFRESH, url, OPERATOR, str(num_refreshes)]
    seconds = 10
    idle = cpu(lambda: time.sleep(seconds)) / seconds
    begun = time.monotonic()
    asked = cpu(lambda: subprocess.run(argv, check=True))
    spent = asked - idle * (time.monotonic() - begun)

    def held(engine):
        from quire.observe.overview import Overview

        overview, begun = Overview(engine.manager, engine.tiers, service.log), time.thread_time()
        overview.seen(engine)
        seen, begun = time.thread_time() - begun, time.thread_time()
        TreePicture(engine.manager).data()
        return seen, time.thread_time() - begun

    seen, tree = asyncio.run(service.running.call(held))
    return {
        "cpu_ms_per_refresh": 1000 * spent / num_refreshes,
        "engine_ms_state": 1000 * seen,
        "engine_ms_tree": 1000 * tree,
        "running": service.running.engine.stats().running,
        "state_bytes": len(httpx.get(f"{url}/v1/cache", headers=HEAD).content),
        "tree_bytes": len(httpx.get(f"{url}/v1/cache/tree", headers=HEAD).content),
        "metrics_bytes": len(httpx.get(f"{url}/metrics", headers=HEAD).content),
    }


def shots(url, folder):
    """Save the page in three looks; return its errors and what is wider than the window."""
    from websockets.sync.client import connect

    told = {}
    with tempfile.TemporaryDirectory() as home:
        argv = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={home}", "about:blank"]  # fmt: skip
        browser = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
        try:
            port = Path(home, "DevToolsActivePort")
            while not port.exists() or not port.read_text():
                time.sleep(0.1)
            pages = httpx.get(f"http://127.0.0.1:{port.read_text().split()[0]}/json/list").json()
            target = next(each for each in pages if each["type"] == "page")
            with connect(target["webSocketDebuggerUrl"], max_size=None) as socket:
                for name, scheme, width in LOOKS:
                    told[name] = look(socket, url, Path(folder, f"{name}.png"), scheme, width)
        finally:
            browser.kill()
            browser.wait()
    return told


def look(socket, url, file, scheme, width):
    """Open the page, wait for two refreshes, and save a picture of all of it."""
    errors, numbers = [], iter(range(1, 100))

    def do(method, **params):
        number = next(numbers)
        socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            said = json.loads(socket.recv())
            if said.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                errors.append(said["params"])
            if said.get("id") == number:
                return said.get("result", said)

    for domain in ("Page", "Runtime", "Network", "Log"):
        do(f"{domain}.enable")
    do("Network.setExtraHTTPHeaders", headers=HEAD)
    do("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)  # fmt: skip
    do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    do("Page.navigate", url=url)
    time.sleep(7)
    wide = "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll') && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    beyond = do("Runtime.evaluate", expression=wide, returnByValue=True)["result"]["value"]
    picture = do("Page.captureScreenshot", format="png", captureBeyondViewport=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(base64.b64decode(picture["data"]))
    return {"file": str(file), "errors": errors, "beyond_the_window": beyond}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--refreshes", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--shots")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with served(asked.running) as (service, url):
        engine = service.running.engine
        if asked.shots:
            empty = shots(url, Path(asked.shots, "empty"))
        nodes = asyncio.run(service.running.call(lambda engine: plant(engine, asked.nodes)))
        found = {"nodes": nodes}

        async def work():
            tasks = await load(service, asked.running, asked.seconds)
            await service.running.call(pause)
            found.update(await asyncio.to_thread(measure, service, url, asked.refreshes))
            if asked.shots:
                found["shots"] = {"empty": empty} | await asyncio.to_thread(shots, url, asked.shots)
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(work())
        del engine.step
    if asked.json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
        return
    for name, value in found.items():
        sys.stdout.write(
            f"{name:20} {value if not isinstance(value, float) else round(value, 2)}\n"
        )


if __name__ == "__main__":
    main()
