"""The memory behind a block table, as a dict: what every position of every block holds.

A position's content is an *identity*: a number that stands for (scope, all tokens up to and
with this one, the media items they touch). A forward pass writes identities through the
sequence's own table, copies move them, and a read is right when every position below
`computed` holds the identity of the sequence's own prefix. Nothing else can be right: KV is a
function of the whole prefix.

`Identities` names prefixes, `Memory` holds them, `Published` is what may be found again.
"""

from dataclasses import dataclass, field, replace

from quire.core import MediaItem


class Identities:
    """Names for prefixes: two numbers are equal exactly when the prefixes are."""

    def __init__(self):
        self._names = {}

    def _name(self, key):
        return self._names.setdefault(key, len(self._names))

    def prefix(self, name):
        """Return the scope's parts, the tokens and the media of the prefix that an identity names.

        The tokens go on to the end of a picture that the prefix ends in: its placeholders are all alike.
        """
        keys, path = list(self._names), []
        while len(key := keys[name]) == 3:
            name, *what = key
            path.insert(0, what)
        tokens, media = [token for token, _ in path], []
        for at, (token, picture) in enumerate(path):
            if picture and picture[1] == 0:
                digest, _, length = picture
                media.append(MediaItem(digest, at, length))
                tokens += [token] * (at + length - len(tokens))
        return key[1:], tokens, tuple(media)

    def root(self, scope):
        parts = (scope.salt, scope.lora, scope.model) if scope else (None, None, None)
        return self._name(("scope", *parts))

    def path(self, scope, tokens, media=()):
        """Return the identity of each prefix `tokens[: i + 1]`."""
        inside = {
            item.start + i: (item.digest, i, item.length)
            for item in media
            for i in range(item.length)
        }
        name, names = self.root(scope), []
        for position, token in enumerate(tokens):
            name = self._name((name, token, inside.get(position)))
            names.append(name)
        return names


class Memory:
    """The contents of the blocks of one layer group; None where nothing was ever computed."""

    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.blocks = [[None] * block_size for _ in range(num_blocks)]

    def write(self, table, start, names):
        for offset, name in enumerate(names, start):
            self.blocks[table[offset // self.block_size]][offset % self.block_size] = name

    def poison(self, block):
        self.blocks[block] = [None] * self.block_size

    def copy(self, copies):
        """Do all copies as one simultaneous assignment."""
        values = [self.blocks[copy.src][: copy.num_tokens] for copy in copies]
        for copy, value in zip(copies, values, strict=True):
            self.blocks[copy.dst] = value + [None] * (self.block_size - copy.num_tokens)


class Published:
    """The blocks that were published, as a tree keyed by the identity of their last token."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.children = {}

    def add(self, root, path):
        """Publish every whole block of `path`."""
        size = self.block_size
        parent = root
        for end in range(size, len(path) + 1, size):
            self.children.setdefault(parent, {})[path[end - 1]] = path[end - size : end]
            parent = path[end - 1]

    def remove_below(self, root, path, start):
        """Forget the block of `path` that begins at `start`, and all its descendants."""
        size = self.block_size
        gone = [path[start + size - 1]]
        self.children.get(path[start - 1] if start else root, {}).pop(gone[0], None)
        while gone:
            gone += list(self.children.pop(gone.pop(), {}))

    def findable(self, root, path, *, sub_block):
        """Return how many leading tokens of `path` are in published blocks."""
        size = self.block_size
        parent, num_tokens = root, 0
        while num_tokens + size <= len(path):
            last = path[num_tokens + size - 1]
            if last not in self.children.get(parent, {}):
                break
            parent, num_tokens = last, num_tokens + size
        if not sub_block:
            return num_tokens
        rest = path[num_tokens : num_tokens + size]
        heads = (common_length(rest, block) for block in self.children.get(parent, {}).values())
        return num_tokens + max(heads, default=0)


def common_length(left, right):
    """Return the length of the longest common prefix of two lists."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))


@dataclass
class Drafts:
    """A line of drafts that was computed and waits: its tokens and their identities."""

    tokens: list
    names: list


@dataclass(eq=False)
class Live:
    """One sequence as the model knows it.

    `known` are the tokens that it must commit next: its prompt, or after a resume all that it
    had; `tokens` those computed, `path` their identities. `store_limit` is the number of its tokens that may
    ever be published. It counts with the tokens that it `found` once it is `admitted`: its first reserve succeeded.
    """

    seq: object
    scope: object
    media: tuple
    prompt: list
    known: list
    tokens: list = field(default_factory=list)
    path: list = field(default_factory=list)
    suspended: bool = False
    store_limit: float = float("inf")
    drafts: Drafts | None = None
    found: int = 0
    admitted: bool = False

    def twin(self, seq):
        """Return the same sequence under another handle, without its drafts."""
        own = {"known": self.known[:], "tokens": self.tokens[:], "path": self.path[:]}
        return replace(self, seq=seq, drafts=None, **own)

    @property
    def storable(self):
        """The identities of what may be found of it."""
        return self.path[: int(min(self.store_limit, len(self.path)))]

    def cut(self, num_tokens):
        """Keep `num_tokens` tokens; the prompt stays what must come next."""
        self.known = self.known[: max(num_tokens, len(self.prompt))]
        self.tokens, self.path = self.tokens[:num_tokens], self.path[:num_tokens]

    def next_tokens(self, num_tokens, filler):
        """Return the next `num_tokens` tokens: the known ones first, then from `filler`."""
        ids = self.known[len(self.tokens) : len(self.tokens) + num_tokens]
        missing = num_tokens - len(ids)
        return ids + [filler[i % len(filler)] for i in range(missing)]
