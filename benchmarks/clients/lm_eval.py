"""lm-evaluation-harness against `quire serve`: equal scores with an empty cache, a full one, and without quire.

    pip install 'lm-eval[api]'
    python benchmarks/clients/lm_eval.py [--model FOLDER] [--concurrent 4] [--python PYTHON] [--json]

Two tasks on local data ask for log-likelihoods: a choice among endings behind a few shots, and the end of a text. The
harness's own model `hf` computes them with transformers. Its `local-completions` asks a server twice, first one that
has cached nothing, and again when it has cached all prompts; between the two, plain completions of the same prompts
find these. Exits with 1 unless all log-likelihoods are equal to `TOLERANCE` and all greedy flags are.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import httpx

from quire import demo_model
from quire.cli.server_process import HOST, ServerProcess

TOLERANCE = 1e-3
"""Of the log-likelihood of an ending, a sum over its tokens."""

FACTS = [
    ("A list", "keeps the order of its items", ("forgets its items", "has no order")),
    ("A tuple", "cannot be changed", ("grows with append", "is a kind of loop")),
    ("A dict", "maps keys to values", ("sorts its values", "has no keys")),
    ("A set", "has each item once", ("has an order", "counts its items")),
    ("A string", "is made of characters", ("is made of bits", "can be changed in place")),
    ("A function", "returns a value", ("is a module", "never ends")),
    ("A loop", "repeats its body", ("runs once", "defines a class")),
    ("A class", "describes objects", ("is a number", "prints a line")),
]

CHOICE = """
task: quire_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
fewshot_split: test
num_fewshot: 3
output_type: multiple_choice
doc_to_text: "Question: What about this? {{start}}\\nAnswer:"
doc_to_target: label
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}]
"""

ENDING = """
task: quire_ending
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{start}}"
doc_to_target: " {{end}}."
metric_list: [{metric: perplexity, aggregation: perplexity}, {metric: acc, aggregation: mean}]
"""


def write_tasks(folder: Path) -> None:
    """Write the tasks and their data."""
    docs = [
        {"start": start, "end": end, "choices": [end, *wrong], "label": 0}
        for start, end, wrong in FACTS
    ]
    data = folder / "facts.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in docs))
    for name, task in (("choice", CHOICE), ("ending", ENDING)):
        (folder / f"{name}.yaml").write_text(task.replace("FILE", str(data)))


def harness(python: str, folder: Path, name: str, model: list[str]) -> dict[str, list[list[float]]]:
    """Run the tasks; return the log-likelihood and the greedy flag of each request, by task."""
    out = folder / name
    command = [python, "-m", "lm_eval", *model, "--tasks", "quire_choice,quire_ending"]
    command += ["--include_path", str(folder), "--output_path", str(out), "--log_samples"]
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder)}
    done = subprocess.run(  # in the folder: here a file has the harness's name
        command, check=False, cwd=folder, env=os.environ | quiet, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    found: dict[str, list[list[float]]] = {}
    for path in out.rglob("samples_*.jsonl"):
        task = path.name.removeprefix("samples_").rpartition("_")[0]
        docs = sorted(map(json.loads, path.read_text().splitlines()), key=lambda doc: doc["doc_id"])
        found[task] = [
            [float(value), float(greedy in (True, "True"))]
            for doc in docs
            for value, greedy in (each[0] for each in doc["resps"])
        ]
    return found


def complete(url: str) -> int:
    """Complete the beginnings of all facts, and return how many of their tokens were found."""
    prompts = [f"Question: What about this? {start}\nAnswer:" for start, *_ in FACTS]
    answer = httpx.post(url, json={"prompt": prompts, "max_tokens": 4}, timeout=60)
    return answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def main() -> int:
    """Compare; return the exit status."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--model", default=str(demo_model()))
    options.add_argument("--concurrent", type=int, default=4)
    options.add_argument("--python", default=sys.executable, help="of the harness's environment")
    options.add_argument("--json", action="store_true")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_tasks(folder)
        own = f"pretrained={asked.model},dtype=float32"
        results = {"transformers": ["--model", "hf", "--model_args", own, "--device", "cpu"]}
        results = {
            name: harness(asked.python, folder, name, model) for name, model in results.items()
        }
        serve = [sys.executable, "-m", "quire", "serve", "--model", asked.model, "--name", "served"]
        with closing(ServerProcess([*serve, "--dtype", "float32"], None)) as server:
            url = f"http://{HOST}:{server.port}/v1/completions"
            how = f"model=served,base_url={url},tokenizer={asked.model},num_concurrent={asked.concurrent}"
            model = ["--model", "local-completions", "--model_args", how]
            results["empty cache"] = harness(asked.python, folder, "empty", model)
            cached = complete(url)
            results["full cache"] = harness(asked.python, folder, "full", model)
    right = results["transformers"]
    told = {"requests": sum(map(len, right.values())), "cached_tokens": cached}
    for name, found in results.items():
        pairs = [
            (one, other)
            for task in right
            for one, other in zip(right[task], found[task], strict=True)
        ]
        told[name] = {
            "most_apart": max(abs(one[0] - other[0]) for one, other in pairs),
            "greedy_apart": sum(one[1] != other[1] for one, other in pairs),
            "sum": sum(other[0] for _, other in pairs),
        }
    if asked.json:
        print(json.dumps(told))
    else:
        print(f"{told['requests']} log-likelihoods; plain completions found {cached} tokens")
        for name in results:
            print(f"{name:14} {told[name]}")
    apart = [told[name] for name in results]
    is_equal = all(e["most_apart"] <= TOLERANCE and not e["greedy_apart"] for e in apart)
    return 0 if is_equal and cached else 1


if __name__ == "__main__":
    sys.exit(main())
