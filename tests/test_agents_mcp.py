"""MCP in both directions, between real processes: other people's tools for our models, and ours for other clients."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from agents import call_parts, has_model_reply
from chat_support import chat_llm
from mcp import Client, StdioServerParameters
from serving import MODEL, client, live

from openk3 import agents
from openk3.agents.mcp_client import McpServers
from openk3.agents.mcp_config import McpServer, read_config
from openk3.serve.app import create_app

# A server by the SDK's own, higher layer, as strangers write them.
SHOP = '''
import os, sys, time
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
server = MCPServer("shop")

@server.tool()
def price(item: str) -> str:
    """The price of an item."""
    if item == "dragon":
        raise ToolError("not for sale")
    return f"{item}: 9 euros, {os.environ.get('SHOP', 'no shop')}, {os.environ.get('SECRET', 'no secret')}"

@server.tool(name="stock.count")
def stock(item: str, minimum: int = 0) -> dict:
    """How many are there."""
    return {"item": item, "count": 3}

@server.tool()
def crash() -> str:
    """Ends the server."""
    os._exit(1)

server.run("stdio")
'''


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("mcp") / "shop.py"
    path.write_text(SHOP)
    return {"mcpServers": {"shop": {"command": sys.executable, "args": [str(path)], "env": {"SHOP": "corner shop"}}}}


@pytest.fixture(scope="module")
def servers(shop: dict[str, Any]) -> Iterator[McpServers]:
    os.environ["SECRET"] = "key"
    with McpServers(shop) as servers:
        yield servers


# Their tools


def test_tools_of_a_server(servers: McpServers) -> None:
    tools = {tool.name: tool for tool in servers.tools}
    assert set(tools) == {"price", "stock_count", "crash"}
    assert tools["price"].description == "The price of an item."
    assert tools["price"].call('{"item": "apple"}').text == "apple: 9 euros, corner shop, no secret"
    assert json.loads(tools["stock_count"].call('{"item": "apple"}').text) == {"item": "apple", "count": 3}
    bad = tools["price"].call('{"item": "dragon"}')
    assert bad.is_error and "not for sale" in bad.text
    assert tools["price"].call("{}").text == "Error: the arguments of price are wrong: 'item' is a required property"


def test_a_model_uses_them(servers: McpServers, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_reply(monkeypatch, call_parts("price", item="apple"), ("Nine euros.",))
    *_, last = agents.run(chat_llm("qwen"), [{"role": "user", "content": "?"}], tools=servers.tools)
    assert isinstance(last, agents.Finished)
    assert (last.text, last.calls[0].result.text[:15]) == ("Nine euros.", "apple: 9 euros,")


def test_a_request_switches_them_on(servers: McpServers, monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(
        lambda: chat_llm("qwen"), model_name=MODEL, web=False, owns_model=False, mcp_tools=servers.by_server
    )
    with live(app) as url:
        has_model_reply(monkeypatch, call_parts("price", item="apple"), ("Nine euros.",))
        tools: Any = [{"type": "mcp", "server_label": "shop", "allowed_tools": ["price"]}]
        user: Any = {"role": "user", "content": "?"}
        reply = client(url).chat.completions.create(model=MODEL, messages=[user], tools=tools)
        message = reply.choices[0].message
        assert message.content == "Nine euros."
        assert message.model_extra is not None
        assert message.model_extra["server_tool_calls"][0]["result"].startswith("apple: 9 euros")
        body = {"model": MODEL, "messages": [user], "tools": [tools[0] | {"allowed_tools": ["sell"]}]}
        error = httpx.post(f"{url}/v1/chat/completions", json=body).json()["error"]
        assert "shop has no tool 'sell'; it has price" in error["message"]
        assert httpx.post(f"{url}/mcp", json={}).status_code == 404  # not offered unless asked for


def test_two_servers_and_one_dies(shop: dict[str, Any]) -> None:
    entry = shop["mcpServers"]["shop"]
    with McpServers({"mcpServers": {"here": entry, "there": entry, "off": {"command": "no", "disabled": True}}}) as two:
        # A name that both have gets the server's in front.
        assert {tool.name for tool in two.tools} >= {"here_price", "there_price"}
        for _ in range(2):
            result = two.by_server["here"]["crash"].call("{}")
            assert result.is_error and result.text.startswith("Error: the server failed: ")
        assert not two.by_server["there"]["price"].call('{"item": "pear"}').is_error


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"command": "/no/such/program"}, "MCP server x: "),
        ({"command": sys.executable, "args": ["-c", "print('hello')"]}, "MCP server x: "),
        ({"url": "http://127.0.0.1:9/mcp"}, "MCP server x: "),
    ],
)
def test_servers_that_cannot_be_reached(entry: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        McpServers({"mcpServers": {"x": entry}})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", 'expected an object with "mcpServers"'),
        ('{"mcpServers": {"a b": {"command": "x"}}}', "mcpServers.a b: a server's name is"),
        ('{"mcpServers": {"a": {}}}', "mcpServers.a: give either a command or a url"),
        ('{"mcpServers": {"a": {"command": "x", "url": "http://x"}}}', "give either a command or a url"),
        ('{"mcpServers": {"a": {"command": "x", "shell": true}}}', "mcpServers.a.shell: unknown"),
        ('{"mcpServers": {"a": {"command": "x", "args": "y"}}}', "mcpServers.a.args: expected a list"),
        ('{"mcpServers": {"a": {"command": "x", "env": {"k": 1}}}}', "mcpServers.a.env: expected an object of texts"),
        ('{"mcpServers": {"a": {"url": "file:///x"}}}', "mcpServers.a.url: expected a URL that begins with http"),
    ],
)
def test_configurations_that_are_none(config: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(config)
    with pytest.raises(ValueError) as caught:
        read_config(path)
    assert str(caught.value).startswith(f"{path}: ") and words in str(caught.value)


def test_a_configuration() -> None:
    entry = {"type": "stdio", "command": "x", "args": ["y"], "env": {"A": "b"}, "alwaysAllow": ["z"]}
    assert read_config({"mcpServers": {"a": entry}}) == {"a": McpServer("x", ("y",), {"A": "b"})}


# Ours


async def ask(server: Any) -> list[str]:
    async with Client(server) as other:
        names = [tool.name for tool in (await other.list_tools()).tools]
        good = await other.call_tool("calculator", {"expression": "6 * 7"})
        bad = await other.call_tool("calculator", {"expression": "1/0"})
        unknown = await other.call_tool("shell", {})
        assert (good.is_error, bad.is_error, unknown.is_error) == (False, True, True)
        if "search_documents" in names:
            found = await other.call_tool("search_documents", {"query": "rents"})
            names.append(found.content[0].text)  # type: ignore[union-attr]
        return [*names, good.content[0].text, bad.content[0].text, unknown.content[0].text]  # type: ignore[union-attr]


SAID = ["42", "Error: division by zero"]


def test_our_tools_on_stdio(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The rent is 900 euros.")
    root = str(Path(__file__).parent.parent)
    code = "from openk3.cli import main; main()"
    params = StdioServerParameters(
        command=sys.executable, args=["-c", code, "mcp", str(tmp_path)], env={"PYTHONPATH": root}
    )
    *names, good, bad, unknown = asyncio.run(ask(params))
    assert names[-1] == f"[1] {tmp_path}/a.txt:\nThe rent is 900 euros."
    assert names[:-1] == ["calculator", "datetime", "search_documents"]
    assert [good, bad] == SAID
    assert unknown == "Error: there is no tool 'shell'; there are calculator, datetime, search_documents"


def test_our_tools_over_http() -> None:
    app = create_app(lambda: chat_llm("qwen"), model_name=MODEL, web=False, owns_model=False, mcp_endpoint=True)
    with live(app) as url:
        *names, good, bad, _ = asyncio.run(ask(f"{url}/mcp"))
        assert names == ["calculator", "datetime"]
        assert [good, bad] == SAID
        with McpServers({"mcpServers": {"k3": {"url": f"{url}/mcp", "headers": {"X-A": "b"}}}}) as servers:
            assert servers.by_server["k3"]["calculator"].call('{"expression": "6*7"}').text == "42"
        assert httpx.post(f"{url}/mcp", json={}, headers={"Host": "evil.example"}).status_code == 403
        assert httpx.get(f"{url}/nothing").status_code == 404


def test_our_tools_over_http_need_a_key_where_the_api_does(tmp_path: Path) -> None:
    options: dict[str, Any] = {"web": False, "owns_model": False, "mcp_endpoint": True, "state_folder": tmp_path}
    with live(create_app(lambda: chat_llm("qwen"), model_name=MODEL, always_keys=True, **options)) as url:
        assert httpx.post(f"{url}/mcp", json={}).status_code == 401


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(RuntimeError, match=r"^MCP needs a package that is not installed: pip install 'openk3\[mcp\]'$"):
        McpServers({"mcpServers": {}})
    with pytest.raises(RuntimeError, match="MCP needs a package"):
        create_app(lambda: chat_llm("qwen"), model_name=MODEL, web=False, mcp_endpoint=True)
