"""LiteLLM against `quire serve`, by `/v1/responses`: text, a stream, two turns, and an error.

LiteLLM makes the stream of a model that it does not know itself, of a whole answer.

    pip install litellm
    quire serve --port 8000 &
    python benchmarks/clients/litellm_responses.py http://127.0.0.1:8000/v1
"""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # which it else loads from afar

import litellm


def main(url):
    asked = {
        "model": "openai/quire-tiny",
        "api_base": url,
        "api_key": "none",
        "temperature": 0,
        "max_output_tokens": 16,
    }
    said = litellm.responses(input="What is a list?", **asked)
    text = said.output[0].content[0].text
    print("text:", repr(text), said.status)
    assert text
    events = list(litellm.responses(input="What is a list?", stream=True, **asked))
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    print("stream:", len(events), "events, the last", events[-1].type)
    assert "".join(deltas) == text
    more = litellm.responses(input="And a tuple?", previous_response_id=said.id, **asked)
    print("second turn, input tokens:", more.usage.input_tokens)
    assert more.usage.input_tokens > said.usage.total_tokens
    try:
        litellm.responses(input="a", tools=[{"type": "web_search"}], **asked)
    except litellm.BadRequestError as error:
        print("error:", str(error)[:160])
    else:
        raise AssertionError("a tool that is not offered was taken")


main(sys.argv[1])
