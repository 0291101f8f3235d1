"""A cluster index as small as can be, engines that publish, and streams that lose what they carry."""

from quire.exchange.wire import ClearedEvent, RemovedEvent, StoredEvent

SIZE = 2
MEDIA = ["GPU", "CPU", "DISK"]


def stored(hashes, tokens, parent=None, medium="GPU", **more):
    return StoredEvent(list(hashes), parent, list(tokens), SIZE, None, medium, None, **more)


def removed(hashes, medium="GPU", **more):
    return RemovedEvent(list(hashes), medium, **more)


class SmallIndex:
    """A model of the index for one replica: hashes with their whole texts and copies by medium."""

    def __init__(self):
        self.texts, self.copies = {}, {}

    def apply(self, events):
        for event in events:
            if isinstance(event, StoredEvent):
                self._store(event)
            elif isinstance(event, RemovedEvent):
                self._remove(event)
            elif isinstance(event, ClearedEvent):
                self.texts, self.copies = {}, {}

    def _store(self, event):
        text = () if event.parent_block_hash is None else self.texts.get(event.parent_block_hash)
        if text is None:
            return
        for at, name in enumerate(event.block_hashes):
            text += tuple(event.token_ids[at * SIZE : (at + 1) * SIZE])
            self.texts[name] = text
            copies = self.copies.setdefault(name, dict.fromkeys(MEDIA, 0))
            copies[event.medium] += 1

    def _remove(self, event):
        for name in event.block_hashes:
            if name in self.copies:
                copies = self.copies[name]
                copies[event.medium] = max(copies[event.medium] - 1, 0)
                if not any(copies.values()):
                    del self.copies[name], self.texts[name]

    def lookup(self, tokens):
        """Return tokens from the first one on, by tier."""
        held = {self.texts[name]: copies for name, copies in self.copies.items()}
        counts = [0, 0, 0]
        for end in range(SIZE, len(tokens) + 1, SIZE):
            copies = held.get(tuple(tokens[:end]))
            if copies is None:
                break
            counts[next(tier for tier, medium in enumerate(MEDIA) if copies[medium])] += SIZE
        return tuple(counts)


class Publisher:
    """An engine's cache: blocks by their texts, several of one text allowed, hashes of its own."""

    def __init__(self, seed):
        self.seed, self.blocks, self.number, self.sent = seed, [], 0, []

    def name(self, text):
        return hash((self.seed, text)) & ((1 << 64) - 1)

    def _publish(self, events):
        self.sent.append((self.number, events))
        self.number += 1

    def compute(self, text, medium):
        """Store a prompt's blocks that are not there, from the first missing one on."""
        whole = [text[:end] for end in range(SIZE, len(text) + 1, SIZE)]
        there = {held for held, _ in self.blocks}
        missing = [each for each in whole if each not in there] or whole[-1:]
        missing = whole[whole.index(missing[0]) :] if missing else []
        events = []
        if missing:
            parent = missing[0][:-SIZE]
            names = [self.name(each) for each in missing]
            tokens = [token for each in missing for token in each[-SIZE:]]
            events = [stored(names, tokens, self.name(parent) if parent else None, medium)]
            self.blocks += [(each, medium) for each in missing]
        self._publish(events)

    def drop(self, at):
        """Remove one block of any place: heads, too."""
        text, medium = self.blocks.pop(at % len(self.blocks))
        self._publish([removed([self.name(text)], medium)])

    def clear(self):
        self.blocks = []
        self._publish([ClearedEvent()])

    def snapshot(self):
        """Return all that is held as events, parents first; an orphan cannot be told."""
        events, told = [], {()}
        for text, medium in sorted(self.blocks, key=lambda block: len(block[0])):
            if text[:-SIZE] in told:
                parent = self.name(text[:-SIZE]) if len(text) > SIZE else None
                events.append(stored([self.name(text)], text[-SIZE:], parent, medium))
                told.add(text)
        return events
