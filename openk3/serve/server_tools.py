"""Tools that the server runs itself: how a request switches them on, and how an earlier reply tells what was run.

An entry of ``tools`` that is no function of the client's names one of the server's: ``{"type": "calculator"}``,
``{"type": "datetime"}``, ``{"type": "search_documents", "search_documents": {"file_ids": ["file-..."]}}``, the first
two also in Kimi's form, ``{"type": "builtin_function", "function": {"name": "$calculator"}}``; and ``{"type": "mcp",
"server_label": "..."}`` all tools of an MCP server that whoever started this server has configured.

What was run comes back in the message's ``server_tool_calls``. A client that sends the message back as it is, which all
do that keep a chat, has the model see those calls and results again; one that drops the field has it see the answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from openk3.agents.calls import FinishedCall
from openk3.agents.tools import BUILTIN
from openk3.agents.tools.search_documents import NAME as SEARCH
from openk3.chat.messages import Message, validate_messages, validate_tools

MAX_FILES = 100
_LABEL = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_FORMS = (
    '"function", "calculator", "datetime", "search_documents", "mcp" and "builtin_function" (with the name '
    '"$calculator" or "$datetime")'
)


def checked_server_tool(entry: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Return the plain form of an entry that names a tool of the server; None if it is a function of the client.

    Raises:
        ValueError: it is neither, or lacks what the tool needs; the text begins with the place.
    """
    kind = entry.get("type")
    if kind == "function":
        return None
    if kind == "builtin_function":
        _only(entry, where, "type", "function")
        function = entry.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or name.removeprefix("$") not in BUILTIN:
            known = " and ".join(f"${name}" for name in BUILTIN)
            raise ValueError(f"{where}.function.name: {name!r} is no built-in function; there are {known}")
        return {"type": name.removeprefix("$")}
    if isinstance(kind, str) and kind in BUILTIN:
        _only(entry, where, "type", kind)
        if entry.get(kind) not in (None, {}):
            raise ValueError(f"{where}.{kind}: this tool has no settings; leave it out")
        return {"type": kind}
    if kind == SEARCH:
        _only(entry, where, "type", SEARCH)
        return {"type": SEARCH, "file_ids": _file_ids(entry.get(SEARCH), f"{where}.{SEARCH}")}
    if kind == "mcp":
        _only(entry, where, "type", "server_label", "allowed_tools")
        return _mcp(entry, where)
    raise ValueError(f"{where}.type: {kind!r} is not supported; there are {_FORMS}")


def checked_tools(tools: object) -> list[dict[str, Any]] | None:
    """Check the ``tools`` of a request: functions of the client, as `validate_tools` does, and tools of the server.

    Raises:
        ValueError: one is neither; the text begins with the place.
    """
    if not isinstance(tools, list):
        return validate_tools(tools)
    ours = [
        checked_server_tool(tool, f"tools[{i}]") if isinstance(tool, Mapping) and "type" in tool else None
        for i, tool in enumerate(tools)
    ]
    functions = validate_tools(
        [  # with a stand-in for each of ours, so that messages name the right places
            {"type": "function", "function": {"name": f"server-tool-{i}"}} if mine else tool
            for i, (mine, tool) in enumerate(zip(ours, tools, strict=True))
        ]
    )
    return functions and [mine or function for mine, function in zip(ours, functions, strict=True)]


def _only(entry: Mapping[str, Any], where: str, *known: str) -> None:
    for field in entry:
        if field not in known:
            raise ValueError(f"{where}.{field}: unknown; this kind of tool has {', '.join(known)}")


def _file_ids(settings: object, where: str) -> list[str]:
    if not isinstance(settings, Mapping) or "file_ids" not in settings:
        raise ValueError(f"{where}.file_ids: missing; give the ids of the files to be searched")
    _only(settings, where, "file_ids")
    ids = settings["file_ids"]
    if not isinstance(ids, (list, tuple)) or not ids or not all(isinstance(file_id, str) for file_id in ids):
        raise ValueError(f"{where}.file_ids: expected a list of one file id or more")
    if len(ids) > MAX_FILES:
        raise ValueError(f"{where}.file_ids: {len(ids)} files; at most {MAX_FILES} are possible")
    return list(dict.fromkeys(ids))


def _mcp(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    label, allowed = entry.get("server_label"), entry.get("allowed_tools")
    if not isinstance(label, str) or not _LABEL.fullmatch(label):
        raise ValueError(f"{where}.server_label: {label!r} is no name of an MCP server")
    if allowed is not None and not (isinstance(allowed, (list, tuple)) and all(isinstance(n, str) for n in allowed)):
        raise ValueError(f"{where}.allowed_tools: expected a list of names")
    return {"type": "mcp", "server_label": label, "allowed_tools": None if allowed is None else list(allowed)}


def report(done: FinishedCall, index: int, round_number: int) -> dict[str, Any]:
    """An entry of ``server_tool_calls``: the call, its result, how long it took in seconds, and in which round."""
    return {
        "index": index,
        **done.call.as_message_part(),
        "result": done.result.text,
        "is_error": done.result.is_error,
        "duration_s": round(done.seconds, 3),
        "round": round_number,
    }


def unfolded(messages: Sequence[Message]) -> list[Message]:
    """A checked chat with the ``server_tool_calls`` of its messages as calls and results of their own, before each.

    Raises:
        ValueError: an entry is not as `report` writes it; the text begins with the place.
    """
    chat: list[Message] = []
    for i, message in enumerate(messages):
        rest: dict[str, Any] = dict(message)
        ran = rest.pop("server_tool_calls", None)
        if ran:
            chat += _told(ran, message["role"], f"messages[{i}].server_tool_calls")
        if not ran or rest.get("content") or rest.get("tool_calls"):
            chat.append(rest)  # type: ignore[arg-type]  # a Message but for the field that is gone
    return chat


def _told(ran: object, role: str, where: str) -> list[Message]:
    if role != "assistant":
        raise ValueError(f"{where}: only an assistant message has them, not {role!r}")
    if not isinstance(ran, list):
        raise ValueError(f"{where}: expected a list of calls")
    for k, entry in enumerate(ran):
        for field in ("id", "function", "result"):
            if not isinstance(entry, dict) or field not in entry:
                raise ValueError(f"{where}[{k}].{field}: missing")
    told: list[dict[str, Any]] = []
    for _, group in groupby(ran, key=lambda entry: entry.get("round")):
        calls = list(group)
        parts = [{"id": call["id"], "type": "function", "function": call["function"]} for call in calls]
        told.append({"role": "assistant", "content": None, "tool_calls": parts})
        told += [{"role": "tool", "tool_call_id": call["id"], "content": call["result"]} for call in calls]
    try:
        return validate_messages(told)
    except ValueError as error:
        raise ValueError(f"{where}: {str(error).partition(': ')[2]}") from None
