"""Markdown from the model, as HTML that cannot act.

Raw HTML in the text stays text, images become their description (a picture's address would be a request to a
stranger), and only http, https and mailto links become links. The page sanitizes the result once more in the browser
and forbids foreign requests by its content security policy, so a mistake here alone does no harm.

A reply arrives a few letters at a time. `StreamingMarkdown` cuts it into top-level blocks (paragraph, list, code
block ...) and renders only the last one again; finished blocks keep their identity, so a reader can select text while
more arrives.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from html import escape
from typing import Any
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict
from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
from pygments.util import ClassNotFound  # type: ignore[import-untyped]

_LINK_SCHEMES = ("http", "https", "mailto")
_FORMATTER = HtmlFormatter(nowrap=True)


def highlighted(code: str, language: str) -> str:
    """HTML of `code` with Pygments' token classes; plain escaped text for a language Pygments does not know."""
    try:
        lexer = get_lexer_by_name(language, stripnl=False) if language else None
    except ClassNotFound:
        lexer = None
    return str(highlight(code, lexer, _FORMATTER)) if lexer else escape(code)


def _code_block(renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: Any) -> str:
    words = tokens[index].info.split()
    language = words[0].lower() if words else ""
    return (
        f'<div class="code"><div class="code-head"><span>{escape(language) or "text"}</span>'
        '<button type="button" class="code-copy" aria-label="Copy code">Copy</button></div>'
        f'<pre tabindex="0"><code>{highlighted(tokens[index].content, language)}</code></pre></div>\n'
    )


def _image(renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: Any) -> str:
    return f'<span class="image-text">{escape(tokens[index].content) or "image"}</span>'


def _link_open(renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: Any) -> str:
    address = escape(str(tokens[index].attrGet("href") or ""))
    return f'<a class="external" href="{address}" rel="noopener noreferrer nofollow">'


def _table_open(renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: Any) -> str:
    return '<div class="table"><table>\n'


def _table_close(renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: Any) -> str:
    return "</table></div>\n"


def _is_web_link(url: str) -> bool:
    try:
        return urlsplit(url).scheme.lower() in _LINK_SCHEMES
    except ValueError:
        return False


def _markdown() -> MarkdownIt:
    # Line breaks are kept as in other chats: models write verse and addresses with single newlines.
    markdown = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])
    markdown.validateLink = _is_web_link  # type: ignore[method-assign]
    rules = {"fence": _code_block, "code_block": _code_block, "image": _image, "link_open": _link_open}
    for name, rule in {**rules, "table_open": _table_open, "table_close": _table_close}.items():
        markdown.add_render_rule(name, rule)
    return markdown


_MARKDOWN = _markdown()


def _blocks(text: str, env: MutableMapping[str, Any]) -> Iterator[tuple[int, str]]:
    """The top-level blocks of a Markdown text: (first line, HTML) of each."""
    tokens = _MARKDOWN.parse(text, env)
    start = depth = 0
    for end, token in enumerate(tokens, start=1):
        depth += token.nesting
        if depth == 0:
            lines = tokens[start].map
            assert lines is not None, "markdown-it maps every top-level block"
            yield lines[0], _MARKDOWN.renderer.render(tokens[start:end], _MARKDOWN.options, env)
            start = end


def _normalized(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def render_blocks(text: str) -> list[str]:
    """The HTML of every top-level block of a finished text."""
    return [html for _, html in _blocks(_normalized(text), {})]


class StreamingMarkdown:
    """Render a growing text block by block; settled blocks are never parsed again."""

    def __init__(self) -> None:
        self._env: dict[str, Any] = {}
        self._settled: list[str] = []
        self._offset = 0

    def update(self, text: str) -> list[str]:
        """The HTML of each block of `text`, which must begin with the text of the call before."""
        tail = _normalized(text)[self._offset :]
        blocks = list(_blocks(tail, self._env))
        if len(blocks) > 1:
            lines = tail.split("\n")
            last = blocks[-1][0]
            # A block is settled once the first line behind it is whole: "2" may yet become "2." and continue a list.
            if last < len(lines) - 1:
                self._settled += [html for _, html in blocks[:-1]]
                self._offset += sum(len(line) + 1 for line in lines[:last])
                blocks = blocks[-1:]
        return self._settled + [html for _, html in blocks]
