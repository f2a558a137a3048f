"""Megatron's own tokenizers outside a training run: its flags, its builder, and errors a person can act on."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from wlb.errors import ConfigError

# What each type needs beyond Megatron-Core's own requirements.
_PACKAGES = {
    "HuggingFaceTokenizer": "transformers",
    "BertWordPieceLowerCase": "transformers",
    "BertWordPieceCase": "transformers",
    "GPT2BPETokenizer": "transformers",
    "MultimodalTokenizer": "transformers",
    "SFTTokenizer": "transformers",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTokenizer:
    """What preprocessing asks of a tokenizer.

    name: Megatron's name of its type.
    ids: text -> token ids.
    vocab_size: ids are in [0, vocab_size).
    eod: the end-of-document id; None if the tokenizer has none.
    dtype: of a stored token, by Megatron's rule: uint16 as long as the vocabulary allows.
    """

    name: str
    ids: Callable[[str], list[int]]
    vocab_size: int
    eod: int | None
    dtype: type[np.number]


def add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    """The tokenizer flags of Megatron's training script, made from Megatron's own definition of them."""
    with quiet_imports():
        from megatron.training.argument_utils import ArgumentGroupFactory
        from megatron.training.config import TokenizerConfig
    group = ArgumentGroupFactory(TokenizerConfig).build_group(parser, "tokenizer")
    group.add_argument(
        "--sft-tokenizer-prompt-format", default="nemotron-h-aligned", help="Prompt format of the SFTTokenizer."
    )


def text_tokenizer(args: argparse.Namespace) -> TextTokenizer:
    """Build the tokenizer that `args` (from `add_tokenizer_arguments`) describe. ConfigError if that is impossible."""
    kind = args.tokenizer_type
    if kind is None:
        raise ConfigError("--tokenizer-type must be given")
    package = _PACKAGES.get(kind)
    if package is not None:
        try:
            __import__(package)
        except ImportError as error:
            raise ConfigError(f"--tokenizer-type {kind} needs the package {package}, which is not installed") from error
    if kind.startswith("Null") and args.vocab_size is None:
        raise ConfigError(f"--tokenizer-type {kind} needs --vocab-size")
    with quiet_imports():
        from megatron.core.datasets.indexed_dataset import DType
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    # Padding the vocabulary is the model's affair, and needs parallel sizes that do not exist here.
    built_args = argparse.Namespace(**{**vars(args), "pad_vocab_size": False})
    try:
        tokenizer = build_tokenizer(built_args)
    except Exception as error:  # each library has its own, down to bare assertions
        raise ConfigError(f"--tokenizer-type {kind} cannot be built: {error or type(error).__name__}") from error
    vocab_size = int(tokenizer.vocab_size)
    return TextTokenizer(
        name=kind,
        ids=tokenizer.tokenize,
        vocab_size=vocab_size,
        eod=_eod(tokenizer),
        dtype=DType.optimal_dtype(vocab_size),
    )


def sentencepiece_tokenizer(model: str) -> TextTokenizer:
    """The SentencePiece model at `model`, as `--tokenizer-type SentencePieceTokenizer` builds it."""
    parser = argparse.ArgumentParser()
    add_tokenizer_arguments(parser)
    return text_tokenizer(
        parser.parse_args(["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(model)])
    )


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Importing Megatron-Core warns of every optional package and of the missing GPU: noise in a data tool."""
    level = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(level)


def _eod(tokenizer: Any) -> int | None:
    try:
        eod = tokenizer.eod
    except (AttributeError, NotImplementedError):
        return None
    return None if eod is None or eod < 0 else int(eod)
