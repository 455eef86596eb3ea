"""Pictures by web address: nothing is fetched unless allowed, and then never from a private address, however it is named.

A small HTTP server on loopback stands for the internet: names and connections are led to it by the test, judged by the real code.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import openai
import pytest

from kvist.server.errors import ApiError
from kvist.server.fetch import Basket, WebPictures, is_public
from tests.integration.test_server_files import seeing
from tests.integration.test_server_images import png
from tests.server_fakes import serving

PUBLIC = "93.184.215.14"


class Web(BaseHTTPRequestHandler):
    """Paths that behave well and badly."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.headers["host"], self.path))
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("location", self.path.removeprefix("/to/"))
            self.send_header("content-length", "0")
            self.end_headers()
        elif self.path == "/drip":
            for byte in b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 1000:
                try:
                    self.wfile.write(bytes([byte]))
                except OSError:
                    return
                time.sleep(0.05)
        elif self.path == "/big":
            self.reply(b"x" * 200_000, chunked=True)
        elif self.path == "/short":
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            self.wfile.write(b"half")
            self.close_connection = True
        elif self.path == "/missing":
            self.send_error(404, "SECRET-REASON")
        else:
            self.reply(png(1))

    def reply(self, data: bytes, chunked: bool = False) -> None:
        self.send_response(200)
        if chunked:
            self.send_header("transfer-encoding", "chunked")
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
        else:
            self.send_header("content-length", str(len(data)))
        self.end_headers()
        try:
            self.wfile.write(data)
        except OSError:
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        del args


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def web(
    port: int, addresses: dict[str, list[str]] | None = None, hosts: tuple[str, ...] = ("*",), **limits: float
) -> WebPictures:
    """Names lead to `addresses` (else a public one); whatever was judged public is connected to the test's server."""
    known = addresses or {}

    def connect(address: str, number: int, timeout_s: float) -> socket.socket:
        assert is_public(address), f"{address} was connected to"
        assert number in (80, 443)
        return socket.create_connection(("127.0.0.1", port), timeout=timeout_s)

    values = {"max_bytes": 100_000, "timeout_s": 5.0} | limits
    return WebPictures(hosts=hosts, lookup=lambda host, _: known.get(host, [PUBLIC]), connect=connect, **values)  # type: ignore[arg-type]


def test_a_picture_is_fetched(port: int) -> None:
    assert web(port).fetch("http://pictures.example/a b.png?x=é", "here") == png(1)
    assert Web.asked[-1] == ("pictures.example", "/a%20b.png?x=%C3%A9")
    assert web(port, hosts=("pictures.example",)).fetch("http://PICTURES.example./a.png", "here") == png(1)
    assert web(port).fetch("http://a.example/to/http://b.example/x.png", "here") == png(1)
    assert Web.asked[-1][0] == "b.example"


PRIVATE = [
    "127.0.0.1",
    "127.8.8.8",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "169.254.169.254",
    "224.0.0.1",
    "255.255.255.255",
    "192.0.2.1",
    "192.0.0.192",
    "192.88.99.1",
    "168.63.129.16",
    "169.254.0.1",
    "169.254.255.255",
    "::1",
    "::",
    "fe80::1%eth0",
    "fc00::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b:1::7f00:1",
    "fec0::1",
    "fd00:ec2::254",
    "2002:7f00:0001::1",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses(port: int, address: str) -> None:
    """By name, beside a public address, and behind a redirect; nothing is connected to."""
    assert not is_public(address)
    for addresses in ([address], [PUBLIC, address]):
        with pytest.raises(ApiError, match="no public address"):
            web(port, {"inside.example": addresses}).fetch("http://inside.example/x.png", "here")
    with pytest.raises(ApiError, match="no public address"):
        web(port, {"inside.example": [address]}).fetch("http://a.example/to/http://inside.example/latest", "here")


def test_public_addresses() -> None:
    for address in (PUBLIC, "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"):
        assert is_public(address), address


def test_a_name_that_changes_its_mind(port: int) -> None:
    """DNS rebinding: public when judged, private when asked again; it is asked once a request, and that address is used."""
    answers = iter([[PUBLIC], ["127.0.0.1"], ["127.0.0.1"]])
    pictures = web(port)
    rebinding = WebPictures(
        hosts=("*",), max_bytes=100_000, timeout_s=5, lookup=lambda host, number: next(answers), connect=pictures.connect
    )
    assert rebinding.fetch("http://rebinding.example/x.png", "here") == png(1)
    with pytest.raises(ApiError, match="no public address"):
        rebinding.fetch("http://rebinding.example/x.png", "here")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://localhost/x.png", "image_hosts"),
        ("http://a.example:8080/x.png", "port 80 only"),
        ("http://a.example:99999/x.png", "cannot be read"),
        ("http://user:secret@a.example/x.png", "user name"),
        ("http://[::1/x.png", "cannot be read"),
        ("http:///x.png", "host in ASCII"),
        ("http://ａ.example/x.png", "host in ASCII"),
        ("http://b.example/x.png", "image_hosts"),
        ("http://a.example/to/ftp://a.example/x", "http or https"),
        ("http://a.example/to/http://b.example/x", "image_hosts"),
        (
            "http://a.example" + "/to/http://a.example" * 5,
            "more than 3 times",
        ),
        ("http://a.example/to/", "more than 3 times"),
        ("http://a.example/big", "more than 100000 bytes"),
        ("http://a.example/missing", "status 404"),
        ("http://a.example/short", "the connection failed"),
        ("http://a.example/x\r\nhost: b", "status|failed|fetched"),
    ],
)
def test_refusals(port: int, url: str, words: str) -> None:
    pictures = web(port, hosts=("a.example",))
    if "\r" in url:
        assert pictures.fetch(url, "here") == png(1), "line breaks are taken out of a URL, they make no header"
        assert Web.asked[-1] == ("a.example", "/xhost:%20b")
        return
    with pytest.raises(ApiError, match=words) as caught:
        pictures.fetch(url, "here")
    assert (caught.value.code, caught.value.param) == ("invalid_image", "here")
    assert "SECRET" not in caught.value.message


