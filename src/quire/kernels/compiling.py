"""Vector code turned into machine code, and calls of it by any number of threads.

It takes a second, once for each CPU (`code_cache`), and needs no compiler on the machine.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from collections.abc import Callable, Sequence
from ctypes import CDLL, CFUNCTYPE, c_int64, c_void_p, cast
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import llvmlite
import numpy as np
from llvmlite import binding, ir

from quire.kernels.code import Code
from quire.kernels.code_cache import MachineCode, machine_code
from quire.kernels.vectors import HAS_PAIRS, INT, WORD


class Pass(NamedTuple):
    """A call of compiled functions, one after another, each by all of its threads.

    functions  their addresses; each takes the address of `inputs`
    inputs     int64 numbers and addresses; the first are what has been claimed of each function's work, 0 before it runs
    threads    how many call each function
    held       what must not go before they have run
    """

    functions: Sequence[int]
    inputs: Any
    threads: int
    held: Any = None


class Program:
    """Passes, one behind the other in one call, as often as one likes.

    last  the inputs of the last one, which may be changed before a call
    """

    def __init__(self, passes: Sequence[Pass]) -> None:
        inputs = [np.array(each.inputs, np.int64) for each in passes]
        calls = [
            (function, address, address + 8 * i, each.threads)
            for each, address in zip(passes, (each.ctypes.data for each in inputs), strict=True)
            for i, function in enumerate(each.functions)
        ]
        self.last = inputs[-1]
        self._calls = np.array(calls, np.int64)
        self._starts = np.cumsum([0, *(len(each.functions) for each in passes)]).tolist()
        self._held = passes, inputs

    def run(self, first: int = 0, stop: int | None = None) -> None:
        """Run the passes, or those of some places."""
        start, end = self._starts[first], self._starts[-1 if stop is None else stop]
        _runner()(self._calls.ctypes.data + start * _CALL, end - start, _fork())


_CALL = 4 * 8
"""Bytes of a call."""


@cache
def functions(write: Callable[..., Sequence[Code]], *given: Any) -> Sequence[int]:
    """Return the addresses of functions that `write(module, *given)` writes and returns; they are never unloaded.

    given  numbers, texts and tuples of them; these alone say what is written
    """
    cpu = this_cpu()
    facts = _COMPILER, cpu, f"{write.__module__}.{write.__qualname__}", given
    code = machine_code(facts, lambda: _compiled(cpu, write, given))
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine(cpu))
    engine.add_object_file(binding.ObjectFileRef.from_data(code.content))
    engine.finalize_object()
    _engines.append(engine)
    return [engine.get_function_address(name) for name in code.names]


_engines: list[Any] = []
"""What holds code that was loaded: each is found in a cache by what it was made for."""

_COMPILER = (
    llvmlite.__version__,
    binding.llvm_version_info,
    binding.get_default_triple(),
    HAS_PAIRS,  # which those who write ask for
)


class Cpu(NamedTuple):
    """A CPU by LLVM's name of it, and its features; without both, any of its kind."""

    name: str
    features: str


def this_cpu() -> Cpu:
    """Return the CPU that this process runs on."""
    return Cpu(binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten())


@cache
def _runner() -> Any:
    """Return `run(calls, count, fork)` for int64 `[count, 4]`: a function, what it takes, where it claims, and threads."""
    (address,) = functions(_run)
    return CFUNCTYPE(None, c_int64, c_int64, c_int64)(address)


def _run(module: ir.Module) -> Sequence[Code]:
    code = Code(module, "run", 3)
    calls, count, fork = code.arguments
    with code.loop(0, count) as at:
        place = calls + at * _CALL
        function, inputs, claimed, threads = (code.load(place + i * 8, INT) for i in range(4))
        code.store(code.constant(0), claimed)
        with code.either((threads.min(fork)) > 1) as (forked, alone):
            with forked:
                code.call_at(fork, function, inputs, threads.narrowed(), code.constant(0, WORD))
            with alone:
                code.call_at(function, inputs)
    return [code]


def _machine(cpu: Cpu) -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    return target.create_target_machine(*cpu, opt=2, jit=True)


def _compiled(cpu: Cpu, write: Callable[..., Sequence[Code]], given: Sequence[Any]) -> MachineCode:
    """Compile what `write(module, *given)` writes."""
    module = ir.Module()
    codes = write(module, *given)
    for code in codes:
        code.end()
    parsed, machine = binding.parse_assembly(str(module)), _machine(cpu)
    parsed.verify()
    # What is written is vectors already: variables go to registers, and what is computed twice goes.
    passes = binding.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.add_loop_rotate_pass()
    passes.add_new_gvn_pass()
    options = binding.create_pipeline_tuning_options(speed_level=2)
    passes.run(parsed, binding.create_pass_builder(machine, options))
    return MachineCode([code.function.name for code in codes], machine.emit_object(parsed))


@cache
def _fork() -> int:
    """Return the address of GOMP_parallel of the OpenMP that torch runs on, whose threads are awake; 0: none."""
    found = find_spec("torch._C")
    held = CDLL(found and found.origin)  # a symbol is looked for in all that the library needs, too
    return cast(held.GOMP_parallel, c_void_p).value or 0 if hasattr(held, "GOMP_parallel") else 0
