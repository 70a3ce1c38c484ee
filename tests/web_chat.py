"""What the web chat's tests share: a real tiny model that never ends by itself, and a served chat on its own file."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI
from serving import TEMPLATE, live
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from conftest import random_model
from openk3.config import preset
from openk3.serve.app import create_app
from openk3.serve.keys.ledger import Usage
from openk3.serve.web.records import Conversation, Message
from openk3.serve.web.replies import Replies
from openk3.serve.web.settings import ChatSettings
from openk3.serve.web.store import Store

if TYPE_CHECKING:
    from openk3.llm import LLM

CONTEXT = 8192

SHORT = ChatSettings(temperature=0.6, seed=0, max_tokens=24)
LONG = ChatSettings(temperature=0.6, seed=0, max_tokens=8000)


@functools.cache
def endless_llm() -> LLM:
    """The random debug model with 256 made-up words and no end token: only max_tokens or a stop ends its reply."""
    from openk3.llm import load

    directory = Path(tempfile.mkdtemp(prefix="openk3-endless-"))
    config = preset("debug")
    config.max_position_embeddings = CONTEXT
    config.eos_token_id = None
    random_model(config).save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    syllables = [consonant + vowel for consonant in "bdgk" for vowel in "aeio"]
    words = ["".join(pair) for pair in itertools.product(syllables, syllables)]
    words[:3] = ["[?]", "<|start|>", "<|end|>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[?]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words[1:3]])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return load(directory)


@dataclass
class Chat:
    """A served chat: its base URL, its application, and a second connection to its conversation file."""

    url: str
    app: FastAPI
    store: Store

    def conversation(self, *texts: str, settings: ChatSettings = SHORT) -> Conversation:
        """A stored conversation whose messages are `texts`, user and assistant in turn."""
        conversation = self.store.create(texts[0] if texts else "Empty", settings)
        for question, answer in zip(texts[::2], texts[1::2], strict=True):
            reply = self.store.begin_turn(conversation.id, question)
            assert self.store.save_reply(finished(reply, answer))
        return conversation

    def link(self, conversation: Conversation) -> str:
        return f"{self.url}/c/{conversation.id}"


def finished(reply: Message, text: str) -> Message:
    return replace(reply, content=text, status="complete")


@contextmanager
def served_chat(store_path: Path, llm: LLM | None = None, name: str = "debug") -> Iterator[Chat]:
    """Serve the chat on a real socket with `llm` (default: `endless_llm`)."""
    model = llm or endless_llm()
    state = store_path.parent / "state"
    app = create_app(lambda: model, model_name=name, store_path=store_path, state_folder=state, owns_model=False)
    with live(app) as url:
        store = Store(store_path)
        try:
            yield Chat(url, app, store)
        finally:
            store.close()


async def happens(replies: Replies, condition: Callable[[], object]) -> None:
    """Wait until `condition`, which may change with any event, holds."""
    changed = asyncio.Event()
    unsubscribe = replies.subscribe(lambda event: changed.set())
    async with asyncio.timeout(60):
        while not condition():
            await changed.wait()
            changed.clear()
    unsubscribe()


def nobody(owner: str, model: str, usage: Usage) -> None:
    """A ledger that nobody reads."""
