"""Tokenizers out of GGUF files against independent ones: a naive BPE written here, sentencepiece, and Transformers."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import regex
import tiny_gguf
import transformers
from gguf import GGUFWriter
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from openk3.weights import local_directory
from openk3.weights.gguf_file import open_gguf
from openk3.weights.gguf_tokenizer import end_ids, write_tokenizer
from openk3.weights.registry import find

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces   three\t\ttabs \n\n\n newlines\r\n and end   ",
    "I'm sure they'll say you've done it; IT'S fine.",
    "def f(x):\n    return x[::-1]  # 第一\n\n\nclass A(B):\n\tpass\n",
    "1 22 333 4444 3.14159 2026-01-02 ½ ٣٤",
    "今天天气很好，我们去公园散步吧。数字123和字母abc。",
    "日本語のテキスト、한국어 문장, ελληνικά, עברית, русский",
    "emoji 👩‍👩‍👧‍👦 🇨🇭 👍🏽 é vs é",
    '{"a": [1, 2, {"b": null}], "c": "\\u00e9"}',
    "a" * 70 + "\x00\x01\x7f\ufeff\u200b",
    "http://example.com/a?b=c&d=%20#e_f-g",
]
SPECIAL = ["<|im_start|>system\nBe brief.<|im_end|>\n", "x<|im_end|>", "<|im_start|><|im_start|> <|endoftext|>"]


def naive_bpe(text: str, pattern: str, ids: dict[str, int], merges: list[tuple[str, str]]) -> list[int]:
    """Byte-level BPE as defined (arXiv:1508.07909): split, spell in bytes, join the earliest-learned pair, repeat."""
    spelling = bytes_to_unicode()
    ranks = {pair: i for i, pair in enumerate(merges)}
    out = []
    for piece in regex.findall(pattern, text):
        parts = [spelling[b] for b in piece.encode()]
        while len(parts) > 1:
            rank, at = min((ranks.get(pair, 10**9), i) for i, pair in enumerate(pairwise(parts)))
            if rank == 10**9:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        out += [ids[part] for part in parts]
    return out


GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@cache
def vocabulary(directory: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


@cache
def backend(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@cache
def auto_tokenizer(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


# --- the real models ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen_dir() -> Path:
    model = find("qwen2.5-coder-0.5b")
    assert model is not None
    directory = local_directory(model)
    if directory is None:
        pytest.skip("qwen2.5-coder-0.5b is not on this machine: k3 pull qwen2.5-coder-0.5b")
    return directory


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_equals_naive_bpe(text: str, smollm2_dir: Path) -> None:
    """Published rule: every digit alone, then GPT-2's pattern."""
    ours = backend(smollm2_dir)
    ids, merges = vocabulary(smollm2_dir)
    want: list[int] = []
    for run in regex.findall(r"\p{N}|[^\p{N}]+", text):
        want += naive_bpe(run, GPT2, ids, merges)
    assert ours.encode(text).ids == want
    assert ours.decode(want, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", TEXTS)
def test_qwen_equals_naive_bpe_and_transformers(text: str, qwen_dir: Path) -> None:
    ours = backend(qwen_dir)
    normal = text.replace("e\u0301", "é")
    assert ours.encode(text).ids == naive_bpe(normal, QWEN2, *vocabulary(qwen_dir))
    assert ours.encode(text).ids == qwen_oracle(qwen_dir).encode(text)
    assert ours.decode(ours.encode(text).ids) == normal


@cache
def qwen_oracle(directory: Path) -> Any:
    """Transformers' own class for the family, built from vocabulary and merges alone."""
    ids, merges = vocabulary(directory)
    oracle = transformers.Qwen2Tokenizer(vocab={t: i for t, i in ids.items() if i < 151643}, merges=merges)
    special = sorted((i, t) for t, i in ids.items() if i >= 151643)
    oracle.add_tokens([transformers.AddedToken(t, normalized=False, special=True) for _, t in special])
    assert oracle.convert_tokens_to_ids("<|im_end|>") == 151645
    return oracle


def test_qwen_known_ids(qwen_dir: Path) -> None:
    """Numbers as the published tokenizer gives them."""
    ours = backend(qwen_dir)
    assert ours.encode("Hello world").ids == [9707, 1879]
    assert ours.encode("<|im_start|>user\nHi<|im_end|>\n").ids == [151644, 872, 198, 13048, 151645, 198]
    assert ours.token_to_id("<tool_call>") == 151657
    assert ours.get_vocab_size() == 151665


@pytest.mark.parametrize("text", SPECIAL + TEXTS[2:6])
@pytest.mark.parametrize("which", ["smollm2_dir", "qwen_dir"])
def test_auto_tokenizer_agrees(which: str, text: str, request: pytest.FixtureRequest) -> None:
    """Transformers reads the same directory to the same ids, texts and special tokens."""
    directory = request.getfixturevalue(which)
    ours, theirs = backend(directory), auto_tokenizer(directory)
    ids = ours.encode(text).ids
    assert ids == theirs.encode(text)
    for skip in (False, True):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert theirs.eos_token == "<|im_end|>"
    assert len(theirs) == ours.get_vocab_size()


def test_special_tokens_are_whole_and_skipped(smollm2_dir: Path) -> None:
    ours = backend(smollm2_dir)
    ids = ours.encode("<|im_start|>user\nHi<|im_end|>\n").ids
    assert ids[0] == 1
    assert ids.count(2) == 1
    assert ours.decode(ids) == "user\nHi\n"


def test_tool_call_tags_are_not_skipped(qwen_dir: Path) -> None:
    """A reply's tool calls are parsed from its text, so their tags must survive."""
    ours = backend(qwen_dir)
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert ours.decode(ours.encode(text).ids) == text


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi 你好 👋\n"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]


def test_smollm2_chat_template(smollm2_dir: Path) -> None:
    theirs = auto_tokenizer(smollm2_dir)
    assert theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi 你好 👋\n<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )
    assert theirs.apply_chat_template(CHAT[1:2], tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi 你好 👋\n<|im_end|>\n"
    )


