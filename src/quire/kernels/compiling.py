"""Vector code turned into machine code, and calls of it by any number of threads.

It takes a second, once for each CPU (`code_cache`), and needs no compiler on the machine.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import platform
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, c_int64, c_void_p, cast
from functools import cache
from typing import Any, NamedTuple

import llvmlite
import numpy as np
from llvmlite import binding, ir

from quire.kernels.code import Code, Variable
from quire.kernels.code_cache import MachineCode, machine_code
from quire.kernels.teams import openmp
from quire.kernels.vectors import HAS_PAIRS, INT, WORD, Number


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
            (function, address, address + 8 * i)
            for each, address in zip(passes, (each.ctypes.data for each in inputs), strict=True)
            for i, function in enumerate(each.functions)
        ]
        self.last = inputs[-1]
        self._calls = np.array(calls, np.int64)
        self._starts = np.cumsum([0, *(len(each.functions) for each in passes)]).tolist()
        self._threads = max(each.threads for each in passes)
        self._held = passes, inputs

    def run(self, first: int = 0, stop: int | None = None) -> None:
        """Run the passes, or those of some places, with one team of threads."""
        start, end = self._starts[first], self._starts[-1 if stop is None else stop]
        calls = self._calls.ctypes.data + start * _CALL, end - start
        _runner()(*calls, self._threads if _team()[0] else 1, *_team())


_CALL = 3 * 8
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
    """Return `run(calls, count, threads, *team)` for int64 `[count, 3]`: a function, its argument, and where it claims."""
    run, _ = functions(_run)
    return CFUNCTYPE(None, *[c_int64] * 7)(run)


class _TeamInputs(NamedTuple):
    """Inputs of each thread of a team.

    arrived   how often threads have come to the end of a call
    finished  the calls that all threads have come to the end of
    asleep    threads that wait for the others and sleep
    size      the address of omp_get_num_threads
    system    the address of `syscall`, and `futex` the number of that call
    """

    calls: Any
    count: Any
    arrived: Any
    finished: Any
    asleep: Any
    size: Any
    system: Any
    futex: Any


_SPINS = 2000
"""Looks at a counter before a thread sleeps: most passes take less time than to sleep and to be woken."""
_WAIT, _WAKE = 128, 129
"""Operations of futex, within a process."""


def _run(module: ir.Module) -> Sequence[Code]:
    run, work = Code(module, "run", 7), Code(module, "work", 1)
    calls, count, threads, fork, *system = run.arguments
    none = run.constant(0)
    with run.loop(0, count) as at:
        run.store(none, run.number(calls + at * _CALL, 2))
    with run.either(threads > 1) as (forked, alone):
        with forked:
            given = run.room(8 * len(_TeamInputs._fields))
            for i, each in enumerate(_TeamInputs(calls, count, none, none, none, *system)):
                run.store(each, given + 8 * i)
            place = Number(run.builder, run.builder.ptrtoint(work.function, INT))
            run.call_at(fork, place, given, threads.narrowed(), run.constant(0, WORD))
        with alone, run.loop(0, count) as at:
            _call(run, calls, at)
    _work(work)
    return [run, work]


def _work(code: Code) -> None:
    """Write what a thread of a team does: all calls, and to wait for the others behind each.

    OpenMP's own threads sleep between two parallel regions where the process has more of them than there are cores, as
    servers do: to wake them takes as long as many a pass.
    """
    given = _TeamInputs(*code.numbers(code.arguments[0], _TeamInputs))
    threads = code.call_at(given.size, result=WORD).sign_extended()
    arrived, finished, asleep = (
        code.arguments[0] + 8 * _TeamInputs._fields.index(name)
        for name in ("arrived", "finished", "asleep")
    )

    def futex(operation: int, number: Number) -> None:
        numbers = map(code.constant, (operation, 0, 0, 0))
        kind, *rest = numbers
        code.call_at(given.system, given.futex, finished, kind, number, *rest, result=INT)

    with code.loop(0, given.count) as at:
        _call(code, given.calls, at)
        is_last = code.counted_up(arrived, 1).compared("==", (at + 1) * threads - 1)
        with code.either(is_last) as (last, early):
            with last:
                code.counted_up(finished, 1)
                with code.when(code.counted(asleep) > 0):
                    futex(_WAKE, threads)
            with early:
                spins = Variable(code, code.constant(0))
                with code.as_long_as(lambda: (code.counted(finished) <= at) & (spins.now < _SPINS)):
                    code.pause()
                    spins.now += 1
                with code.as_long_as(lambda: code.counted(finished) <= at):
                    code.counted_up(asleep, 1)
                    with code.when(code.counted(finished) <= at):
                        futex(_WAIT, at)
                    code.counted_up(asleep, -1)


def _call(code: Code, calls: Number, at: Number) -> None:
    function, inputs = (code.number(calls + at * _CALL, i) for i in range(2))
    code.call_at(function, inputs)


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


_FUTEX = {"x86_64": 202, "aarch64": 98}
"""The number of a system call, by machine."""


@cache
def _team() -> tuple[int, int, int, int]:
    """Return what forks a team of the OpenMP that torch runs on, whose threads are awake.

    These are the addresses of GOMP_parallel, omp_get_num_threads and `syscall`, and the number of `futex`; 0 without.
    """
    held = openmp()
    names = "GOMP_parallel", "omp_get_num_threads", "syscall"
    futex = _FUTEX.get(platform.machine(), 0)
    if not futex or not all(hasattr(held, name) for name in names):
        return 0, 0, 0, 0
    fork, size, system = (cast(getattr(held, name), c_void_p).value or 0 for name in names)
    return fork, size, system, futex
