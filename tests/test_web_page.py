"""The web chat over plain HTTP: what is served, to whom, and that nothing on the page points anywhere else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.datastructures import Headers
from web_chat import Chat, served_chat
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from openk3.serve.web.gate import same_origin


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chat]:
    with served_chat(tmp_path_factory.mktemp("web") / "chat.sqlite3") as chat:
        yield chat


URLS = re.compile(r"""(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s"'<>)\\]*""", re.I)


def test_every_address_on_the_page_is_our_own(chat: Chat) -> None:
    page = httpx.get(chat.url)
    assert page.status_code == 200
    assert "OpenK3" in page.text
    links = re.findall(r"""(?:src|href)="([^"]+)"|url\("?([^")]+)"?\)|"(/_nicegui[^"]+)\"""", page.text)
    addresses = {address for group in links for address in group if address}
    assert len(addresses) > 8
    for address in addresses:
        parts = urlsplit(address)
        assert parts.scheme in ("", "data") and not parts.netloc, address
    text = re.sub(r"data:image[^\"]*|http://www.w3.org/2000/svg", "", page.text)
    # NiceGUI's comments cite its sources; a comment fetches nothing.
    code = re.sub(r"/\*.*?\*/|<!--.*?-->|(?m:^\s*//.*$)|// see https\S+", "", text, flags=re.S)
    assert URLS.findall(code) == []
    style = httpx.get(f"{chat.url}{next(a for a in addresses if a.endswith('fonts.css'))}").text
    assert style.count("url(") > 10 and not re.search(r"url\((?!fonts/)", style)


def test_the_browser_is_told_to_load_nothing_from_elsewhere(chat: Chat) -> None:
    headers = httpx.get(chat.url).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["connect-src"] == "'self'"
    assert policy["object-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert not re.search(r"https?:|\*", headers["content-security-policy"])
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


def test_stored_text_reaches_the_page_as_data(chat: Chat) -> None:
    evil = "</script><script>window.hacked=1</script>"
    page = httpx.get(chat.link(chat.conversation(evil, evil))).text
    assert "<script>window.hacked" not in page
    assert "window.hacked" in page


def test_other_paths_are_the_servers_own_404(chat: Chat) -> None:
    for path in ("/nothing", "/c", "/v1/nothing", "/.nicegui/storage-general.json"):
        answer = httpx.get(f"{chat.url}{path}")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "unknown_url"
    assert httpx.get(f"{chat.url}/c/no-such-conversation").status_code == 200


def test_pages_of_other_sites_are_turned_away(chat: Chat) -> None:
    port = urlsplit(chat.url).port
    for origin in ("https://evil.example", "http://localhost:1", f"https://127.0.0.1.evil.example:{port}", "null"):
        assert httpx.get(chat.url, headers={"Origin": origin}).status_code == 403, origin
        upload = httpx.post(f"{chat.url}/_nicegui/client/x/upload/1", headers={"Origin": origin})
        assert upload.status_code == 403
        polling = httpx.get(f"{chat.url}/_nicegui_ws/socket.io/?EIO=4&transport=polling", headers={"Origin": origin})
        assert polling.status_code == 403
    assert httpx.get(chat.url, headers={"Origin": chat.url}).status_code == 200
    assert httpx.get(chat.url, headers={"Host": "evil.example"}).status_code == 403


def test_websockets_of_other_sites_are_turned_away(chat: Chat) -> None:
    address = f"{chat.url.replace('http', 'ws', 1)}/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
    port = urlsplit(chat.url).port
    for origin in ("https://evil.example", "http://127.0.0.1:1", f"http://localhost:{port}"):
        with pytest.raises(InvalidStatus) as refusal, connect(address, origin=Origin(origin)):
            pass
        assert refusal.value.response.status_code == 403
    with connect(address, origin=Origin(chat.url)) as socket:
        assert str(socket.recv()).startswith("0{")
    with pytest.raises(InvalidStatus), connect(f"ws://127.0.0.1:{port}/other", origin=Origin(chat.url)):
        pass


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        (None, "127.0.0.1:8000", True),
        ("http://127.0.0.1:8000", "127.0.0.1:8000", True),
        ("https://Chat.Example", "chat.example", True),
        ("http://127.0.0.1:8001", "127.0.0.1:8000", False),
        ("http://[::1", "[::1", False),
        ("null", "localhost", False),
        ("", "", False),
    ],
)
def test_same_origin(origin: str | None, host: str, allowed: bool) -> None:
    headers = {"host": host} if origin is None else {"host": host, "origin": origin}
    assert same_origin(Headers(headers)) is allowed
