"""Text that comes piece by piece is the text of all tokens, in whole characters, and ends where it should."""

import functools
import json

import pytest
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import quire
from quire.chat.text import TextStream
from quire.engines.loop.params import SamplingParams
from turns import drawn

END, UNKNOWN = "<|end|>", "<unk>"
CORPUS = [
    "the cat sat on the mat, and then the dog said: stop! STOP. don't stop",
    "žluťoučký kůň, naïve café, 你好世界, 你好, こんにちは, привет, 😀😀👩‍👩‍👧 🇫🇷 é́ 한국어",
]


class Slow:
    """A tokenizer of transformers that is none of the fast ones, as far as decoding goes."""

    is_fast = False

    def __init__(self, fast):
        self.fast = fast

    def decode(self, ids, *, skip_special_tokens, clean_up_tokenization_spaces):
        return self.fast.decode(ids, skip_special_tokens, clean_up_tokenization_spaces=False)


@functools.cache
def tokenizer(kind):
    if kind == "bytes":
        return AutoTokenizer.from_pretrained(quire.demo_model())
    if kind in ("bpe", "slow"):
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=kind == "bpe"
        )
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, min_frequency=1, initial_alphabet=alphabet, show_progress=False
        )
    else:  # SentencePiece's ways: spaces as marks, a first one dropped, unknown characters as bytes
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token=UNKNOWN))
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        made.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=360,
            min_frequency=1,
            show_progress=False,
            special_tokens=[UNKNOWN, *(f"<0x{byte:02X}>" for byte in range(256))],
        )
    made.train_from_iterator(CORPUS[:1] if kind == "pieces" else CORPUS, trainer)
    if kind == "pieces":  # bytes are tokens like others, which its trainer does not think
        content = json.loads(made.to_str())
        made = Tokenizer.from_str(json.dumps({**content, "added_tokens": []}))
    made.add_special_tokens([AddedToken(END, special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)
    return Slow(fast) if kind == "slow" else fast


def encode(kind, text):
    made = tokenizer(kind)
    return getattr(made, "fast", made).encode(text, add_special_tokens=False)


def decode(kind, ids, *, skip=True):
    made = tokenizer(kind)
    return getattr(made, "fast", made).decode(
        ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )


def pieces(stream, ids, sizes=()):
    """Return what comes of ids that are fed in parts of these sizes, then one by one."""
    said, at = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        said.append(stream.feed(ids[at : at + size]))
        at += size
    return [*said, stream.finish()]


KINDS = ["bytes", "bpe", "slow", "pieces"]
SIZES = st.lists(st.integers(0, 12), max_size=4)
PROSE = st.text(
    st.sampled_from("ab .,sto\n你é😀👩‍🇫\u0301\u200d") | st.characters(exclude_categories=["Cs"]),
    max_size=40,
)
PROSE |= st.sampled_from([CORPUS[0], CORPUS[1] * 3])


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", KINDS)
@drawn(30, 600, PROSE, SIZES)
def test_streamed_pieces_join_to_the_text_and_cut_no_character(kind, text, sizes):
    ids = encode(kind, text)
    said = pieces(TextStream(tokenizer(kind), SamplingParams()), ids, sizes)
    whole = decode(kind, ids)
    assert "".join(said) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in said)
    assert said[-1] == "" or whole.endswith("\ufffd")  # nothing waits longer than it must


@pytest.mark.parametrize("kind", ["bytes", "bpe", "slow"])
@drawn(
    30,
    600,
    st.lists(
        st.sampled_from([0xFF, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xEF, 0xBF, 0xBD, 0x41]),
        max_size=60,
    ),
    SIZES,
)
def test_bytes_that_are_no_text_come_as_they_do_from_all_at_once(kind, content, sizes):
    if kind == "bytes":
        ids = content
    else:
        alphabet = {value: key for key, value in byte_letters().items()}
        made = getattr(tokenizer(kind), "fast", tokenizer(kind))
        ids = [made.convert_tokens_to_ids(alphabet[byte]) for byte in content]
    said = pieces(TextStream(tokenizer(kind), SamplingParams()), ids, sizes)
    assert "".join(said) == decode(kind, ids) == bytes(content).decode(errors="replace")


@functools.cache
def byte_letters():
    """Return the letters that stand for bytes in byte-level vocabularies."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {
        chr(256 + i): byte for i, byte in enumerate(rest)
    }


@pytest.mark.parametrize("kind", KINDS)
def test_garbage_without_end_costs_no_more_with_each_token_and_text_behind_it_is_whole(kind):
    made = getattr(tokenizer(kind), "fast", tokenizer(kind))
    letter = next(letter for letter, byte in byte_letters().items() if byte == 0xFF)
    bad = [made.convert_tokens_to_ids("<0xFF>" if kind == "pieces" else letter)]
    stream = TextStream(tokenizer(kind), SamplingParams())
    said = []
    for _ in range(400):
        said.append(stream.feed(bad))
        assert len(stream._decoder._window) < 80
    assert set("".join(said)) <= {"\ufffd"}
    assert 390 <= len("".join(said)) <= 400
    said = pieces(stream, encode(kind, "then 😀 你好, text"))
    assert "".join(said).lstrip("\ufffd").lstrip() == "then 😀 你好, text"


def reference(texts, stops, min_tokens, *, include):
    """Return the text and the stop of an answer whose tokens bring these texts, letter by letter."""
    text = ""
    for count, new in enumerate(texts, 1):
        for letter in new:
            text += letter
            ended = [stop for stop in stops if text.endswith(stop)]
            if ended and count > min_tokens:
                longest = max(ended, key=len)
                return text if include else text[: -len(longest)], longest, count
    return text, None, len(texts)


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", KINDS)
@drawn(
    40,
    800,
    st.text("abc é😀", min_size=0, max_size=25),
    st.lists(st.text("abc é😀", min_size=1, max_size=4), min_size=1, max_size=3),
    st.tuples(st.integers(0, 6), st.booleans()),
    SIZES,
)
def test_an_answer_ends_before_the_first_stop_and_no_part_of_it_is_said(
    kind, text, stops, ends, sizes
):
    least, include = ends
    ids = encode(kind, text)
    alone = TextStream(tokenizer(kind), SamplingParams())
    texts = [alone.feed([token]) for token in ids]
    assert alone.finish() == ""
    params = SamplingParams(
        stop=stops, min_tokens=least, include_stop_str_in_output=include, max_tokens=None
    )
    stream = TextStream(tokenizer(kind), params)
    said = pieces(stream, ids, sizes)
    expected, stop, count = reference(texts, stops, least, include=include)
    assert ("".join(said), stream.stopped, stream.num_tokens) == (expected, stop, count)
    for at in range(len(said)):  # what is said is never taken back
        assert expected.startswith("".join(said[:at]))


def test_a_stop_is_found_wherever_tokens_cut_it():
    stop, made = "<é|END>", tokenizer("bpe")
    ids = [
        made.convert_tokens_to_ids(letter)
        for byte in f"ab{stop}c".encode()
        for letter, other in byte_letters().items()
        if other == byte
    ]
    for first in range(len(ids) + 1):
        for second in range(first, len(ids) + 1):
            stream = TextStream(made, SamplingParams(stop=stop))
            said = [
                stream.feed(ids[:first]),
                stream.feed(ids[first:second]),
                stream.feed(ids[second:]),
            ]
            assert "".join(said) + stream.finish() == "ab"
            assert stream.stopped == stop
            assert all(piece in ("", "a", "b", "ab") for piece in said)


def test_only_what_may_become_a_stop_is_held_back():
    stream = TextStream(tokenizer("bytes"), SamplingParams(stop=["abc", "b!"]))
    said = [stream.feed([ord(letter)]) for letter in "xabab!"]
    assert said == ["x", "", "", "ab", "", "a"]
    assert stream.stopped == "b!"
    assert stream.finish() == ""
    stream = TextStream(tokenizer("bytes"), SamplingParams(stop="abc"))
    assert stream.feed(list(b"xab")) == "x"
    assert stream.finish() == "ab"
    assert stream.stopped is None


def test_a_character_that_is_cut_off_at_the_end_is_said_to_be():
    stream = TextStream(tokenizer("bytes"), SamplingParams())
    assert stream.feed(list("a😀".encode())[:-1]) == "a"
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_a_space_behind_the_prompt_comes_where_the_tokenizer_has_one():
    prompt, ids = encode("pieces", "the cat"), encode("pieces", "the mat")
    assert "".join(pieces(TextStream(tokenizer("pieces"), SamplingParams()), ids)) == "the mat"
    behind = TextStream(tokenizer("pieces"), SamplingParams(), prompt)
    assert "".join(pieces(behind, ids)) == " the mat"
    half = TextStream(tokenizer("bytes"), SamplingParams(), list("é".encode())[:1])
    assert half.feed(list("é!".encode())[1:]) == "é!"


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_left_out_unless_asked_for(kind):
    end = getattr(tokenizer(kind), "fast", tokenizer(kind)).eos_token_id
    ids = [*encode(kind, "the cat"), end, *encode(kind, "sat")]
    for skip in (True, False):
        said = pieces(TextStream(tokenizer(kind), SamplingParams(skip_special_tokens=skip)), ids)
        assert "".join(said) == decode(kind, ids, skip=skip)


def test_a_stream_without_tokenizer_or_detokenization_has_no_text():
    for stream in (
        TextStream(None, SamplingParams()),
        TextStream(tokenizer("bytes"), SamplingParams(detokenize=False)),
    ):
        assert pieces(stream, [65, 66]) == ["", "", ""]
        assert stream.stopped is None


def test_a_stop_within_the_least_number_of_tokens_is_text():
    stream = TextStream(tokenizer("bytes"), SamplingParams(stop=["ab", "abc"], min_tokens=2))
    assert [stream.feed([ord(letter)]) for letter in "abdab"] == ["", "", "abd", "", ""]
    assert stream.stopped == "ab"


def test_a_stream_holds_back_at_most_one_incomplete_character():
    stream = TextStream(tokenizer("bytes"), SamplingParams())
    said = [stream.feed([0xFF]) for _ in range(8)]
    assert said == ["", "", "", *["\ufffd"] * 5]


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        (b"caf\xc3", b"bc", "bc"),
        (b"caf\xc3", b"\xa9s", "és"),
        (b"a\xf0\x9f", b"\x98\x80!", "😀!"),
        (b"a\xe2\x82", b"\xe2\x82\xacb", "€b"),
        (b"a\x97", b"\xff.", "\ufffd."),
        (b"a\xe2", b"", ""),
        (b"plain", b"\xffb", "\ufffdb"),
    ],
)
@pytest.mark.parametrize("sizes", [(), (9,)])
def test_an_answer_starts_clean_behind_a_prompt_that_ends_inside_a_character(
    prompt, answer, text, sizes
):
    stream = TextStream(tokenizer("bytes"), SamplingParams(), list(prompt))
    assert "".join(pieces(stream, list(answer), sizes)) == text
