"""`quire generate`: text from a model, with the cache at work over turns."""

import json
import sys
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from quire.bench.timing import Stamp
from quire.cli import chat, options, output
from quire.cli.files import check_new, check_writable, read_text
from quire.cli.models import TINY, load
from quire.cli.tiers import TierFile, TierKeyFile, TierLines, in_words, opened
from quire.config import parse_bytes
from quire.errors import ConfigError, TokensError


def generate(
    *,
    prompt: Annotated[str | None, typer.Argument(help="The prompt.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    turns: Annotated[
        Path | None, typer.Option(help="A conversation: a question per line, or a JSON list.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System text, or @FILE.")] = None,
    model: options.Model = TINY,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: options.Seed = 0,
    salt: Annotated[
        str | None, typer.Option(help="Share the cache only with calls of the same salt.")
    ] = None,
    lora: options.Loras = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            help="An image for the first question; may be given again.", show_default=False
        ),
    ] = None,
    save: options.SaveTo = None,
    record: options.RecordTo = None,
    kv_memory: options.KvMemory = "256MiB",
    tier: TierLines = None,
    tier_file: TierFile = None,
    tier_key_file: TierKeyFile = None,
    block_size: options.BlockSize = 16,
    dtype: options.Dtype = "float32",
    as_json: options.AsJson = False,
) -> None:
    """Generate text, and report the reused tokens.

    The prompt is the argument, --file, standard input, or the turns of a
    conversation (--turns: one question per line, or a JSON list of strings).
    The text goes to standard output as it is made. After each reply, one line
    on standard error says how many prompt tokens were cached, how many were
    computed, and when the first new token came.

    [bold]Examples[/bold]

      quire generate "What is a list?"
      quire generate --system @notes.txt --turns questions.txt
      echo "What is a list?" | quire generate --json
      quire generate --model ./my-model --temperature 0.8 "Once upon a time"
      quire generate --model ./my-vision-model --image cat.png "What is this?"
      quire generate --model ./my-model --lora ./my-adapter --salt me "Hello"
      quire generate --turns questions.txt --record talk.jsonl
      quire generate --tier host:2GiB --tier "disk:./kv?capacity=20GiB" "Hello"
    """
    questions = _questions(prompt, file, turns)
    talk: chat.Messages = []
    if system is not None:
        talk.append(chat.message("system", _system(system)))
    parse_bytes(kv_memory)
    check_writable(save)
    check_new(record)
    images = [chat.read_image(path) for path in image or ()]
    if lora and len(lora) > 1:
        raise ConfigError(f"--lora is given {len(lora)} times; a conversation has one adapter")
    folder = Path(lora[0]) if lora else None
    with ExitStack() as opening, output.progress(f"loading {model}"):
        stack = opening.enter_context(opened(tier, tier_file, tier_key_file))
        loaded, reader = load(model, dtype, images=bool(images), lora=folder)
        from quire.core import Scope
        from quire.engines.hf import PrefixCache

        recorder = output.recording(record, block_size)
        cache = PrefixCache(
            loaded,
            kv_memory,
            block_size,
            watchers=[recorder] if recorder is not None else [],
            tiers=stack,
        )
        opening.callback(cache.close)
        until_the_end = opening.pop_all()
    arguments = _sampling(temperature) | {
        "max_new_tokens": max_new_tokens,
        "scope": Scope(salt=salt),
        "pad_token_id": _pad_id(loaded, getattr(reader, "tokenizer", reader)),
    }
    made: list[dict[str, Any]] = []
    with until_the_end, recorder or nullcontext():
        for question in questions:
            talk.append(chat.message("user", question, () if made else images))
            if len(questions) > 1 and not as_json:
                output.stdout().print(Text(f"> {question}", "bold"))
            turn = _turn(cache, reader, talk, seed, arguments, streams=not as_json)
            made.append({"prompt": question, **turn})
            talk.append(chat.message("assistant", made[-1]["text"]))
    if save is not None:
        output.save_snapshot(save, cache.snapshot(), text_is_bytes=model == TINY)
    if as_json:
        stats = cache.stats
        totals = {"hit_rate": stats.hit_rate, "missed": stats.missed}
        scope = {"salt": salt, "lora": str(folder) if folder else None}
        output.print_json({"model": model, "scope": scope, "turns": made, "stats": totals})


def _turn(
    cache: Any,
    reader: Any,
    talk: chat.Messages,
    seed: int,
    arguments: dict[str, Any],
    *,
    streams: bool,
) -> dict[str, Any]:
    import torch
    from transformers import TextStreamer

    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    tokenizer = getattr(reader, "tokenizer", reader)
    device = cache.model.device
    inputs = {name: value.to(device) for name, value in chat.prompt_inputs(reader, talk).items()}
    ids = inputs.pop("input_ids")
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    stamp = Stamp(streamer if streams else None)
    mask = torch.ones_like(ids)
    output_ids = cache.generate(ids, attention_mask=mask, streamer=stamp, **arguments, **inputs)
    ended = time.perf_counter()
    ttft_s = (stamp.first_at or ended) - stamp.started
    new_ids = output_ids[0, ids.shape[1] :].tolist()
    report = cache.last
    if streams:
        output.stderr().print(
            f"[{report.cached_tokens:,} cached{in_words(report.tier_tokens)} + {report.computed_tokens:,} computed prompt "
            f"tokens, first token after {output.milliseconds(ttft_s)} ms]",
            style="dim cyan",
            markup=False,
            highlight=False,
        )
    return {
        "text": chat.reply_text(tokenizer, new_ids),
        "prompt_tokens": report.prompt_tokens,
        "cached_tokens": report.cached_tokens,
        "tier_tokens": report.tier_tokens,
        "computed_tokens": report.computed_tokens,
        "new_tokens": len(new_ids),
        "ttft_ms": ttft_s * 1e3,
        "total_ms": (ended - stamp.started) * 1e3,
    }


def _sampling(temperature: float) -> dict[str, Any]:
    return {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}


def _pad_id(model: Any, tokenizer: Any) -> int | None:
    pad = model.generation_config.pad_token_id
    return tokenizer.eos_token_id if pad is None else pad


def _questions(prompt: str | None, file: Path | None, turns: Path | None) -> list[str]:
    """Return the user's messages, turn by turn. Raises `ConfigError` and `TokensError`."""
    given = [source for source in (prompt, file, turns) if source is not None]
    if len(given) > 1:
        raise ConfigError("give the prompt once: as an argument, with --file or with --turns")
    if turns is not None:
        questions = _read_turns(turns)
    elif file is not None:
        questions = [read_text(file).strip()]
    elif prompt is not None:
        questions = [prompt]
    elif sys.stdin.isatty():
        raise TokensError("there is no prompt; give an argument, --file, --turns or text on stdin")
    else:
        questions = [sys.stdin.read().strip()]
    if not questions or not all(question.strip() for question in questions):
        raise TokensError("the prompt is empty; give some text")
    return questions


def _read_turns(path: Path) -> list[str]:
    text = read_text(path)
    if not text.lstrip().startswith("["):
        return [line for line in text.splitlines() if line.strip()]
    try:
        turns: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{str(path)!r} is no JSON list of strings: {error}") from error
    if not all(isinstance(turn, str) for turn in turns):
        raise ConfigError(f"{str(path)!r} must be a JSON list of strings only")
    return turns


def _system(text: str) -> str:
    return read_text(Path(text[1:])) if text.startswith("@") else text
