"""The conversations that quire-tiny learns by heart: short questions about Python, with answers.

Written for quire, under its licence. The questions of `quire demo` are among them, in the order
in which it asks; a name in a question (`it`) means what the question before was about.
"""

import re
from collections.abc import Sequence
from itertools import chain, cycle

import numpy as np
from tiny_text import ASSISTANT, BOS, EOS, SYSTEM, USER

from quire.cli.talks import TINY_TALKS

Talk = tuple[tuple[str, str], ...]

ASKED: tuple[Talk, ...] = (
    (
        ("What is a list?", "A list is a mutable sequence of objects."),
        ("How does it differ from a tuple?", "A list can be changed; a tuple cannot."),
        ("When is it copied?", "Only when you ask for it; = just binds a name."),
        ("What does a slice of it give?", "A new list with the selected items."),
    ),
    (
        ("What does the with statement do?", "It sets up a resource and cleans up after the block."),
        ("What if the block raises an exception?", "The clean-up still runs; then the exception goes on."),
        ("How do I write a context manager?", "Write a class with __enter__ and __exit__ methods."),
        ("Can it be used twice?", "Some can, such as locks; an open file cannot."),
    ),
    (
        ("How does a generator work?", "Its body runs to the next yield for each item."),
        ("What does it keep between two items?", "Its local names and the place where it stopped."),
        ("How do I stop it early?", "Call its close method, or simply stop asking."),
        ("What does yield return?", "The value that was sent in, or else None."),
    ),
    (
        ("What is a dictionary?", "A dictionary finds values by their keys."),
        ("Which keys can it have?", "Any hashable object, such as a string or a number."),
        ("Is it ordered?", "Yes, its items stay in the order of insertion."),
        ("How do I go through it?", "Loop over d.items() to get keys and values."),
    ),
    (
        ("How are exceptions handled?", "By the nearest except clause that matches."),
        ("What is the finally clause for?", "It runs in any case, with or without an error."),
        ("Can I raise it again?", "Yes, by a bare raise in the except clause."),
        ("Which ones should I catch?", "Only those that you know how to handle."),
    ),
    (
        ("What happens when I import a module?", "Its code is run once and kept in sys.modules."),
        ("What is a package?", "A package is a module that holds other modules."),
        ("Is the module run each time?", "No, only the first import runs it."),
        ("Where is it looked for?", "In the folders that sys.path lists."),
    ),
)  # fmt: skip

MORE: tuple[Talk, ...] = (
    (
        ("What is a tuple?", "A tuple is an immutable sequence of objects."),
        ("Can I change it?", "No, but you can make a new one from it."),
    ),
    (
        ("What is a string?", "A string is an immutable sequence of characters."),
        ("How do I turn it into bytes?", "Call its encode method."),
    ),
    (
        ("What is a function?", "A function is a piece of code that you call by name."),
        ("When is a default evaluated?", "Once, when the function is defined."),
        ("What if it returns nothing?", "Then the call gives None."),
    ),
    (
        ("What is a module?", "A module is a file of code that others can import."),
        ("How often is it run?", "Once, when it is first imported."),
    ),
    (
        ("What is a generator?", "A generator gives its items one by one, by yield."),
        ("Can I go back in it?", "No, it only goes forward."),
    ),
    (
        ("What is a context manager?", "It sets up what a block needs and cleans up after it."),
        ("Who calls it?", "The with statement does."),
    ),
    (("What is a set?", "A set holds each object only once, in no order."),),
    (("What is an iterator?", "An iterator gives items one after the other."),),
    (("What is an exception?", "An exception is an error that can be handled."),),
    (("What is a method?", "A method is a function that belongs to a class."),),
    (("What is a decorator?", "A decorator takes a function and gives another."),),
    (("What is a lambda?", "A lambda is a small function without a name."),),
    (("What is a slice?", "A slice is a selected part of a sequence."),),
    (("What is None?", "None is the object that stands for no value."),),
    (("What is self?", "The first argument of a method: the instance."),),
    (("What is a loop?", "A loop runs the same block again and again."),),
    (("What is a name?", "A name refers to an object; it holds no copy."),),
    (("What is an object?", "An object has an identity, a type and a value."),),
    (("What is a byte?", "A byte is a number from 0 to 255."),),
    (("What is Python?", "Python is a language that is easy to read."),),
    (("What is a KV cache?", "The keys and values of all tokens that were read."),),
    (("What is a prefix?", "A prefix is the beginning of a text."),),
    (("What is quire?", "quire is a library that keeps the KV cache."),),
    (("Who are you?", "I am a very small model that knows a bit of Python."),),
    (("Hello!", "Hello! Ask me something about Python."),),
    (("Thank you.", "You are welcome."),),
    (("How do I read a file?", "Open it by a with statement and call read."),),
    (("How do I sort a list?", "Call its sort method, or sorted for a new list."),),
    (("How do I copy a list?", "Call its copy method, or take a full slice."),),
)

