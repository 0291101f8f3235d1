"""Bodies for tests of request logs, and files of them."""

import json

SYSTEM = "You are a careful assistant of a shop. " * 20


def tool(name, text="Does it."):
    parameters = {
        "type": "object",
        "properties": {"q": {"type": "string", "description": text * 3}},
    }
    function = {"name": name, "description": f"{name}: {text}", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool(name, f"Looks up {name} in the shop. " * 4) for name in ("orders", "stock", "prices")]


def chat(*said, system=SYSTEM, tools=None, **more):
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": system}] * bool(system)
    messages += [{"role": roles[place % 2], "content": text} for place, text in enumerate(said)]
    return {"model": "m", "messages": messages} | ({"tools": tools} if tools else {}) | more


def lines(path, records):
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path
