"""Sort every causal LM of the installed transformers: python tests/families/run.py [name ...].

The verdicts are written to docs/families.json as they come, so that a run that was stopped goes
on where it was with `--resume`. Exits with 1 when anything is wrong.
"""

import argparse
import collections
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

OUT = Path(__file__).parents[2] / "docs" / "families.json"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only these, printed and not written")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 4))
    parser.add_argument("--resume", action="store_true", help="keep what the file has")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"

    from classes import registered

    names = given.names or registered()
    known = json.loads(given.out.read_text()) if given.resume and given.out.exists() else {}
    verdicts = {v["name"]: v for v in known.get("classes", ()) if v["name"] in names}
    began = time.perf_counter()
    left = [name for name in names if name not in verdicts]
    with multiprocessing.get_context("spawn").Pool(given.jobs, maxtasksperchild=40) as pool:
        for verdict in pool.imap_unordered(_judged, left):
            verdicts[verdict["name"]] = verdict
            if verdict["state"] == "wrong" or given.names:
                sys.stdout.write(f"{verdict['name']}: {verdict}\n")
                sys.stdout.flush()
            if not given.names:
                given.out.write_text(_as_json([verdicts[n] for n in names if n in verdicts]))
    counts = collections.Counter(verdict["state"] for verdict in verdicts.values())
    took = time.perf_counter() - began
    sys.stdout.write(f"{dict(counts)} in {took:.0f} s on {given.jobs} processes\n")
    sys.exit(1 if counts["wrong"] else 0)


def _judged(name):
    import logging

    import torch
    import transformers

    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    from judge import judge

    return judge(name).as_dict()


def _as_json(verdicts):
    import transformers

    for verdict in verdicts:
        verdict.pop("seconds", None)
    lines = ",\n".join(f"  {json.dumps(verdict)}" for verdict in verdicts)
    return f'{{"transformers": "{transformers.__version__}", "classes": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    main()
