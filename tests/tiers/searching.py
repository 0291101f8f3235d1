"""Searches for bytes in what tiers stand on: every byte of a directory, of an arena, of names."""

from base64 import b64encode
from functools import cache


@cache
def spellings(needle):
    """Return bytes as they are, and as file names and JSON spell them, wherever they begin."""
    spelled = [needle, needle.hex().encode()]
    for before in range(3):
        text = b64encode(b"x" * before + needle)
        spelled.append(text[(before * 8 + 5) // 6 : len(needle) * 8 // 6 - 1])
    return spelled


def found_in_bytes(name, data, *needles):
    each_spelled = (each for needle in needles for each in spellings(needle))
    return [f"{name}: {each!r}" for each in each_spelled if each in data]


def found_in_files(folder, *needles):
    """Return where needles are found in the names and the contents of all files below a folder, each read once."""
    where = []
    for path in sorted(folder.rglob("*")):
        where += found_in_bytes(f"name {path}", str(path.relative_to(folder)).encode(), *needles)
        if path.is_file():
            where += found_in_bytes(str(path), path.read_bytes(), *needles)
    return where


def found_in_memory(tier, *needles):
    """Return where needles are found in the memory of a `Host`, and in the keys of its indexes."""
    arena = tier._arena
    where = found_in_bytes("arena", arena.memory.tobytes(), *needles)
    for size, shelf in arena.shelves.items():
        where += found_in_bytes(f"index {size}", bytes(shelf.index._keys), *needles)
    return where


def found_in_pools(pools, *needles):
    """Return which tensors of paged pools have a needle."""
    where = []
    for number, pool in enumerate(pools):
        for name, held in enumerate(pool._by_block()):
            data = held.detach().cpu().contiguous().numpy().tobytes()
            where += found_in_bytes(f"pool {number}.{name}", data, *needles)
    return where


def found_in_passes(model, *needles):
    """Return whether what a packed model keeps between its layers has a needle."""
    passes = model._decoder._kept[1]
    if passes is None:
        return []
    rooms = (*passes._inputs, *passes._rooms.values(), *passes._heads.values(), passes._states)
    return [
        each
        for room in rooms
        for each in found_in_bytes("passes", room.contiguous().numpy().tobytes(), *needles)
    ]
