"""`quire doctor`: what is installed, what is missing, and how to get it."""

import importlib.util
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, distributions, version
from typing import Any

from rich.table import Column
from rich.text import Text

from quire._version import __version__
from quire.cli.options import AsJson
from quire.cli.output import print_json, progress, stdout
from quire.cli.tables import facts_table, plain_table
from quire.config import available_bytes, format_bytes, memory_bytes
from quire.extras import COMMANDS, DISTRIBUTION, DISTRIBUTIONS, EXTRAS, install

BASE = ("numpy", "msgspec")
"""Packages of the base install."""

_OPTIONAL = (DISTRIBUTIONS.get(name, name) for each in EXTRAS.values() for name in each.modules)
PACKAGES = tuple(dict.fromkeys((*BASE, *_OPTIONAL)))
IMPORTED_AS: dict[str, str] = {package: module for module, package in DISTRIBUTIONS.items()}


def doctor(as_json: AsJson = False) -> None:
    """Show installed packages, the use of each extra, and the machine.

    Works with nothing but the base install and the cli extra.

    [bold]Examples[/bold]

      quire doctor
      quire doctor --json
    """
    with progress("looking at the devices"):
        found = examine()
    if as_json:
        print_json(found)
        return
    console = stdout()
    console.print()
    console.print(facts_table(_facts(found)))
    console.print()
    table = plain_table(Column("extra or part"), Column("gives"), Column())
    for name, extra in found["extras"].items():
        missing = ", ".join(extra["missing"])
        state = Text(f"missing: {missing}", "yellow") if missing else Text("there", "green")
        table.add_row(name, extra["purpose"], state)
    for name, part in found["parts"].items():
        state = Text("there", "green") if part["installed"] else Text("not installed", "yellow")
        table.add_row(name, f"the commands {', '.join(part['commands'])}", state)
    console.print(table)
    for extra in found["extras"].values():
        if extra["missing"]:
            console.print(Text.assemble("to get it:  ", (extra["install"], "bold")))


def examine() -> dict[str, Any]:
    """Return versions, extras and devices as plain data."""
    versions = {name: _version(name) for name in PACKAGES}
    extras: dict[str, Any] = {}
    for name, extra in EXTRAS.items():
        packages = [DISTRIBUTIONS.get(each, each) for each in extra.modules]
        missing = [package for package in packages if versions[package] is None]
        about = {"purpose": extra.purpose, "install": install(name)}
        extras[name] = {"packages": packages, "missing": missing} | about
    return {
        "quire": __version__,
        "installed_as": _installed_as(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": versions,
        "extras": extras,
        "parts": _parts(),
        "cpu_cores": _cpu_cores(),
        "memory_bytes": _memory_bytes(),
    } | _devices()


def _version(package: str) -> str | None:
    try:
        module = IMPORTED_AS.get(package, package)
        return version(package) if importlib.util.find_spec(module) else None
    except PackageNotFoundError:
        return None


def _parts() -> dict[str, dict[str, Any]]:
    """Return the other distributions of quire: their commands, and whether each is installed."""
    parts: dict[str, dict[str, Any]] = {}
    for command, name in COMMANDS.items():
        about = {"commands": list[str](), "installed": _is_installed(name)}
        parts.setdefault(name, about)["commands"].append(command)
    return parts


def _installed_as() -> str | None:
    return DISTRIBUTION if _is_installed(DISTRIBUTION) else None


def _is_installed(distribution: str) -> bool:
    return any(distributions(name=distribution))


def _cpu_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> dict[str, int | None]:
    """Total memory that this process may use, and what is available where the system says."""
    return {"total": memory_bytes(), "available": available_bytes()}


def _devices() -> dict[str, Any]:
    """CUDA devices as torch sees them; none without torch, or with one that does not load."""
    if _version("torch") is None:
        return {"cuda": [], "torch_threads": None, "torch_error": None}
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"cuda": [], "torch_threads": None, "torch_error": str(error)}
    devices: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        devices.append({"name": name, "total_bytes": total, "free_bytes": free})
    return {"cuda": devices, "torch_threads": torch.get_num_threads(), "torch_error": None}


def _facts(found: dict[str, Any]) -> list[tuple[str, Any]]:
    memory = found["memory_bytes"]
    sizes = [
        f"{format_bytes(memory[kind])} {kind}" for kind in ("total", "available") if memory[kind]
    ]
    facts: list[tuple[str, Any]] = [
        ("quire", found["quire"]),
        ("python", f"{found['python']} ({found['platform']}), {sys.executable}"),
    ]
    for package, number in found["packages"].items():
        name: str = IMPORTED_AS.get(package) or package
        facts.append((name, Text("not installed", "yellow") if number is None else number))
    facts += [("CPU", f"{found['cpu_cores']} cores"), ("memory", ", ".join(sizes) or "unknown")]
    if found["torch_error"]:
        facts.append(("torch", Text(f"does not load: {found['torch_error']}", "red")))
    for index, device in enumerate(found["cuda"]):
        sizes = (format_bytes(device[kind]) for kind in ("free_bytes", "total_bytes"))
        facts.append((f"CUDA {index}", f"{device['name']}, {' free of '.join(sizes)}"))
    if not found["cuda"]:
        facts.append(("CUDA", "no device: models run on the CPU"))
    return facts
