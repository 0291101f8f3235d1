"""`quire serve --replicas N`: the server as an application of Ray Serve."""

import logging
import os
import signal
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Any

from quire.cli import output
from quire.cli.listening import listen
from quire.cli.serve import SLOW_S, Wanted, opened_engine
from quire.errors import ConfigError
from quire.extras import require

if TYPE_CHECKING:
    from quire_router.replicas import Opened

NAME = "quire"
"""Of the application, for Ray Serve."""

CLUSTER = "RAY_ADDRESS"
"""The environment's name of a cluster of Ray; without it one is started, on this machine and for this command alone."""


SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
}
"""What Ray reads of the environment, unless it is set: it reports nothing, warns of nothing, and lets replicas compute like any other process."""

LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""The same where there is no cluster: all of Ray's processes listen on loopback alone, which is what this name says on other systems only."""

LOGGING = {"log_level": "WARNING", "enable_access_log": False}


def run_replicas(
    wanted: Wanted, plan: dict[str, Any], address: tuple[str, int], *, as_json: bool
) -> None:
    """Serve `wanted` on the replicas of `ReplicaPlan(**plan)`, at an address, until Ctrl-C or SIGTERM.

    Then replicas finish running requests and write cached blocks to their tiers.
    """
    require("ray", "--replicas")
    if any(line.startswith("disk:") for line in wanted.tiers or ()):
        raise ConfigError(
            "a disk: belongs to one server; replicas share files:, redis:// or a bucket, and have host: each"
        )
    most = plan["max_replicas"] or plan["num_replicas"]
    if most < plan["num_replicas"]:
        raise ConfigError(f"--max-replicas {most} is less than --replicas {plan['num_replicas']}")
    is_alone = not os.environ.get(CLUSTER)
    listening, url = listen(*address, SLOW_S)
    listening.close()  # Ray Serve binds it; who has it already was told
    port = int(url.rpartition(":")[2])
    for name, value in (SETTINGS | LOOPBACK if is_alone else SETTINGS).items():
        os.environ.setdefault(name, value)
    from quire_router.replicas import ReplicaPlan, application

    ray: Any = import_module("ray")  # whose own types are not all known
    serve: Any = import_module("ray.serve")
    cores = max((os.cpu_count() or 1) // most, 1)
    app = application(
        partial(opened_replica, wanted, is_alone=is_alone),
        wanted.keys,
        ReplicaPlan(**plan, num_cpus=cores),
    )
    with ExitStack() as held:
        with output.progress("starting Ray"):
            own = {"include_dashboard": False, "num_cpus": cores * most} if is_alone else {}
            held.callback(ray.shutdown)
            try:
                ray.init(logging_level="ERROR", log_to_driver=False, **own)
            except ConnectionError as error:
                raise ConfigError(
                    f"no cluster of Ray answers as {CLUSTER} says: {_reason(error)}"
                ) from error
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, _end)
        with output.progress(f"loading {wanted.model}"):
            held.callback(serve.delete, NAME)
            serve.start(http_options={"host": address[0], "port": port}, logging_config=LOGGING)
            try:
                serve.run(app, name=NAME, logging_config=LOGGING)
            except RuntimeError as error:
                raise ConfigError(f"no replica begins: {_reason(error)}") from error
        if as_json:
            output.print_json({"url": url, "model": wanted.name, "router": plan["router"]})
        else:
            count = plan["num_replicas"] if most == plan["num_replicas"] else f"up to {most}"
            output.stdout().print(f"{wanted.name} at {url}/v1, {count} replicas", highlight=False)
        sys.stdout.flush()
        Event().wait()  # until a signal


@contextmanager
def opened_replica(wanted: Wanted, *, is_alone: bool) -> Generator["Opened"]:
    """Open one replica's server; on one machine, events are published on loopback."""
    host = "127.0.0.1" if is_alone else import_module("ray.util").get_node_ip_address()
    with opened_engine(wanted, f"tcp://{host}:0") as (engine, told):
        from quire.engines.loop import AsyncEngine
        from quire.serve.app import make_app
        from quire_router.replicas import Opened

        running = AsyncEngine(engine)
        service = wanted.service(running)
        events = f"{told['events']},{told['events_replay']}"
        try:
            yield Opened(make_app(service), lambda: running.is_alive, events)
        finally:
            running.close()


def _end(_number: int, _frame: FrameType | None) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # until all has ended
    sys.exit(0)


def _reason(error: BaseException) -> str:
    """Return the last line of output of a replica that failed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
