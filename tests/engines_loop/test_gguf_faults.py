"""Faults of what is around a GGUF engine: no answer changes, and no request beside it ends."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")
from gguf_engine_help import tiny_file, tiny_gguf
from loop_help import nothing_held

import quire
from cuts import LineCut
from quire.engines.gguf import GgufModel
from quire.engines.gguf.context import NoCells
from quire.engines.loop import Engine, SamplingParams
from quire.errors import ConfigError, Interrupted
from quire.tiers import Host
from quire.tiers.faults import FaultPlan, Faulty
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stack import TierStack

pytestmark = pytest.mark.system("llama.cpp")
PROMPTS = [[*range(3, 60)], [*range(3, 40), 5, 6, 7], [*range(50, 90)]]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ROOM = str(Path(quire.__file__).parent / "engines" / "gguf")


def answers(engine):
    return [each.outputs[0].token_ids for each in engine.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def right():
    """The answers of an engine that nothing happens to."""
    model = tiny_gguf(n_ctx=512)
    engine = Engine(model, num_blocks=60, block_size=8)
    found = answers(engine)
    engine.close()
    model.close()
    return found


def test_a_hung_tier_delays_a_step_by_its_patience_and_changes_no_token(right):
    settings = StackSettings(lookup_timeout_s=0.1, load_timeout_s=0.3, close_timeout_s=0.2)
    stack = TierStack([Faulty(Host("64MiB"), FaultPlan(hangs=1.0, hang_s=30.0))], settings)
    model, begun = tiny_gguf(n_ctx=512), time.monotonic()
    engine = Engine(model, num_blocks=60, block_size=8, tiers=stack)
    assert answers(engine) == right
    engine.close()
    nothing_held(engine)
    stack.close()
    model.close()
    assert time.monotonic() - begun < 20


def test_records_of_another_build_are_not_found(tmp_path, monkeypatch):
    def found():
        model = tiny_gguf(n_ctx=256)
        tiers = [f"disk:{tmp_path}?capacity=64MiB"]
        engine = Engine(model, num_blocks=30, block_size=8, tiers=tiers)
        (told,) = engine.generate([PROMPTS[0]], PARAMS)
        engine.close()
        model.close()
        return told.num_cached_tokens

    assert [found(), found()] == [0, 56]
    monkeypatch.setattr(tiny_gguf(n_ctx=256)._library, "version", "another")
    assert [found(), found()] == [0, 56]


def test_a_file_that_was_renamed_over_names_no_rows_of_the_one_that_is_loaded(tmp_path):
    file, new = tmp_path / "m.gguf", tmp_path / "new.gguf"
    shutil.copy(tiny_file(), file)
    with opened(file, tmp_path) as (model, engine):
        answers(engine)
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        new.write_bytes(data)
        new.replace(file)
        assert answers(engine)  # what is loaded stays as it was
        with pytest.raises(ConfigError, match=r"m.gguf' was replaced since it was loaded.* again"):
            Engine(model, num_blocks=60, block_size=8, tiers=[f"files:{tmp_path / 'kv'}"])
        Engine(model, num_blocks=60, block_size=8).close()  # one that tells no other process
    with opened(file, tmp_path) as (_, engine):
        assert engine.generate([PROMPTS[0]], PARAMS)[0].num_cached_tokens == 0


def test_rows_of_a_step_after_a_file_was_written_to_are_not_kept(right, tmp_path):
    file, before = tmp_path / "m.gguf", Path(tiny_file()).read_bytes()
    file.write_bytes(before)
    found = (len(PROMPTS[1]) - 1) // 8 * 8
    with opened(file, tmp_path) as (_, engine):
        engine.generate([PROMPTS[1]], PARAMS)
        with file.open("r+b") as opened_file:
            opened_file.seek(-200, os.SEEK_END)
            opened_file.write(bytes(200))
        engine.add_request(PROMPTS[2], PARAMS)
        (output,) = engine.step()
        assert "m.gguf' was written to since it was loaded" in str(output.error)
    file.write_bytes(before)
    with opened(file, tmp_path) as (_, engine):
        told = engine.generate(PROMPTS, PARAMS)
    assert [each.outputs[0].token_ids for each in told] == right
    assert [each.num_cached_tokens for each in told[1:]] == [found, 0]


@contextmanager
def opened(file, folder):
    """A model of a file, and an engine over it with a store in the folder."""
    exact = {"type_k": "f32", "type_v": "f32", "n_threads": 1}
    with closing(GgufModel(file, n_ctx=512, **exact)) as model:
        tiers = [f"files:{folder / 'kv'}?capacity=64MiB"]
        with closing(Engine(model, num_blocks=60, block_size=8, tiers=tiers)) as engine:
            yield model, engine


def test_rows_of_wrong_guesses_are_not_kept():
    model, prompt = tiny_gguf(n_ctx=512), [5, 6, 7, 8] * 9
    params = SamplingParams(temperature=1.3, seed=1, max_tokens=40, ignore_eos=True, speculation=4)

    def rows(text=None):
        engine = Engine(model, num_blocks=60, block_size=8)
        pool = engine._forward.residents
        if text is None:

            def drop():
                with suppress(NoCells):
                    pool.make_room(())

            engine.when_computing(drop)
            (told,) = engine.generate([prompt], params)
            text = prompt + told.outputs[0].token_ids
            pool.clear()  # all of them are restored next
        engine.when_computing(lambda: None)
        engine.generate([text], SamplingParams(temperature=0, max_tokens=1))
        found = pool.context.save(1, 0, len(text) - 1).view(np.float32)
        engine.close()
        return text, found

    text, found = rows()
    np.testing.assert_allclose(found, rows(text)[1], atol=1e-2)
    model.close()


@pytest.mark.parametrize("step", [31, pytest.param(1, marks=pytest.mark.ci)])
def test_ctrl_c_on_any_line_of_a_step_leaves_an_engine_right_or_says_what_to_do(right, step):
    model = tiny_gguf(n_ctx=256)

    def begun():
        engine = Engine(model, num_blocks=40, block_size=8, max_step_tokens=70)
        for prompt in PROMPTS:
            engine.add_request(prompt, PARAMS)
        engine.step()
        return engine

    def went_on(engine, cut):
        cut.run(engine.step)
        try:
            engine.step()
        except Interrupted:
            engine.reset()
        engine._forward.residents.check()
        assert answers(engine) == right
        engine._forward.residents.check()
        engine.close()

    whole = LineCut((ROOM,))
    went_on(begun(), whole)
    for at in range(1, whole.count + 1, step):
        went_on(begun(), LineCut((ROOM,), at))
    model.close()


ASKED_ELSEWHERE = """
import sys
from quire.engines.gguf import GgufModel
from quire.engines.loop import Engine, SamplingParams

