"""A checkpoint's chat template, run in a sandbox: messages and tools in, the text the model was trained on out.

The template is a Jinja program that is downloaded with the weights, so it runs in Jinja's immutable sandbox and sees
nothing but plain JSON values. The environment (trimmed blocks, loop controls, `raise_exception`, `strftime_now`, an
unescaped `tojson`, hardened `dict` and `namespace`) follows `transformers/utils/chat_template_utils.py`, and the tests
hold the output to Transformers' `apply_chat_template`. Unlike there, nothing here needs Transformers to be imported,
and whatever goes wrong inside a template is a ValueError.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from openk3.chat.messages import Message


class ChatTemplate:
    """One compiled template together with the special tokens it may write (`bos_token`, `eos_token`, ...).

    Args:
        source: the Jinja source.
        special_tokens: names to token texts, e.g. ``{"bos_token": "<s>"}``.

    Raises:
        ValueError: the source is not valid Jinja; the text gives the line.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._compiled = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template: line {error.lineno}: {error.message}") from None

    def render(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        effort: str | None = None,
    ) -> str:
        """Return the chat as text. Messages and tools must have passed `validate_messages` and `validate_tools`.

        The `effort` of reasoning is there for the template under the names that the families use; None leaves them out.

        Raises:
            ValueError: the template refused the chat (its own words are quoted) or failed on it.
        """
        try:
            return self._compiled.render(
                messages=[_with_reasoning(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **_effort_names(effort),
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: {error.message or error}") from None
        except Exception as error:  # a template is foreign code: any operation in it can fail
            raise ValueError(f"chat template: failed on these messages: {type(error).__name__}: {error}") from None


def _effort_names(effort: str | None) -> dict[str, Any]:
    # Qwen 3 and SmolLM 3, DeepSeek and Granite, GPT-OSS.
    thinks = effort != "none"
    return {} if effort is None else {"enable_thinking": thinks, "thinking": thinks, "reasoning_effort": effort}


def _with_reasoning(message: Message) -> dict[str, Any]:
    # Some templates read `thinking`, others `reasoning_content`; Transformers fills the one from the other.
    aliased: dict[str, Any] = dict(message)
    for name in ("reasoning_content", "thinking", "reasoning"):
        if aliased.get(name) is not None:
            return {"thinking": aliased[name], **aliased, "reasoning_content": aliased[name]}
    return aliased


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's part of a training text; for rendering it is only a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(lineno)


class _TemplateDict:
    """`dict` without its class attributes, which would lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """`namespace` that refuses underscore names, which would reach CPython internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_attribute(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the underscore name {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    return environment
