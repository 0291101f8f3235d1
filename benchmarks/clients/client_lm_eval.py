"""lm-evaluation-harness by `local-completions`: equal scores with an empty cache, a full one, and without quire.

Two tasks on local data ask for log-likelihoods: a choice among endings behind a few shots, and the end of a text. The
harness's own model `hf` computes them with transformers. Its `local-completions` asks the server twice, first when it
has cached none of the prompts; between the two, plain completions of the same prompts cache them.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cells import main

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


def scoring(server):
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_tasks(folder)
        url = f"{server.v1}/completions"
        how = f"model={server.model},base_url={url},tokenizer={server.folder},num_concurrent=2"
        served = ["--model", "local-completions", "--model_args", how]
        own = f"pretrained={server.folder},dtype=float32"
        for file in Path(server.folder).glob("*.gguf"):
            own += f",gguf_file={file.name}"
        key = {"OPENAI_API_KEY": server.key}
        results = {"empty cache": harness(folder, "empty", served, key)}
        assert complete(server) > 0
        results["full cache"] = harness(folder, "full", served, key)
        right = harness(folder, "hf", ["--model", "hf", "--model_args", own, "--device", "cpu"], {})
    assert sum(map(len, right.values())) == 32
    for name, found in results.items():
        for task, values in right.items():
            for one, other in zip(values, found[task], strict=True):
                apart = abs(one[0] - other[0])
                assert apart <= TOLERANCE, f"{name}: {apart} apart in {task}"
                assert one[1] == other[1], f"{name}: another greedy flag in {task}"


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


def harness(folder: Path, name: str, model: list[str], more: dict) -> dict[str, list[list[float]]]:
    """Run the tasks; return the log-likelihood and the greedy flag of each request, by task."""
    out = folder / name
    command = [sys.executable, "-m", "lm_eval", *model, "--tasks", "quire_choice,quire_ending"]
    command += ["--include_path", str(folder), "--output_path", str(out), "--log_samples"]
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder)}
    done = subprocess.run(
        command, check=False, cwd=folder, env=os.environ | quiet | more, capture_output=True, text=True
    )  # fmt: skip
    assert not done.returncode, done.stderr[-250:]
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


def complete(server) -> int:
    """Complete the beginnings of all facts, twice, and return how many of their tokens were found."""
    found = 0
    for start, *_ in FACTS * 2:
        asked = {"prompt": f"Question: What about this? {start}\nAnswer:", "max_tokens": 4}
        with server.ask("/v1/completions", asked) as answer:
            found += json.load(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


if __name__ == "__main__":
    main(globals())
