"""Jobs on a real vLLM, in its environment, and comparisons of their results."""

import json
import os
import signal
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("QUIRE_VLLM", REPOSITORY / ".venv-vllm"))
CLOSE = 1e-4
"""Logits that are nearer than this may change places with the batch that they are computed in."""

NEEDS_VLLM = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (ENVIRONMENT / "bin/python").exists(),
        reason=f"no vLLM in {ENVIRONMENT}: `make test-vllm` installs it",
    ),
]


def options(*tiers):
    """Return the connector's options: everything is stored, and all that is found is loaded."""
    return {
        "tiers": tiers,
        "settings": {"busy_share": 1.0, "gate": False},
        "staging": "64MiB",
    }


def extra(place):
    return options("host:16MiB", f"disk:{place}?capacity=1GiB")


@contextmanager
def started(tmp_path, script, job, name="job"):
    """Start a script on a job; yield the process, and where its result and what it says will be."""
    asked, result, log = (tmp_path / f"{name}.{kind}" for kind in ("json", "result", "log"))
    asked.write_text(json.dumps(job))
    result.unlink(missing_ok=True)
    here = Path(__file__).parent
    path = os.pathsep.join([str(REPOSITORY / "src"), str(here)])
    with log.open("w") as said:
        process = subprocess.Popen(
            [ENVIRONMENT / "bin/python", here / script, asked, result],
            env=os.environ | {"PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,  # vLLM is several processes: all of them end with it
        )
        try:
            yield process, result, log
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()


def ended(process, result, log):
    """Return the result of a job, and what was said, when it has ended."""
    # What is printed is vLLM's own log, where it says why an engine died.
    printed, _ = process.communicate(timeout=900)
    assert result.exists(), log.read_text()[-3000:] + printed[-6000:]
    return json.loads(result.read_text()), log.read_text() + printed


def run(tmp_path, model, load, engine=None, options=None, *, faults=None):
    """Serve a load with an engine of its own; return its results, and what else is known of it."""
    job = {"model": str(model), "engine": engine or {}, "extra": options, "faults": faults} | load
    with started(tmp_path, "vllm_run.py", job) as begun:
        told, said = ended(*begun)
    return told["requests"], told | {"said": said}


def differ(ones, others):
    """Return how many requests have another text, those apart whose first difference is between close logits."""
    wrong, flipped = 0, 0
    for one, other in zip(ones, others, strict=True):
        at = next(
            (
                i
                for i, (a, b) in enumerate(zip(one["tokens"], other["tokens"], strict=True))
                if a != b
            ),
            None,
        )
        if at is not None:
            close = one["gaps"][at] < CLOSE
            flipped, wrong = flipped + close, wrong + (not close)
    return wrong, flipped


def whole(request):
    return (request["prompt"] - 1) // 32 * 32
