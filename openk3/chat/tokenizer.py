"""Text and chats to token ids and back, for any checkpoint directory in Hugging Face layout.

The work is done by the `tokenizers` library on the checkpoint's own ``tokenizer.json``; this file gathers what lies
around it: the special tokens (``tokenizer_config.json``), the ids that end a generation (``generation_config.json``,
``config.json``) and the chat templates (``chat_template.jinja`` and ``additional_chat_templates/*.jinja``, or those
inside ``tokenizer_config.json``). Neither torch nor Transformers is needed, so reading a tokenizer is quick.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel

from openk3.chat.dialect import Dialect, native_dialect, template_dialect
from openk3.chat.messages import check_text, validate_messages, validate_tools

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of one checkpoint. Safe to use from several threads.

    Attributes:
        backend: the `tokenizers.Tokenizer` underneath.
        vocab_size: number of ids it knows, added tokens included.
        bos_token_id: id of the first token of a text, or None.
        eos_token_ids: every id that ends a generation.
        special_ids: ids that `decode` leaves out by default.
        special_tokens: named special tokens, e.g. ``{"bos_token": "<s>"}``, as templates see them.
        chat_template: Jinja source of the default chat template, or None.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: dict[str, str] | None = None,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_templates: dict[str, str] | None = None,
    ) -> None:
        # A tokenizer.json may carry the truncation and padding of the training run that saved it.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        _make_special(backend, self.special_tokens.values())
        named = {name: backend.token_to_id(token) for name, token in self.special_tokens.items()}
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id: int | None = named.get("bos_token") if bos_token_id is None else bos_token_id
        eos = [*eos_token_ids, named.get("eos_token")]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in eos if i is not None))
        self.special_ids: frozenset[int] = frozenset(
            i for i, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._chat_templates = dict(chat_templates or {})
        self._texts: dict[int, str] = {}
        self._joins_bytes = isinstance(backend.decoder, ByteLevel)

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer":
        """Read the tokenizer of the checkpoint directory `path`.

        Raises:
            ValueError: no tokenizer.json there, or one of the files is not what its name says.
        """
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"no tokenizer.json in {directory}; a checkpoint needs one to read and write text")
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{file} is not a readable tokenizer: {error}") from None
        settings = _read_json(directory / "tokenizer_config.json")
        config = _read_json(directory / "config.json")
        generation = _read_json(directory / "generation_config.json")
        try:
            _add_missing_tokens(backend, settings.get("added_tokens_decoder"))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            place = f"{directory / 'tokenizer_config.json'}: added_tokens_decoder"
            raise ValueError(f"{place} is damaged ({type(error).__name__}: {error})") from None
        # Multimodal checkpoints keep the language model's ids one level down.
        sources = [generation, config, config.get("text_config") or {}]
        bos_ids = [i for source in sources for i in _ids(source.get("bos_token_id"))]
        special_tokens = dict(_named_tokens(settings))
        return cls(
            backend,
            special_tokens=special_tokens,
            bos_token_id=None if "bos_token" in special_tokens or not bos_ids else bos_ids[0],
            eos_token_ids=[i for source in sources for i in _ids(source.get("eos_token_id"))],
            chat_templates=_read_templates(directory, settings),
        )

    @property
    def chat_template(self) -> str | None:
        return self._chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`; with `add_special_tokens` inside the checkpoint's own frame (usually a first bos).

        Special tokens written out in `text` become their ids.

        Raises:
            ValueError: not a string, or text that is not valid Unicode (lone surrogates).
        """
        ids: list[int] = self.backend.encode(check_text(text, "text"), add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary give nothing.

        Raises:
            ValueError: something that is not a token id (a negative number, a float, text).
        """
        try:
            text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError):
            raise ValueError(f"token ids must be integers from 0 to {self.vocab_size - 1}") from None
        return text

    def text_of(self, token_id: int) -> str | None:
        """What a token adds to a text of whole characters, nothing if it is special; None where that depends on its
        neighbours: it holds part of a character, or the vocabulary is not one of bytes.
        """
        if not self._joins_bytes:
            return None
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id])
        return None if "\ufffd" in text else text

    def render_chat(self, messages: object, tools: object = None, add_generation_prompt: bool = True) -> str:
        """Return the chat as the text that the model reads, as Transformers' ``apply_chat_template`` does.

        Args:
            messages: list of messages, see `openk3.chat.messages`.
            tools: list of function tools in OpenAI's form, or None.
            add_generation_prompt: end with the header of the assistant's turn.

        Raises:
            ValueError: bad messages or tools, no template in the checkpoint, or the template refused the chat.
        """
        return self.dialect.render(validate_messages(messages), validate_tools(tools), add_generation_prompt)

    def encode_chat(self, messages: object, tools: object = None, add_generation_prompt: bool = True) -> list[int]:
        """Return the token ids of `render_chat`'s text; a control token that a message spells out stays text."""
        return self.dialect.encode(validate_messages(messages), validate_tools(tools), add_generation_prompt)

    @cached_property
    def dialect(self) -> Dialect:
        """How this checkpoint writes and reads chats.

        Raises:
            ValueError: it cannot chat, or its template is not valid Jinja.
        """
        if "default" in self._chat_templates:
            return template_dialect(self.backend, self._chat_templates, self.special_tokens)
        if (native := native_dialect(self.backend)) is not None:
            return native
        raise ValueError(
            "this checkpoint has no chat template, so it cannot chat: complete plain text with generate() "
            "instead, or put a chat_template.jinja beside its tokenizer.json"
        )


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in `file`, or an empty one where there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # broken UTF-8, broken JSON, integers of thousands of digits
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return value


def _read_templates(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return templates by name. Files win over the setting, as in Transformers."""
    files = {"default": directory / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    templates = {name: _read_template(file) for name, file in files.items() if file.is_file()}
    inside = settings.get("chat_template")
    if templates or inside is None:
        return templates
    if isinstance(inside, str):
        return {"default": inside}
    if isinstance(inside, list) and all(map(_is_named_template, inside)):
        return {entry["name"]: entry["template"] for entry in inside}
    raise ValueError(
        f"{directory / 'tokenizer_config.json'}: chat_template is neither text nor a list of named templates"
    )


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from None


def _is_named_template(entry: object) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(field), str) for field in ("name", "template"))


def _named_tokens(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in _NAMED_TOKENS:
        token = settings.get(name)
        if isinstance(token, dict):  # an AddedToken written out
            token = token.get("content")
        if isinstance(token, str):
            yield name, token


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int)]


def _add_missing_tokens(backend: Backend, entries: object) -> None:
    """Register tokens that only tokenizer_config.json declares (older checkpoints), in the order of their ids."""
    if not isinstance(entries, dict):
        return
    known = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    for _, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        token = AddedToken(entry["content"], **{flag: entry[flag] for flag in flags if flag in entry})
        if known.get(token.content) != token.special:
            backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])


def _make_special(backend: Backend, tokens: Iterable[str]) -> None:
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for token in dict.fromkeys(tokens):
        if token not in known and backend.token_to_id(token) is not None:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
