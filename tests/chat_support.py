"""Vocabularies of one token per byte and some control tokens, one for each dialect."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from conftest import random_model
from openk3.chat import Tokenizer
from openk3.chat.native import NATIVE_TOKENS
from openk3.chat.parser import ReplyParser
from openk3.chat.reply import Reply
from openk3.config import preset
from openk3.serve.logprobs import _byte_alphabet

if TYPE_CHECKING:
    from openk3.llm import LLM

# Qwen 3 in short: reasoning of earlier turns is left out, the rest as in its template.
QWEN = """{%- if tools %}<|im_start|>system
{{ messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' }}<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools><tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for c in m.tool_calls %}
{{ '\\n' }}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

MISTRAL = """{% for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}[TOOL_CALLS] [
{%- for c in m.tool_calls %}{{ c.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}]</s>
{%- elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]
{%- else %} {{ m.content }}</s>
{%- endif %}{% endfor %}"""

# Llama 3.1 in short.
LLAMA = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if tools and loop.last %}Respond with JSON, {"name": function name, "parameters": dictionary}.
{% for t in tools %}{{ t | tojson }}
{% endfor %}{% endif %}
{%- if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501

CHATML = ("<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
MISTRAL_TOKENS = ("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                  "[TOOL_RESULTS]", "[/TOOL_RESULTS]")  # fmt: skip


@cache
def tokenizer(dialect: str) -> Tokenizer:
    """What speaks "qwen" (marks are tokens), "qwen-text" (they are text), "plain" (no tools in its template),
    "mistral", "llama" (no marks) or "native".
    """
    special: Sequence[str] = CHATML
    tags: Sequence[str] = ()
    template: str | None = QWEN
    if dialect == "qwen":
        tags = TAGS
    elif dialect == "plain":
        template = PLAIN
    elif dialect == "llama":
        template = LLAMA
    elif dialect == "mistral":
        special, template = MISTRAL_TOKENS, MISTRAL
    elif dialect == "native":
        special, template = NATIVE_TOKENS, None
    backend = Backend(models.BPE(vocab=_byte_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in tags])
    end = next(text for text in ("<|im_end|>", "</s>", "<|end|>") if text in special)
    templates = {} if template is None else {"default": template}
    return Tokenizer(backend, special_tokens={"eos_token": end}, chat_templates=templates)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """A tool choice that leaves some of the tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def read(parser: ReplyParser, ids: Sequence[int], cuts: Sequence[int] = (), *, cut: bool = False) -> Reply:
    """Have a reply read in pieces that end at `cuts`."""
    reply = Reply()
    places = [0, *sorted(cuts), len(ids)]
    for begin, end in pairwise(places):
        reply.add(parser.feed(ids[begin:end]))
    reply.add(parser.finish(cut))
    return reply


def counted_ids() -> Any:
    """Ids for calls that are the same in every run: call0, call1, ..."""
    numbers = iter(range(1000))
    return lambda: f"call{next(numbers)}"


@cache
def chat_llm(dialect: str) -> LLM:
    """A random model that speaks a dialect, loaded from disk like any other. Never closed."""
    from openk3.llm import load

    directory = Path(tempfile.mkdtemp(prefix="openk3-chat-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    reads = tokenizer(dialect)
    random_model(replace(preset("debug"), vocab_size=320, max_position_embeddings=4096)).save_pretrained(directory)
    reads.backend.save(str(directory / "tokenizer.json"))
    settings = {"chat_template": reads.chat_template, **reads.special_tokens}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return load(directory)


def has_model_say(monkeypatch: pytest.MonkeyPatch, dialect: str, *parts: str) -> None:
    """Have every reply be made of `parts` (see `ids_of`) and the end of text, and not of what the random model prefers.

    All but the choice of the token is the real thing.
    """
    ids = [*ids_of(dialect, *parts), *tokenizer(dialect).eos_token_ids[:1]]

    def chosen(logits: Any, params: Any, seed: int, tokens: Sequence[int], prompt_length: int, *_: Any) -> int:
        return ids[len(tokens) - prompt_length]

    monkeypatch.setattr("openk3.engine.engine.sample_token", chosen)


def ids_of(dialect: str, *parts: str) -> list[int]:
    """Tokens of a reply: of parts that are a mark as a whole, the mark; else of the text, whatever it spells."""
    control = tokenizer(dialect).dialect.control
    ids: list[int] = []
    for part in parts:
        ids += [control.ids[part]] if part in control.ids else control.encode(control.guard(part))
    return ids
