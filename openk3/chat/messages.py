"""What a chat message may look like, and the one check that every message passes before a template sees it.

Templates are programs that come with a checkpoint and trust their input: a missing field renders as nothing, a list
where text was meant renders as its Python repr. So each message is checked here, once, for the SDK, the command line
and the server alike, and rebuilt from plain JSON values. Errors are ValueErrors that name the place, as in
``messages[2].role: 'robot' is not one of system, user, assistant, tool``.

The format is that of OpenAI's chat completions: https://platform.openai.com/docs/api-reference/chat/create
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

ROLES = ("system", "user", "assistant", "tool")

# Far beyond any real JSON schema, and far below Python's recursion limit.
_MAX_DEPTH = 64

MAX_TOOLS = 128
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class Message(TypedDict, total=False):
    """One turn of a chat. ``role`` is required; ``content`` may be absent only beside ``tool_calls`` and ``tools``.

    A system message with ``tools`` and no content adds tools from its place in the chat on. A last assistant message
    that is ``partial`` is continued: the reply is what follows its text.
    """

    role: str
    content: str | list[dict[str, Any]]
    name: str
    reasoning_content: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    tools: list[dict[str, Any]]
    partial: bool


def validate_messages(messages: object) -> list[Message]:
    """Check a chat and return a fresh copy in the form that templates expect.

    In the copy, content given as a list of text parts is one string (parts joined by newlines, as llama.cpp and vLLM
    do), missing content beside tool calls is empty text, other fields that are None are absent, and the JSON text in
    ``tool_calls[i].function.arguments`` is the object it encodes.

    Args:
        messages: a non-empty list of mappings, each with a role and content.

    Raises:
        ValueError: anything that is not such a list; the text names the index and the field.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, (list, tuple)):
        raise ValueError(f"messages: expected a list of messages, got {kind(messages)}")
    if not messages:
        raise ValueError("messages: the list is empty; give at least one message")
    checked = [_validate_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    for i, message in enumerate(checked[:-1]):
        if "partial" in message:
            raise ValueError(f"messages[{i}].partial: only the last message can be continued")
    return checked


def validate_tools(tools: object) -> list[dict[str, Any]] | None:
    """Check a list of function tools in OpenAI's form and return a plain copy; None for None and the empty list.

    Raises:
        ValueError: not a list, an entry that is not ``{"type": "function", "function": {"name": ...}}``, a name that is
            taken or has other characters than letters, digits, ``_`` and ``-``, or more than 128 tools.
    """
    return None if tools is None else _tools(tools, "tools") or None


def offered_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """All tools of a checked chat: `tools`, then those that its system messages add.

    Raises:
        ValueError: a name that is there twice.
    """
    offered = [dict(tool) for tool in tools or ()]
    names = {tool["function"]["name"] for tool in offered}
    for i, message in enumerate(messages):
        for k, tool in enumerate(message.get("tools", ())):
            name = tool["function"]["name"]
            if name in names:
                raise ValueError(f"messages[{i}].tools[{k}].function.name: there is a tool {name!r} already")
            names.add(name)
            offered.append(tool)
    return offered


def _tools(tools: object, path: str) -> list[dict[str, Any]]:
    if not isinstance(tools, (list, tuple)):
        raise ValueError(f"{path}: expected a list of tools, got {kind(tools)}")
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"{path}: {len(tools)} tools; at most {MAX_TOOLS} are possible")
    checked: list[dict[str, Any]] = []
    names: set[str] = set()
    for i, tool in enumerate(tools):
        where = f"{path}[{i}]"
        if not isinstance(tool, Mapping):
            raise ValueError(f"{where}: expected an object, got {kind(tool)}")
        if tool.get("type") != "function":
            raise ValueError(
                f"{where}.type: {tool.get('type')!r} is not supported; the only kind of tool is 'function'"
            )
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise ValueError(f"{where}.function: expected an object, got {kind(function)}")
        _check_function(function, f"{where}.function")
        if function["name"] in names:
            raise ValueError(f"{where}.function.name: there is a tool {function['name']!r} already")
        names.add(function["name"])
        checked.append(_plain(tool, where))
    return checked


def _check_function(function: Mapping[str, Any], where: str) -> None:
    name = function.get("name")
    _required_name(name, f"{where}.name")
    if not _TOOL_NAME.fullmatch(str(name)):
        raise ValueError(
            f"{where}.name: {name!r} is not a name of 1 to 64 letters (a-z, A-Z), digits, underscores and dashes"
        )
    if function.get("description") is not None:
        check_text(function["description"], f"{where}.description")
    if not isinstance(function.get("parameters"), (Mapping, type(None))):
        raise ValueError(f"{where}.parameters: expected a JSON schema, got {kind(function['parameters'])}")
    if not isinstance(function.get("strict"), (bool, type(None))):
        raise ValueError(f"{where}.strict: expected true or false, got {kind(function['strict'])}")


def check_text(text: object, where: str) -> str:
    """Return `text` if it is a string that UTF-8 can hold.

    Raises:
        ValueError: another type, or a lone surrogate in it; the text names `where`.
    """
    if not isinstance(text, str):
        raise ValueError(f"{where}: expected text, got {kind(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise ValueError(
            f"{where}: broken text: character {error.start} is a lone surrogate (U+{code:04X}), "
            "which UTF-8 cannot hold; decode the input with errors='replace'"
        ) from None
    return str(text)


