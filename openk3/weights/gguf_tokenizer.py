"""The tokenizer inside a GGUF file, as the files Hugging Face's loaders read.

A GGUF holds the vocabulary, merges or scores, a type per token and the name of a pre-tokenizer, but not the rules the
name stands for. They are written out here for the names that occur with the supported architectures:

- `gpt2` models are byte-level BPE; `tokenizer.ggml.pre` names how text is split before merging.
- `llama` models are SentencePiece BPE with byte fallback; their merges follow from the vocabulary and its scores.

Sources: llama.cpp `src/llama-vocab.cpp` (`llm_tokenizer_bpe`) for the names, the published `tokenizer.json` of each
family for the rules.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from openk3.weights.errors import CheckpointError, reason
from openk3.weights.gguf_file import GGUFFile

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Names under which chat models end a turn; a file names one of them as its EOS and a model may write another.
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "</s>", "<eos>")


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _Split:
    """How byte-level BPE text is split: by a pattern, or by GPT-2's own, each digit alone or not.

    `whole_words` looks a piece up in the vocabulary before merging it; `add_bos` holds for files that say nothing.
    """

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        if self.pattern is not None:
            split = pre_tokenizers.Split(Regex(self.pattern), behavior="isolated", invert=False)
            return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        by_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if self.single_digits:
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_gpt2])
        return by_gpt2


_SPLITS = {
    **dict.fromkeys(("default", "gpt-2"), _Split()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _Split(single_digits=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Split(_QWEN2, nfc=True)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "falcon3"), _Split(_LLAMA3, whole_words=True, add_bos=True)
    ),
    "tekken": _Split(_TEKKEN, whole_words=True, add_bos=True),
}


@dataclass(frozen=True)
class _Vocabulary:
    """What the file says about its tokens, by id."""

    tokens: list[str]
    types: list[int]
    scores: list[float]

    def of(self, *kinds: TokenType) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in kinds]


def write_tokenizer(file: GGUFFile, directory: Path, max_length: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and, where the file has one, `chat_template.jinja`.

    Raises:
        CheckpointError: the file has no tokenizer, or one of a kind that is not supported.
    """
    vocabulary = _vocabulary(file)
    try:
        tokenizer, add_bos = _build(file, vocabulary)
    except CheckpointError:
        raise
    except Exception as error:  # the tokenizers package raises bare exceptions
        raise CheckpointError(f"{file.path} holds a damaged tokenizer ({reason(error)}): download it again") from error
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": add_bos,
        "add_eos_token": bool(file.metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (index := _token_id(file, key, vocabulary)) is not None:
            config[f"{name}_token"] = vocabulary.tokens[index]
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")


def end_ids(file: GGUFFile) -> list[int]:
    """Every token id that ends a reply, the file's EOS first."""
    vocabulary = _vocabulary(file)
    found = [_token_id(file, key, vocabulary) for key in ("eos", "eot", "eom")]
    added = set(vocabulary.of(TokenType.CONTROL, TokenType.USER_DEFINED))
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    found += [ids[token] for token in _ENDS if token in added]
    return list(dict.fromkeys(i for i in found if i is not None))


def _vocabulary(file: GGUFFile) -> _Vocabulary:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise CheckpointError(f"{file.path} holds no tokenizer (tokenizer.ggml.tokens): take a complete GGUF file")
    types = file.metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    scores = file.metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    if len(types) != len(tokens) or len(scores) != len(tokens):
        raise CheckpointError(
            f"{file.path} has {len(tokens)} tokens, {len(types)} token types and {len(scores)} scores: the file is "
            f"damaged, download it again"
        )
    return _Vocabulary(tokens, types, scores)


def _token_id(file: GGUFFile, name: str, vocabulary: _Vocabulary) -> int | None:
    index = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if index is None or index == 2**32 - 1:  # llama.cpp's "none"
        return None
    if not isinstance(index, int) or not 0 <= index < len(vocabulary.tokens):
        raise CheckpointError(
            f"{file.path} has tokenizer.ggml.{name}_token_id = {index!r} with {len(vocabulary.tokens)} tokens: the "
            f"file is damaged, download it again"
        )
    return index


def _build(file: GGUFFile, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether it puts BOS in front."""
    model = file.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer, add_bos = _byte_level(file, vocabulary)
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece(file, vocabulary), True
    else:
        raise CheckpointError(
            f"{file.path} has a tokenizer of the kind {model!r} (tokenizer.ggml.model): gpt2 and llama are supported"
        )
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in vocabulary.of(TokenType.CONTROL, TokenType.UNKNOWN)]
    )
    tokenizer.add_tokens(
        [
            AddedToken(t, normalized=False, special=False)
            for t in vocabulary.of(TokenType.USER_DEFINED)
            if t.strip(" \u2581")
        ]
    )
    add_bos = bool(file.metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    bos = _token_id(file, "bos", vocabulary) if add_bos else None
    eos = _token_id(file, "eos", vocabulary) if file.metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if bos is not None or eos is not None:
        before = [] if bos is None else [vocabulary.tokens[bos]]
        after = [] if eos is None else [vocabulary.tokens[eos]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B:1", *after],
            special_tokens=[(vocabulary.tokens[i], i) for i in (bos, eos) if i is not None],
        )
    return tokenizer, bos is not None


def _kept(tokens: list[str], types: list[int]) -> dict[str, int]:
    """Tokens to ids, without the unused ones at the end that only pad the embedding to a round size."""
    count = len(tokens)
    while count and types[count - 1] == TokenType.UNUSED:
        count -= 1
    return {token: i for i, token in enumerate(tokens[:count])}


def _byte_level(file: GGUFFile, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    # Files from before the name was recorded: the Qwen architectures only ever had the one.
    name = file.metadata.get("tokenizer.ggml.pre") or ("qwen2" if "qwen" in file.architecture else "default")
    if name not in _SPLITS:
        raise CheckpointError(
            f"{file.path} splits text by the rule {name!r} (tokenizer.ggml.pre): supported are {', '.join(_SPLITS)}"
        )
    split = _SPLITS[name]
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not all(isinstance(m, str) and " " in m[1:] for m in merges):
        raise CheckpointError(f"{file.path} has no usable tokenizer.ggml.merges: take a complete GGUF file")
    pairs = [(m[:at], m[at + 1 :]) for m in merges for at in (m.index(" ", 1),)]
    tokenizer = Tokenizer(
        BPE(vocab=_kept(vocabulary.tokens, vocabulary.types), merges=pairs, ignore_merges=split.whole_words)
    )
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.add_bos


def _sentencepiece(file: GGUFFile, vocabulary: _Vocabulary) -> Tokenizer:
    gemma = file.architecture == "gemma3"
    # Runs of spaces are user-defined pieces, which llama.cpp writes as spaces; in the vocabulary they are runs of "▁".
    tokens = [t if t.strip(" ") else t.replace(" ", "\u2581") for t in vocabulary.tokens]
    # Gemma's scores do not give the order of its merges, the order of its vocabulary does.
    scores = [-float(i) for i in range(len(tokens))] if gemma else vocabulary.scores
    kept = _kept(tokens, vocabulary.types)
    mergeable = {
        token: score
        for token, kind, score in zip(tokens, vocabulary.types, scores, strict=True)
        if kind in (TokenType.NORMAL, TokenType.USER_DEFINED)
    }
    unknown = _token_id(file, "unknown", vocabulary)
    tokenizer = Tokenizer(
        BPE(
            vocab=kept,
            merges=_merges(mergeable, kept),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    # As in llama.cpp, the space that SentencePiece puts before a text also stands after every special token.
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", not gemma))
    spaces = [normalizers.Prepend("\u2581")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(content=" ", left=1, right=0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(mergeable: dict[str, float], ids: dict[str, int]) -> list[tuple[str, str]]:
    """BPE merges that build each piece from two others, best score first; of one piece's, the longest left part first.

    This is the order in which SentencePiece joins neighbours (arXiv:1808.06226): the pair whose union scores highest.
    """
    found = [
        (score, at, len(piece) - at, piece)
        for piece, score in mergeable.items()
        for at in range(1, len(piece))
        if piece[:at] in mergeable and piece[at:] in mergeable
    ]
    found.sort(key=lambda item: (-item[0], -item[1], ids[item[3]]))
    return [(piece[:at], piece[at:]) for _, at, _, piece in found]
