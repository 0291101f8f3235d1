"""Today's core does what the core did when `quire0` was copied."""

from lockstep import drive


def test_the_core_and_its_oracle_agree_call_by_call():
    steps, _, calls = drive(
        2000, seed="test", without=("fifo", "hints", "learned", "lfu", "lost", "what_if")
    )
    assert steps >= 2000
    assert len(calls) > 60