def _validate_message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where}: expected an object with role and content, got {kind(message)}")
    if "role" not in message:
        raise ValueError(f"{where}.role: missing; give one of {', '.join(ROLES)}")
    role = message["role"]
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"{where}.role: {role!r} is not one of {', '.join(ROLES)}")

    checked: dict[str, Any] = {"role": role}
    calls = message.get("tool_calls")
    content = message.get("content")
    if message.get("tools") is not None:
        if role != "system" or content is not None:
            raise ValueError(f"{where}.tools: only a system message without content can add tools")
        checked["tools"] = _tools(message["tools"], f"{where}.tools")
    elif content is not None:
        checked["content"] = _content(content, f"{where}.content")
    elif role == "assistant" and (calls or (message.get("partial") and message.get("reasoning_content"))):
        checked["content"] = ""  # many templates add it to a string without asking whether it is there
    else:
        raise ValueError(
            f"{where}.content: missing; give text (only an assistant message with tool_calls may have none, "
            "and a system message that adds tools)"
        )
    if calls is not None:
        if role != "assistant":
            raise ValueError(f"{where}.tool_calls: only an assistant message can call tools, not {role!r}")
        checked_calls = _tool_calls(calls, f"{where}.tool_calls")
        if checked_calls:
            checked["tool_calls"] = checked_calls
    for field in ("name", "tool_call_id", "reasoning_content"):
        if message.get(field) is not None:
            checked[field] = check_text(message[field], f"{where}.{field}")
    if _is_partial(message, checked, where):
        checked["partial"] = True
    for field, value in message.items():
        if field not in checked and field not in ("content", "tool_calls", "tools", "partial") and value is not None:
            checked[check_text(field, f"{where}: field name")] = _plain(value, f"{where}.{field}")
    return checked  # type: ignore[return-value]  # built field by field above


def _is_partial(message: Mapping[str, Any], checked: Mapping[str, Any], where: str) -> bool:
    partial = message.get("partial")
    if not isinstance(partial, (bool, type(None))):
        raise ValueError(f"{where}.partial: expected true or false, got {kind(partial)}")
    if partial and (checked["role"] != "assistant" or "tool_calls" in checked):
        raise ValueError(f"{where}.partial: only an assistant message without tool_calls can be continued")
    return bool(partial)


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return check_text(content, where)
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"{where}: expected text or a list of text parts, got {kind(content)}")
    if not content:
        raise ValueError(f"{where}: the list of parts is empty; give at least one text part")
    texts = []
    for i, part in enumerate(content):
        place = f"{where}[{i}]"
        if isinstance(part, str):
            texts.append(check_text(part, place))
            continue
        if not isinstance(part, Mapping):
            raise ValueError(f"{place}: expected a text part, got {kind(part)}")
        if part.get("type") != "text":
            raise ValueError(f"{place}.type: {part.get('type')!r} is not supported; this model reads only 'text' parts")
        if "text" not in part:
            raise ValueError(f"{place}.text: missing")
        texts.append(check_text(part["text"], f"{place}.text"))
    return "\n".join(texts)


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, (list, tuple)):
        raise ValueError(f"{where}: expected a list of calls, got {kind(calls)}")
    checked = []
    for i, call in enumerate(calls):
        place = f"{where}[{i}]"
        if not isinstance(call, Mapping):
            raise ValueError(f"{place}: expected an object, got {kind(call)}")
        function = call.get("function")
        if not isinstance(function, Mapping):
            raise ValueError(f"{place}.function: expected an object with name and arguments, got {kind(function)}")
        _required_name(function.get("name"), f"{place}.function.name")
        plain_call = _plain(call, place)
        # Clients send JSON text and templates write with `tojson`: left as text, the arguments would be quoted twice.
        plain_call["function"]["arguments"] = _arguments(function.get("arguments", {}), f"{place}.function.arguments")
        checked.append(plain_call)
    return checked


def _arguments(arguments: object, where: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        check_text(arguments, where)
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:  # not only JSONDecodeError: an integer may have too many digits
            raise ValueError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{where}: expected a JSON object, got {kind(arguments)}")
    plain: dict[str, Any] = _plain(arguments, where)
    return plain


def _required_name(name: object, where: str) -> None:
    if not check_text("" if name is None else name, where):
        raise ValueError(f"{where}: missing")


def _plain(value: object, where: str, depth: int = 0) -> Any:
    """Rebuild `value` out of exact JSON types, so that a template cannot reach a method of anything richer."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"{where}: nested more than {_MAX_DEPTH} levels deep")
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return check_text(value, where)
    if isinstance(value, Mapping):
        return {
            check_text(key, f"{where}: key"): _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise ValueError(f"{where}: expected a JSON value, got {kind(value)}")


def kind(value: object) -> str:
    names = {type(None): "nothing (null)", str: "text", dict: "an object", list: "a list", bool: "a boolean"}
    return names.get(type(value), f"{type(value).__name__}")
