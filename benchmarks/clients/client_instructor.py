"""instructor, in each of its modes that the server has."""

import instructor
import openai
from cells import TALK, main, raised
from instructor.exceptions import InstructorRetryException
from pydantic import BaseModel

ASKED = [{"role": "user", "content": TALK}]


class OkOrNot(BaseModel, extra="forbid"):
    """A form of an answer; small models would add to one that is open."""

    ok: bool


def client(server, mode):
    made = openai.OpenAI(base_url=server.v1, api_key=server.key, max_retries=0)
    return instructor.from_openai(made, mode=mode)


def ask(server, mode, model=None, **given):
    options = {"model": model or server.model, "response_model": OkOrNot, "max_retries": 0} | given
    return client(server, mode).create(messages=ASKED, **options)


def forced_tool(server):
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
        assert ask(server, mode).ok in (True, False)


def json_schema(server):
    assert ask(server, instructor.Mode.JSON_SCHEMA).ok in (True, False)


def stream(server):
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        pieces = list(client(server, mode).create_partial(model=server.model, messages=ASKED, response_model=OkOrNot))  # fmt: skip
        assert pieces[-1].ok in (True, False)


def responses(server):
    assert ask(server, instructor.Mode.RESPONSES_TOOLS).ok in (True, False)


def errors(server):
    mode = instructor.Mode.JSON_SCHEMA
    wrong = server._replace(key="no-such-key")
    raised(InstructorRetryException, lambda: ask(wrong, mode), "401")
    raised(InstructorRetryException, lambda: ask(server, mode, model="none"), "404")
    raised(InstructorRetryException, lambda: ask(server, mode, temperature=-1), "temperature")
    with server.full():
        raised(InstructorRetryException, lambda: ask(server, mode), "429")


def usage(server):
    mode = instructor.Mode.JSON_SCHEMA
    made = client(server, mode)
    asked = {"model": server.model, "messages": [{"role": "user", "content": TALK * 8}]}
    for _ in range(2):
        _, whole = made.create_with_completion(response_model=OkOrNot, **asked)
    assert whole.usage.prompt_tokens_details.cached_tokens > 0


if __name__ == "__main__":
    main(globals())
