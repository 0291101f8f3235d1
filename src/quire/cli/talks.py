"""The text of the demo: a long system prompt, and what six people ask."""

import re
from collections.abc import Callable
from itertools import cycle

RULES = (
    "You are a patient teacher of Python. Answer in plain English and keep to the facts. "
    "Use the notes below to answer the questions of the user."
)

NOTES = """\
Objects are Python's abstraction for data. Every object has an identity, a type and a value. \
The identity never changes once the object has been created; you may think of it as the \
address of the object in memory. The type determines the operations that the object supports.

An object whose value can change is said to be mutable; an object whose value cannot change \
once it has been created is called immutable. Numbers, strings and tuples are immutable, while \
dictionaries and lists are mutable. An immutable container may hold a reference to a mutable \
object, and its contents then appear to change.

Names refer to objects. An assignment binds a name to an object; it never copies the object. \
Two names may refer to the same list, and a change made through one of them is seen through \
the other. A name that is bound in a function is local to it unless it is declared global.

A sequence is a finite ordered set of items that are found by a number, starting at zero. \
Strings, tuples and lists are sequences. A slice selects a part of a sequence and gives a new \
sequence of the same type. A mapping finds its values by keys instead of numbers; the keys of a \
dictionary must be hashable.

An iterator is an object that gives the items of a collection one after the other. The for \
statement asks the collection for an iterator and then takes items from it until there are no \
more. A generator is a function that contains a yield expression; calling it gives an iterator, \
and the body of the function runs only when the next item is asked for.

An exception is a means of leaving the normal flow of control to handle an error. It is raised \
at the point where the error is found, and it may be handled by the block of code around it or by \
any code that called this block. A finally clause is run whether or not an exception came.

A context manager is an object that sets up what a block of code needs and cleans up after it. \
It is used by the with statement. Files, locks and connections are typical context managers.

A class is a template for objects. Its methods are functions whose first argument is the \
instance. A class may inherit from other classes, and a lookup of an attribute searches the \
instance first, then its class, and then the base classes in a fixed order.

A module is a file with definitions that other code can import. It is run once, when it is \
first imported, and then kept in a table of modules. A package is a module that holds others.

A function is a series of statements that returns a value to its caller. It can be passed \
arguments, by position or by keyword, and a parameter may have a default value. The default is \
evaluated once, when the function is defined. A function is an object like any other: it can be \
stored in a list, passed to another function and given back as a result.

A string is an immutable sequence of characters, and bytes are an immutable sequence of small \
numbers. Text becomes bytes by encoding and bytes become text by decoding.
"""

QUESTIONS = (
    (
        "What is a list?",
        "How does it differ from a tuple?",
        "When is it copied?",
        "What does a slice of it give?",
    ),
    (
        "What does the with statement do?",
        "What if the block raises an exception?",
        "How do I write a context manager?",
        "Can it be used twice?",
    ),
    (
        "How does a generator work?",
        "What does it keep between two items?",
        "How do I stop it early?",
        "What does yield return?",
    ),
    (
        "What is a dictionary?",
        "Which keys can it have?",
        "Is it ordered?",
        "How do I go through it?",
    ),
    (
        "How are exceptions handled?",
        "What is the finally clause for?",
        "Can I raise it again?",
        "Which ones should I catch?",
    ),
    (
        "What happens when I import a module?",
        "What is a package?",
        "Is the module run each time?",
        "Where is it looked for?",
    ),
)

SAMPLED_QUESTION = "Please describe a class in your own words."

MAX_CONVERSATIONS = len(QUESTIONS)
MAX_TURNS = len(QUESTIONS[0])


def system_text(num_tokens: int, count: Callable[[str], int]) -> str:
    """Return a system prompt of at least `num_tokens` tokens, whole sentences of the notes.

    `count` returns the tokens of a text. Beyond their end, the notes start again.
    """
    text = RULES + "\n\n"
    for sentence in cycle(re.findall(r"[^.]+\.\s+", NOTES + "\n")):
        if count(text) >= num_tokens:
            break
        text += sentence
    return text.rstrip()