def test_slow_hosts_and_dead_ones(port: int) -> None:
    """Headers that drip end at the deadline, though every read has something; a closed port says little."""
    began = time.monotonic()
    with pytest.raises(ApiError, match="not within"):
        web(port, timeout_s=0.4).fetch("http://a.example/drip", "here")
    assert time.monotonic() - began < 2
    with socket.create_server(("127.0.0.1", 0)) as gone:
        closed = gone.getsockname()[1]
    with pytest.raises(ApiError, match="the connection failed"):
        web(closed).fetch("http://a.example/x.png", "here")
    with pytest.raises(ApiError, match="the connection failed"):
        web(port).fetch("https://a.example/x.png", "here")


def test_a_resolver_that_does_not_answer(port: int) -> None:
    """Looking a name up has no deadline of its own: the fetch has."""
    release = threading.Event()
    pictures = WebPictures(
        hosts=("*",),
        max_bytes=1000,
        timeout_s=0.2,
        lookup=lambda host, number: [PUBLIC] * release.wait(20),
        connect=web(port).connect,
    )
    began = time.monotonic()
    with pytest.raises(ApiError, match=r"not within 0\.2 s"):
        pictures.fetch("http://a.example/x.png", "here")
    assert time.monotonic() - began < 2
    release.set()


def test_a_request_s_pictures_together(port: int) -> None:
    """A long list of addresses fetches no more bytes, and for no longer, than one request may."""
    size = len(png(1))
    basket = Basket(web(port), max_bytes=2 * size + 10, seconds=60)
    for _ in range(2):
        assert basket.fetch("http://a.example/x.png", "here") == png(1)
    with pytest.raises(ApiError, match="more than 10 bytes"):
        basket.fetch("http://a.example/x.png", "here")
    full = Basket(web(port), max_bytes=size, seconds=60)
    full.fetch("http://a.example/x.png", "here")
    asked = len(Web.asked)
    for over in (full, Basket(web(port), max_bytes=size, seconds=0)):
        with pytest.raises(ApiError, match="together take more") as caught:
            over.fetch("http://a.example/x.png", "there")
        assert caught.value.param == "there"
    assert len(Web.asked) == asked
    late = Basket(web(port), max_bytes=size, seconds=0.3)
    with pytest.raises(ApiError, match="not within"):
        late.fetch("http://a.example/drip", "here")


def test_through_the_server() -> None:
    """Off by default; with image_hosts real names are looked up, and the loopback's are refused in every API."""
    hosts_inside = ["localhost", "127.0.0.1", "[::1]", "169.254.169.254", "2130706433", "0x7f.1", "0177.0.0.1", "[::ffff:7f00:1]"]
    urls = [f"http://{host}/latest/meta-data" for host in hosts_inside]
    for hosts, words in (([], "not fetched"), (["*"], "no public address")):
        with serving(seeing(), image_hosts=hosts) as live:
            for url in urls:
                part = {"type": "image_url", "image_url": {"url": url}}
                with pytest.raises(openai.BadRequestError, match=words) as caught:
                    live.openai().chat.completions.create(model="nano", messages=[{"role": "user", "content": [part]}])
                assert caught.value.code == "invalid_image"
                item = {"type": "input_image", "image_url": url}
                with pytest.raises(openai.BadRequestError, match=words):
                    live.openai().responses.create(model="nano", input=[{"role": "user", "content": [item]}])
            block = {"type": "image", "source": {"type": "url", "url": urls[0]}}
            answer = live.http().post(
                "/v1/messages",
                json={
                    "model": "nano",
                    "max_tokens": 5,
                    "messages": [{"role": "user", "content": [block]}],
                },
            )
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
            assert not live.engine.requests
