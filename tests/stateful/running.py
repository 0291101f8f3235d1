"""Running a state machine, the default length or for as long as is asked."""

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

STEPS_PER_EXAMPLE = 50


def run_machine(machine, number, examples, steps_per_example=STEPS_PER_EXAMPLE):
    """Run `examples` sequences of a machine with one seed."""
    run_state_machine_as_test(
        seed(number)(type("Seeded", (machine,), {})),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps_per_example,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
            print_blob=False,
            report_multiple_bugs=False,
        ),
    )
