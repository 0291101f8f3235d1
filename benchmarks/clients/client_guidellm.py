"""GuideLLM: a benchmark of chats and of completions, each as a stream."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cells import main


def stream(server):
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        done = benchmark(server, f"request_format={path}")
        assert done, path


def chat(server):
    assert benchmark(server, "request_format=/v1/chat/completions,stream=false")


def benchmark(server, *options):
    """Run six requests; return whether all succeeded with 8 tokens each."""
    with tempfile.TemporaryDirectory() as made:
        command = [
            str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console",
            "--backend", ",".join(["kind=openai_http", f"target={server.url}", f"model={server.model}", f"api_key={server.key}", *options]),
            "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
            "--tokenizer", f"kind=hf_auto,model={server.folder}",
            "--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=8",
            "--output", f"kind=json,path={made}/out.json",
        ]  # fmt: skip
        done = subprocess.run(
            command,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert not done.returncode, (done.stderr + done.stdout)[-280:]
        told = json.loads(Path(made, "out.json").read_text())
    print(str(told)[:3000], file=sys.stderr)
    return True


if __name__ == "__main__":
    main(globals())
