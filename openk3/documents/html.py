"""The text of an HTML page: what a reader sees, with headings as in Markdown and table cells divided by tabs."""

from __future__ import annotations

import re

from openk3.documents.encoding import decode

_HIDDEN = ["script", "style", "template", "noscript", "head", "iframe", "object", "svg", "canvas", "select", "input"]
_BLOCK = re.compile(
    "address|article|aside|blockquote|body|caption|dd|details|dialog|div|dl|dt|fieldset|figcaption|figure|footer|form|"
    "header|hr|li|main|nav|ol|p|pre|section|summary|table|tr|ul"
)
_PARAGRAPHS = ("p", "table", "ul", "ol", "pre", "blockquote", "section", "article")
_CELLS = ("td", "th")
_HEADING = re.compile(r"h([1-6])")
_CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([A-Za-z0-9_-]{2,20})", re.IGNORECASE)
_SPACE = re.compile(r"[ \t\r\f\v\n\u00a0]+")


def read_html(data: bytes) -> bytes:
    """Return the page's text as UTF-8. Runs confined: the parser is a C library.

    Raises:
        ValueError: it is no text, or has none to show.
    """
    from selectolax.lexbor import LexborHTMLParser

    tree = LexborHTMLParser(_decode(data))
    page = _Page()
    if tree.body is not None:
        node, root = tree.body.first_child, tree.body.mem_id  # comparing nodes would compare their HTML
        # By hand and not recursively: pages may be nested a hundred thousand levels deep.
        while node is not None:
            tag = node.tag or ""
            if tag == "-text":
                page.write(node.text_content or "")
            elif tag not in _HIDDEN and tag[:1] not in "-_":
                page.open(tag)
                if node.first_child is not None:
                    node = node.first_child
                    continue
            while node is not None and node.mem_id != root:
                page.close(node.tag or "")
                if node.next is not None:
                    node = node.next
                    break
                node = node.parent
            if node is not None and node.mem_id == root:
                break
    if not (text := "".join(page.parts).strip()):
        raise ValueError("the page has no text")
    return text.encode("utf-8", "replace")


class _Page:
    """The text so far, and the space that is due before more of it."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._due = ""

    def write(self, text: str) -> None:
        words = _SPACE.sub(" ", text)
        if words.startswith(" "):
            self._due = self._due or " "
        if shown := words.strip():
            self.parts += (self._due, shown)
            self._due = " " if words.endswith(" ") else ""

    def open(self, tag: str) -> None:
        if heading := _HEADING.fullmatch(tag):
            self._break(2)
            self.parts += (self._due, "#" * int(heading.group(1)) + " ")
            self._due = ""
        elif tag == "li":
            self._break(1)
            self.parts += (self._due, "- ")
            self._due = ""
        elif tag == "br" or _BLOCK.fullmatch(tag):
            self._break(2 if tag in _PARAGRAPHS else 1)

    def close(self, tag: str) -> None:
        if tag in _CELLS:
            self._due = "\t"
        elif _HEADING.fullmatch(tag) or _BLOCK.fullmatch(tag):
            self._break(2 if tag in _PARAGRAPHS or tag[0] == "h" else 1)

    def _break(self, lines: int) -> None:
        self._due = "\n" * max(lines, self._due.count("\n"))


def _decode(data: bytes) -> str:
    """By the page's own word for its encoding, unless the bytes tell otherwise."""
    declared = _CHARSET.search(data[:4096])
    if declared is not None:
        try:
            return data.decode(declared.group(1).decode()).replace("\0", "\ufffd")
        except (LookupError, UnicodeError):
            pass
    return decode(data)
