"""Questions about documents: the KV of a passage is reused wherever it stands in a prompt.

pip install bm25s
python examples/rag.py [FOLDER OF .md FILES, NUMBER OF QUESTIONS]
"""

import sys
from pathlib import Path
from statistics import median

import bm25s
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire import PrefixCache, demo_model
from quire_passages import KVDeviation, Passages

TOKENS, FOUND = 256, 8  # of a passage; passages of a prompt


def main(folder: Path, num_questions: int) -> None:
    """Ask how sentences of the documents go on, with exact prefixes alone and with passages reused."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32).eval()
    texts = [path.read_text("utf-8") for path in sorted(folder.glob("*.md"))]
    documents = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    passages = [
        ids[at : at + TOKENS] for ids in documents for at in range(0, len(ids) - TOKENS, TOKENS)
    ]
    words = bm25s.tokenize(tokenizer.batch_decode(passages), show_progress=False)
    retriever = bm25s.BM25()
    retriever.index(words, show_progress=False)

    prefixes = PrefixCache(model, capacity="256MiB")
    reusing = PrefixCache(model, "256MiB", passages=Passages("512MiB", KVDeviation(0.2), None))
    head, line_end = [tokenizer.bos_token_id], tokenizer("\n").input_ids
    reusing.passages.capture(passages, head=head)
    exact_ms, passage_ms, same = [], [], 0
    for number in range(num_questions):
        start = passages[number * 37 % len(passages)][40:90]
        asked = bm25s.tokenize(tokenizer.decode(start), show_progress=False)
        found, _ = retriever.retrieve(asked, k=FOUND, show_progress=False)
        segments = [head, *(passages[at] for at in found[0]), [*line_end, *start]]
        prompt = torch.tensor([[token for segment in segments for token in segment]])
        exact = prefixes.generate(input_ids=prompt, max_new_tokens=24, do_sample=False)
        blended = reusing.generate(segments=segments, max_new_tokens=24, do_sample=False)
        same += torch.equal(exact, blended)
        exact_ms.append(prefixes.last.ttft_s * 1e3)
        passage_ms.append(reusing.last.ttft_s * 1e3)
        if number < 3:
            print(f"> {tokenizer.decode(start)!r}\n{tokenizer.decode(blended[0, -24:])!r}")
            print(f"  {reusing.last.passages.moved_tokens} tokens moved of {prompt.shape[1]}\n")
    print(f"{num_questions} questions, {same} answers the same; ms to the first token: "
          f"{median(exact_ms):.1f} with exact prefixes, {median(passage_ms):.1f} with passages reused")  # fmt: skip


if __name__ == "__main__":
    folder, number = sys.argv[1:] or ("docs/decisions", 40)
    main(Path(folder), int(number))