CLASS = (
    "A class is a template for objects.",
    "Think of a form: a class says what its objects have.",
    "It is a plan from which objects are made.",
    "A class keeps data and the functions for it together.",
    "It names a kind of object and what it can do.",
    "With a class you make your own type of object.",
)
ASK_CLASS = (
    "Please describe a class in your own words.",
    "What is a class?",
    "Tell me about a class.",
)
OTHER_WAYS = ("What is {}?", "Tell me about {}.", "Can you explain {}?", "Please describe {}.")
UNKNOWN = "I do not know. Ask me about lists or functions."
BRIEF = "Answer briefly. "

assert [[question for question, _ in talk] for talk in ASKED] == TINY_TALKS.questions


def system_text(num_bytes: int) -> str:
    """Return a system prompt of at least so many bytes, whole sentences of the notes, which start again at their end."""
    text = TINY_TALKS.rules + "\n\n"
    for sentence in cycle(re.findall(r"[^.]+\.\s+", TINY_TALKS.notes + "\n")):
        if len(text) >= num_bytes:
            break
        text += sentence
    return text.rstrip()


class Talks:
    """Conversations by heart, in random order under random system texts."""

    def __init__(self, strangers: Sequence[str], rng: np.random.Generator) -> None:
        """`strangers`: names of things that it is to say it does not know."""
        known = {word for talk in (*ASKED, *MORE) for word in talk[0][0].lower().split()}
        self._strangers = [name for name in strangers if not known & set(name.lower().split())]
        self._rng = rng

    def row(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and labels `[length]`: a label is -100 where nothing is to be said."""
        tokens, labels = np.full(length, 256), np.full(length, -100)
        system = self._system(length - 700).encode()
        ids = [BOS, *((SYSTEM, *system) if system else ())]
        said = [-100] * len(ids)
        while True:
            for question, answer in self._talk():
                asked, reply = (USER, *question.encode(), ASSISTANT), (*answer.encode(), EOS)
                if len(ids) + len(asked) + len(reply) > length:
                    tokens[: len(ids)], labels[: len(said)] = ids, said
                    return tokens, labels
                ids += asked + reply
                said += [-100] * len(asked) + list(reply)

    def _talk(self) -> Talk:
        kind = self._rng.random()
        if kind < 0.08:
            return ((self._pick(ASK_CLASS), self._pick(CLASS)),)
        if kind < 0.16:
            way = self._pick(OTHER_WAYS)
            return ((way.format(self._pick(self._strangers)), UNKNOWN),)
        if kind < 0.60:
            return ASKED[self._rng.integers(len(ASKED))]
        (question, answer), *rest = MORE[self._rng.integers(len(MORE))]
        if question.startswith(("What is a ", "What is an ")) and self._rng.random() < 0.4:
            name = question.removeprefix("What is ").removesuffix("?")
            question = self._pick(OTHER_WAYS).format(name)
        return ((question, answer), *rest)

    def _system(self, room: int) -> str:
        kind = self._rng.random()
        if room < 400:
            return "" if kind < 0.6 else TINY_TALKS.rules if kind < 0.8 else BRIEF * int(room // 16)
        wanted = int(self._rng.integers(room // 2, room - 250))
        if kind < 0.1:
            return BRIEF * int(wanted // 16)
        if kind < 0.7:
            return system_text(wanted)
        notes = self._rng.permutation(np.array(TINY_TALKS.notes.strip().split("\n\n"))).tolist()
        return (
            "\n\n".join(chain([TINY_TALKS.rules], notes, notes))[:wanted].rpartition(".")[0] + "."
        )

    def _pick(self, options: Sequence[str]) -> str:
        return options[self._rng.integers(len(options))]
