"""The text that quire-tiny learns from: plain English paragraphs, see `quire_passages.bench.prose`.

It is laid out as texts and as conversations under a long system text.
"""

import numpy as np

from quire_passages.bench.prose import Library

BOS, EOS, SYSTEM, USER, ASSISTANT = range(257, 262)  # 0 to 255 are the bytes, 256 is padding
ASK = (
    "What is {}?", "What does {} do?", "Tell me about {}.", "How does {} work?",
    "Can you explain {}?", "Please describe {}.", "When do I need {}?", "How do I use {}?",
)  # fmt: skip
MORE = ("Tell me more.", "Please go on.", "What else?", "And then?", "Anything else to know?")
RULES = (
    "You are a helpful assistant. Answer in plain English and keep to the facts.",
    "You are a patient teacher. Explain things step by step.",
    "The following is a conversation between a user and an assistant.",
    "Use the notes below to answer the questions of the user.",
    "You answer questions about Python. Here is some background to read first.",
)


def render(library: Library, rng: np.random.Generator) -> np.ndarray:
    """Lay the library out as one stream of tokens: texts and conversations, in random order."""
    every = [entry for entries in library.values() for entry in entries]
    out: list[int] = []

    def pick(options: tuple[str, ...]) -> str:
        return options[rng.integers(len(options))]

    def say(role: int, text: str) -> None:
        out.extend((role, *text.encode()))

    for module in rng.permutation(list(library)):
        entries = library[module]
        if rng.random() < 0.4:
            say(BOS, "\n\n".join(p for e in entries for p in e.paragraphs))
            out.append(EOS)
            continue
        start, limit = -1, 0
        for entry in entries:
            if start < 0 or len(out) - start > limit:
                start, limit = len(out), rng.integers(1500, 9000)
                say(BOS, "")
                notes = [pick(RULES)]
                while rng.random() < 0.75 and sum(map(len, notes)) < 3000:
                    notes += every[rng.integers(len(every))].paragraphs[:3]
                say(SYSTEM, "\n\n".join(notes))
            said, question = 0, pick(ASK).format(entry.name)
            while said < len(entry.paragraphs):
                count = int(rng.integers(1, 4))
                say(USER, question)
                say(ASSISTANT, "\n\n".join(entry.paragraphs[said : said + count]))
                out.append(EOS)
                said, question = said + count, pick(MORE)
    return np.array(out, dtype=np.int16)
