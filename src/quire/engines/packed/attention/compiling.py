"""Vector code turned into machine code: it takes a fraction of a second and needs no compiler on the machine."""

# pyright: basic, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, c_int64
from typing import Any

from llvmlite import binding, ir

from quire.engines.packed.attention.vectors import WORD, Code


def for_threads(module: ir.Module, phases: Sequence[Code]) -> Callable[[int, int, int], None]:
    """Compile phases, each of which takes an address; return `run(address, fork, threads)`.

    fork  the address of GOMP_parallel, by which all threads call each phase, or 0: one does
    """
    code = Code(module, "run", 3)
    address, fork, threads = code.arguments
    for phase in phases:
        phase.end()
        with code.either(fork > 0) as (forked, alone):
            with forked:
                values = (phase.address(code), address, threads.narrowed(), code.constant(0, WORD))
                code.call_at(fork, *values)
            with alone:
                code.call_at(phase.address(code), address)
    code.end()
    place, held = compiled(module, "run")
    run: Any = CFUNCTYPE(None, c_int64, c_int64, c_int64)(place)
    run.held = held
    return run


def compiled(module: ir.Module, name: str, *, host: bool = True) -> tuple[int, Any]:
    """Compile a module; return the address of one of its functions, and what keeps that alive.

    host  for this very CPU; else for any of its kind
    """
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = binding.get_host_cpu_features().flatten() if host else ""
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name() if host else "", features=features, opt=2, jit=True
    )
    parsed = binding.parse_assembly(str(module))
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
    engine = binding.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return engine.get_function_address(name), engine
