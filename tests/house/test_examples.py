"""The examples run as they stand."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """One thread: the models are too small for two, and other work may need the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hf_chat.py", "tokens cached"),
        ("own_engine.py", "300 cached, 3 to do"),
        ("parallel_samples.py", "anna again: 803 of 804 tokens cached"),
        ("agent_hints.py", "with the latencies of tools 6"),
        ("slots.py", "slot 1, 753 of 760 tokens held"),
    ],
)
def test_an_example_prints_its_result(name, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert said in capsys.readouterr().out


@pytest.mark.ci
@pytest.mark.slow
def test_the_example_of_retrieval_answers_with_passages_as_without(monkeypatch, capsys):
    pytest.importorskip("bm25s", reason="pip install bm25s")
    monkeypatch.setattr(sys, "argv", ["rag.py", str(EXAMPLES.parent / "docs" / "api"), "2"])
    runpy.run_path(str(EXAMPLES / "rag.py"), run_name="__main__")
    assert "2 questions, 2 answers the same" in capsys.readouterr().out


def test_the_examples_are_short():
    assert all(len(path.read_text().splitlines()) < 60 for path in EXAMPLES.glob("*.py"))
