"""Trains a SentencePiece model on a bounded, seeded sample of a corpus in JSON lines."""

from __future__ import annotations

import io
import multiprocessing
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from megatron.wlb.preprocess_progress import Progress
from wlb.data.atomic_files import AtomicFiles
from wlb.data.json_lines import BadLine, LineError, read_blocks, texts_of_line
from wlb.errors import ConfigError, DataError

_BLOCK_BYTES = 1 << 20
_EXCERPT_CHARACTERS = 4096
_MAX_UTF8_BYTES = 4  # of one character


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieceConfig:
    """inputs: JSON-lines files. model: the `.model` file to write; a `.vocab` file goes beside it.

    sample_bytes: text to train on at most, in characters; the sample is uniform over the corpus's text.
    """

    inputs: tuple[Path, ...]
    model: Path
    vocab_size: int
    json_key: str = "text"
    model_type: Literal["bpe", "unigram"] = "bpe"
    sample_bytes: int = 8_000_000
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("vocab_size", "sample_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.model.suffix != ".model":
            raise ConfigError(f"model must end with .model, got {self.model.name!r}")


def train_sentencepiece(config: SentencePieceConfig) -> int:
    """Write model and vocabulary; returns the number of pieces. The same input and seed give the same model.

    The model keeps text as it is (no normalization, spaces and line ends are tokens, unknown characters become
    bytes), so source code survives a round trip. ConfigError if SentencePiece is not installed; DataError
    if a line is bad or the text is too little for the vocabulary.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise ConfigError("training a tokenizer needs the package sentencepiece, which is not installed") from error
    excerpts = _sample(config)
    model_bytes = _train_in_child(excerpts, config)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
    pieces = processor.get_piece_size()
    with AtomicFiles() as files:
        vocabulary = "".join(f"{processor.id_to_piece(i)}\t{processor.get_score(i):g}\n" for i in range(pieces))
        files.path_for(config.model.with_suffix(".vocab")).write_text(vocabulary, encoding="utf-8")
        files.path_for(config.model).write_bytes(model_bytes)
    return pieces


def _sample(config: SentencePieceConfig) -> list[str]:
    """Excerpts drawn in one pass with a reservoir (Vitter's algorithm R): memory is bounded by the sample."""
    rng = random.Random(config.seed)
    wanted = max(1, config.sample_bytes // _EXCERPT_CHARACTERS)
    reservoir: list[str] = []
    for seen, excerpt in enumerate(_excerpts(config)):
        if len(reservoir) < wanted:
            reservoir.append(excerpt)
        elif (place := rng.randrange(seen + 1)) < wanted:
            reservoir[place] = excerpt
    if not reservoir:
        raise DataError(f"key {config.json_key!r} must hold text to train on, got none")
    return reservoir


def _excerpts(config: SentencePieceConfig) -> Iterator[str]:
    total_bytes = sum(path.stat().st_size for path in config.inputs)
    with Progress("sampling", total_bytes=total_bytes, log_interval=10_000) as progress:
        for path in config.inputs:
            done_bytes = 0
            for block in read_blocks(path, block_bytes=_BLOCK_BYTES):
                lines = block.data.split(b"\n")
                for number, line in enumerate(lines, start=block.first_line):
                    if not line or line.isspace():
                        continue
                    try:
                        (text,) = texts_of_line(line, (config.json_key,))
                    except LineError as error:
                        raise DataError(str(BadLine(path=block.path, line=number, reason=str(error)))) from error
                    for start in range(0, len(text), _EXCERPT_CHARACTERS):
                        yield text[start : start + _EXCERPT_CHARACTERS]
                progress.update(num_bytes=block.read_bytes - done_bytes, documents=len(lines))
                done_bytes = block.read_bytes


def _train_in_child(excerpts: Sequence[str], config: SentencePieceConfig) -> bytes:
    """Training is one long call that hears no Ctrl-C: a child runs it, so that it can be killed and waited for."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_train, args=(sender, excerpts, config), daemon=True)
    child.start()
    sender.close()
    begin_s = time.monotonic()
    try:
        while not receiver.poll(10.0):
            print(f"training the tokenizer: {time.monotonic() - begin_s:.0f} s", flush=True)
        outcome = receiver.recv()
    except EOFError:
        raise DataError(
            "the tokenizer's training was killed, perhaps for lack of memory: use less --sample-bytes"
        ) from None
    finally:
        child.kill()
        child.join()
    if isinstance(outcome, str):
        raise DataError(f"the tokenizer cannot be trained with --vocab-size {config.vocab_size}: {outcome}")
    return outcome


def _train(sender: Connection, excerpts: Sequence[str], config: SentencePieceConfig) -> None:
    import sentencepiece

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            # A line end is a token of its own, so training never sees one: lines are what it counts pieces in.
            sentence_iterator=(line for excerpt in excerpts for line in excerpt.split("\n") if line),
            model_writer=model,
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            max_sentence_length=_EXCERPT_CHARACTERS * _MAX_UTF8_BYTES,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            byte_fallback=True,
            user_defined_symbols=["\n"],
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        # "INTERNAL: source.cc(123) [check] what happened": only the end of it speaks to a person.
        sender.send(str(error).rpartition("] ")[2])
    else:
        sender.send(model.getvalue())
