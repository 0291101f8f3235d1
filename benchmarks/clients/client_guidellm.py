"""guidellm: six streamed requests of made-up prompts, two at once, over chats and over responses.

A run has 300 s; its report tells of each request what the server said.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cells import main

RUN_S, COUNT, NEW = 300, 6, 8


def run(server, path="/v1/chat/completions"):
    """Run a benchmark of a path; return its requests, by how they ended."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        backend = f"kind=openai_http,target={server.url},model={server.model},api_key={server.key}"
        given = {
            "backend": f"{backend},request_format={path}",
            "profile": "kind=concurrent,streams=2",
            "constraint": f"kind=max_requests,count={COUNT}",
            "tokenizer": f"kind=hf_auto,model={server.folder}",
            "data": f"kind=synthetic_text,prompt_tokens=40,output_tokens={NEW}",
            "output": f"kind=json,path={report}",
        }
        words = [part for name, value in given.items() for part in (f"--{name}", value)]
        done = subprocess.run(
            [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console", *words],
            check=False,
            cwd=folder,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )
        assert not done.returncode, (done.stdout + done.stderr)[-250:]
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
        return benchmark["requests"]


def answered(server, path):
    """Run a benchmark of a path; return its requests, which are all answered with as many tokens as are asked for."""
    requests = run(server, path)
    assert not requests["errored"]
    assert not requests["incomplete"]
    assert [each["output_tokens"] for each in requests["successful"]] == [NEW] * COUNT
    assert all(each["output"] for each in requests["successful"])
    return requests["successful"]


def stream(server):
    answered(server, "/v1/chat/completions")


def responses(server):
    answered(server, "/v1/responses")


def usage(server):
    answered(server, "/v1/completions")
    again = answered(server, "/v1/completions")
    assert any(each["cached_tokens"] for each in again)


def errors(server):
    try:
        requests = run(server._replace(key="no-such-key"))
    except AssertionError as error:
        assert "401" in str(error)  # noqa: PT017 - it is the client's own message
    else:
        assert len(requests["errored"]) == COUNT


if __name__ == "__main__":
    main(globals())