def test_qwen_chat_template_with_tools(qwen_dir: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "二"}}}]
    messages = [
        CHAT[0],
        CHAT[3],
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "3"},
    ]
    got = auto_tokenizer(qwen_dir).apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=True)
    assert got == (
        "<|im_start|>system\nBe brief.\n\n# Tools\n\nYou may call one or more functions to assist with the user query."
        "\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        + json.dumps(tools[0])
        + "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": 1, "b": "二"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


# --- every pre-tokenizer --------------------------------------------------------------------------------------------


def tokenizer_of(path: Path, architecture: str = "llama", **changes: Any) -> Tokenizer:
    """The tokenizer of a GGUF file that holds little else, both ours and what Transformers makes of the directory."""
    metadata = {k.replace("__", "."): v for k, v in changes.items()}
    writer = GGUFWriter(path / "t.gguf", architecture)
    for key, value in (tiny_gguf.tokenizer_metadata() | metadata).items():
        tiny_gguf._add(writer, key, value)
    writer.add_tensor("token_embd.weight", np.zeros((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_tokenizer(open_gguf(path / "t.gguf"), path, 128)
    (path / "config.json").write_text(json.dumps({"model_type": architecture.replace("gemma3", "gemma3_text")}))
    return backend(path)


def changed(**changes: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def learned_merges() -> tuple[list[str], list[str]]:
    """A byte-level vocabulary with merges across letters, digits, spaces and punctuation, so that splits show."""
    tokens = list(bytes_to_unicode().values())
    merges = []
    spelling = bytes_to_unicode()
    for text in TEXTS:
        spelled = "".join(spelling[b] for b in text.encode())
        for at in range(0, len(spelled) - 1, 2):
            a, b = spelled[at], spelled[at + 1]
            if a + b not in tokens:
                tokens.append(a + b)
                merges.append(f"{a} {b}")
    for number in ("12", "123", "222", "333", "444"):
        if number not in tokens:
            tokens.append(number)
            merges.append(f"{number[:-1]} {number[-1]}" if number[:-1] in tokens else f"{number[0]} {number[1:]}")
    merges = [m for m in merges if all(part in tokens for part in m.split(" "))]
    return [*tokens, "<|begin|>", "<|end|>"], merges


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("name", "pattern"), [("gpt-2", GPT2), ("qwen2", QWEN2), ("llama-bpe", LLAMA3)])
def test_splits(name: str, pattern: str, text: str, tmp_path: Path) -> None:
    tokens, merges = learned_merges()
    changes = changed(pre=name, tokens=tokens, merges=merges, token_type=[1] * (len(tokens) - 2) + [3, 3])
    changes |= changed(bos_token_id=len(tokens) - 2, eos_token_id=len(tokens) - 1, add_bos_token=False)
    ours = tokenizer_of(tmp_path, **changes)
    if name == "qwen2":
        text = text.replace("e\u0301", "é")
    ids = {token: i for i, token in enumerate(tokens)}
    want = naive_bpe(text, pattern, ids, [tuple(m.split(" ")) for m in merges])
    if name == "llama-bpe":  # a piece that is a token is taken whole, whatever the merges say
        spelling = bytes_to_unicode()
        want = []
        for piece in regex.findall(pattern, text):
            spelled = "".join(spelling[b] for b in piece.encode())
            one = naive_bpe(piece, pattern, ids, [tuple(m.split(" ")) for m in merges])
            want += [ids[spelled]] if spelled in ids else one
    assert ours.encode(text).ids == want
    assert ours.decode(want) == text


@pytest.mark.parametrize(
    ("changes", "bos"),
    [
        ({}, False),
        (changed(pre="llama-bpe"), True),
        (changed(pre="llama-bpe", add_bos_token=False), False),
        (changed(add_bos_token=True), True),
    ],
)
@pytest.mark.parametrize("eos", [False, True])
def test_bos_and_eos(changes: dict[str, Any], bos: bool, eos: bool, tmp_path: Path) -> None:
    ours = tokenizer_of(tmp_path, **changes, **changed(add_eos_token=eos))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = ours.encode("hello").ids
    assert ids == theirs.encode("hello")
    assert (ids[0] == 261, ids[-1] == 262) == (bos, eos)
    assert ours.encode("hello", add_special_tokens=False).ids == theirs.encode("hello", add_special_tokens=False)


def test_token_types(tmp_path: Path) -> None:
    ours = tokenizer_of(tmp_path)
    assert ours.encode("a<think>b<|end|>").ids == [ours.token_to_id(t) for t in ("a", "<think>", "b", "<|end|>")]
    assert ours.decode([263, 262]) == "<think>"
    assert ours.get_vocab_size() == 264
    assert ours.token_to_id("[PAD0]") is None


def test_end_ids_gather_every_way_to_stop(tmp_path: Path) -> None:
    tokens = [*tiny_gguf.tokenizer_metadata()["tokenizer.ggml.tokens"][:264], "<|im_end|>", "<end_of_turn>"]
    changes = changed(tokens=tokens, token_type=[1] * 261 + [3, 3, 4, 3, 1], eot_token_id=261)
    tokenizer_of(tmp_path, **changes)
    assert end_ids(open_gguf(tmp_path / "t.gguf")) == [262, 261, 264]


# --- sentencepiece --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def pieces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """A SentencePiece model trained on the texts, and its GGUF tokenizer as llama.cpp writes it."""
    spm = pytest.importorskip("sentencepiece")
    directory = tmp_path_factory.mktemp("spm")
    gemma = request.param == "gemma3"
    corpus = [line for text in TEXTS * 3 for line in text.replace("\x00", "").splitlines() if line.strip()]
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_prefix=str(directory / "m"),
        vocab_size=520,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        add_dummy_prefix=not gemma,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<turn>", "\n\n"] if gemma else ["<turn>"],
        minloglevel=2,
    )
    model = spm.SentencePieceProcessor(model_file=str(directory / "m.model"))
    types, tokens = [], []
    for i in range(model.vocab_size()):
        kind = gguf.TokenType.NORMAL
        if model.is_unknown(i):
            kind = gguf.TokenType.UNKNOWN
        elif model.is_control(i):
            kind = gguf.TokenType.CONTROL
        elif model.is_byte(i):
            kind = gguf.TokenType.BYTE
        elif model.id_to_piece(i) in ("<turn>", "\n\n"):
            kind = gguf.TokenType.USER_DEFINED
        types.append(int(kind))
        tokens.append(model.id_to_piece(i))
    changes = changed(model="llama", pre=None, merges=None, tokens=tokens, token_type=types)
    changes |= changed(scores=[model.get_score(i) for i in range(model.vocab_size())], add_space_prefix=not gemma)
    changes |= changed(bos_token_id=1, eos_token_id=2, unknown_token_id=0)
    tokenizer_of(directory, request.param, **changes)
    return request.param, model, directory


@pytest.mark.parametrize("text", [t for t in TEXTS if t.strip() and "\x00" not in t] + ["x\n\ny", "?" * 9])
def test_equals_sentencepiece(text: str, pieces: tuple[str, Any, Path]) -> None:
    _, model, directory = pieces
    ours = backend(directory)
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ids == model.encode(text)
    assert ours.decode(ids) == text
    assert ours.encode(text).ids == [1, *ids]
    theirs = auto_tokenizer(directory)
    assert theirs.encode(text) == [1, *ids]
    assert theirs.decode(ids) == text


def test_user_defined_pieces_are_whole(pieces: tuple[str, Any, Path]) -> None:
    """In Llama's kind the text after one begins anew, with a space of its own, as llama.cpp has it."""
    architecture, model, directory = pieces
    ids = backend(directory).encode("a<turn>b", add_special_tokens=False).ids
    turn = model.piece_to_id("<turn>")
    anew = [*model.encode("a"), turn, *model.encode("b")]
    assert ids == (model.encode("a<turn>b") if architecture == "gemma3" else anew)


def test_control_pieces_do_not_come_from_text(pieces: tuple[str, Any, Path]) -> None:
    ours = backend(pieces[2])
    assert ours.encode("a</s>", add_special_tokens=False).ids[-1] == 2
    assert ours.token_to_id("<0x0A>") not in ours.encode("<0x0A>", add_special_tokens=False).ids
    assert ours.decode([1, 2]) == ""