model = GgufModel(sys.argv[1], n_ctx=512, type_k="f32", type_v="f32", n_threads=1)
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
for line in sys.stdin:
    engine = Engine(model, num_blocks=60, block_size=8, tiers=[sys.argv[2]])
    (told,) = engine.generate([[int(each) for each in line.split()]], params)
    engine.close()  # which stores what is cached
    print(told.num_cached_tokens, *told.outputs[0].token_ids, flush=True)
"""


@pytest.mark.ci
def test_two_processes_on_one_store_find_what_the_other_stored_and_answer_alike(right, tmp_path):
    store = f"files:{tmp_path / 'kv'}?capacity=64MiB"
    command = [sys.executable, "-c", ASKED_ELSEWHERE, tiny_file(), store]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        both = [stack.enter_context(subprocess.Popen(command, **pipes)) for _ in range(2)]

        def ask(number, prompt):
            both[number].stdin.write(f"{' '.join(map(str, prompt))}\n")
            both[number].stdin.flush()

        def told(number):
            cached, *tokens = map(int, both[number].stdout.readline().split())
            return cached, tokens

        for at, prompt in enumerate(PROMPTS):
            ask(at % 2, prompt)
            assert told(at % 2)[1] == right[at]
            ask(1 - at % 2, prompt)
            assert told(1 - at % 2) == ((len(prompt) - 1) // 8 * 8, right[at])
        for _ in range(3):  # at once: what both store, and what one reads that the other stores
            for prompt in PROMPTS:
                for number in range(2):
                    ask(number, prompt)
            for number in range(2):
                assert [told(number)[1] for _ in PROMPTS] == right
        for each in both:
            each.stdin.close()
            assert each.wait(20) == 0
