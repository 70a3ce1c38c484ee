"""Streamed text equals the whole: any tokenizer of the usual kinds, any tokens, any stop texts, any cuts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from openk3.chat.tokenizer import Tokenizer
from openk3.engine.detokenizer import StopFinder, TextDecoder, TextStream

WORDS = ["Hel", "lo", "wor", "ld", "ab", "abc", "ba", "c", "好", "é"]


def with_special(backend: Backend) -> Tokenizer:
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return Tokenizer(backend)


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen and SmolLM: every byte is a token, and some sequences are."""
    symbols = dict(zip(range(256), sorted(pre_tokenizers.ByteLevel.alphabet()), strict=True))
    pieces = list(symbols.values())
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in (" Hello", "好", "你好", "\n\n", "é", "🙂", " a"):
        pieces.append("".join(piece for piece, _ in encode.pre_tokenize_str(text)))
    pieces.append(pieces[-2][:2])  # half an emoji
    backend = Backend(models.BPE(vocab={p: i for i, p in enumerate(dict.fromkeys(pieces))}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return with_special(backend)


def sentencepiece(strip: bool) -> Tokenizer:
    """As Llama 2 and Mistral (which drop a leading space) or Gemma (which keeps it): words and byte tokens."""
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁▁", *WORDS, *(f"▁{w}" for w in WORDS)]
    backend = Backend(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return with_special(backend)


def metaspace() -> Tokenizer:
    pieces = ["<unk>", "▁", *WORDS, *(f"▁{w}" for w in WORDS)]
    backend = Backend(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    return with_special(backend)


TOKENIZERS = {
    "byte level": byte_level(),
    "llama 2": sentencepiece(strip=True),
    "gemma": sentencepiece(strip=False),
    "metaspace": metaspace(),
}
tokenizers = st.sampled_from(sorted(TOKENIZERS))


def tokens_of(tokenizer: Tokenizer, draws: list[int]) -> list[int]:
    return [draw % tokenizer.vocab_size for draw in draws]


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = TextDecoder(tokenizer)
    return "".join([*(decoder.push(i) for i in ids), decoder.flush()])


@settings(max_examples=500, deadline=None)
@given(tokenizers, st.lists(st.integers(0, 10**6), max_size=25))
def test_pieces_add_up_to_the_whole(name: str, draws: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokens_of(tokenizer, draws)
    whole = tokenizer.decode(ids)
    # Byte tokens that are not UTF-8 are the documented exception: the whole run changes when it turns out broken.
    assume(name == "byte level" or "\ufffd" not in whole)
    assert streamed(tokenizer, ids) == whole


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["llama 2", "gemma"]), st.text(max_size=12))
def test_valid_text_in_byte_tokens_adds_up(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = [1 + byte for byte in text.encode(errors="ignore")]
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


@settings(max_examples=300, deadline=None)
@given(tokenizers, st.lists(st.integers(0, 10**6), max_size=25))
def test_characters_arrive_whole_and_as_soon_as_they_are(name: str, draws: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    decoder, shown = TextDecoder(tokenizer), ""
    ids = tokens_of(tokenizer, draws)
    for count, token in enumerate(ids, start=1):
        shown += decoder.push(token)
        whole = tokenizer.decode(ids[:count])
        if "\ufffd" not in whole:
            assert shown == whole


def test_an_emoji_over_four_tokens_is_held_back_until_it_is_whole() -> None:
    tokenizer = TOKENIZERS["llama 2"]
    decoder = TextDecoder(tokenizer)
    assert [decoder.push(1 + byte) for byte in "a🙂b".encode()] == ["a", "", "", "", "🙂", "b"]


def test_an_incomplete_character_is_shown_as_replacement_at_the_end() -> None:
    decoder = TextDecoder(TOKENIZERS["gemma"])
    assert [decoder.push(1 + byte) for byte in "a🙂".encode()[:3]] == ["a", "", ""]
    assert decoder.flush() == "\ufffd\ufffd"
    assert decoder.flush() == ""


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """By definition: the shortest beginning of the text that ends with a stop text."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


few_letters = st.text("abc", max_size=12)


@settings(max_examples=500, deadline=None)
@given(few_letters, st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_stops_do_not_depend_on_where_the_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    finder, shown, found, rest = StopFinder(stops), "", None, text
    while rest and found is None:
        cut = data.draw(st.integers(1, len(rest)))
        piece, found = finder.push(rest[:cut])
        shown, rest = shown + piece, rest[cut:]
    if found is None:
        shown += finder.flush()
    assert (shown, found) == first_stop(text, stops)


def test_only_what_may_become_a_stop_is_held_back() -> None:
    finder = StopFinder(["\n\nUser:", "END"])
    assert finder.push("one EN") == ("one ", None)
    assert finder.push("TRY\n") == ("ENTRY", None)
    assert finder.push("\nUs") == ("", None)
    assert finder.push("ers\n\nUser") == ("\n\nUsers", None)
    assert finder.push(": hi") == ("", "\n\nUser:")


def test_a_stop_inside_a_token_cuts_the_token() -> None:
    tokenizer = TOKENIZERS["metaspace"]
    ids = {tokenizer.backend.id_to_token(i): i for i in range(tokenizer.vocab_size)}
    stream = TextStream(tokenizer, ["bc"])
    assert stream.push(ids["▁Hel"]) == ("Hel", None)
    assert stream.push(ids["abc"]) == ("a", "bc")


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_special_tokens_give_no_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    special, plain = tokenizer.backend.token_to_id("</s>"), tokenizer.backend.token_to_id("<tool>")
    decoder = TextDecoder(tokenizer)
    assert "".join(decoder.push(i) for i in (special, plain, special, plain)) == tokenizer.decode([plain, plain])
