"""The cost of calls, for tests of ratios: CPU time, never the clock on the wall."""

import time


def cpu_s(call, rounds=3):
    """Seconds of this process's CPU that a call takes: the best of some rounds."""
    taken = []
    for _ in range(rounds):
        began = time.process_time()
        call()
        taken.append(time.process_time() - began)
    return min(taken)
