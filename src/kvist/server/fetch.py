"""Pictures from web addresses, for operators who allow it: public addresses of named hosts only, bounded in time and size.

Owns the guard against requests to where a client must not reach (SSRF). The address is looked up once, judged, and that very
address is connected to: a name that changes its mind in between (DNS rebinding) gains nothing. Redirects are judged anew. What
all pictures of a request take together is bounded too.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from kvist.server.errors import ApiError

MAX_REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
_TARGET_CHARACTERS = "%/:=&?~+!$,;'@()*[]"
_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK = 64 << 10
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_INSIDE = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "192.0.0.0/24",  # protocol assignments; a cloud's metadata service is among them
            "192.88.99.0/24",  # relays of 6to4, withdrawn
            "168.63.129.16/32",  # a cloud's own services, for its machines only
        ),
    )
)
"""What `ipaddress` (of some Python versions) calls global, though it leads inside."""


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet, also where an IPv6 address carries an IPv4 one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        number = int(ip)
        if number >> 32 == 0x64FF9B << 64:  # 64:ff9b::/96, translated to IPv4 on the way
            return is_public(str(ipaddress.IPv4Address(number & 0xFFFFFFFF)))
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is not None:
            return is_public(str(inner))
        # Site-local and IPv4-compatible addresses among others: withdrawn, but networks may still use them inside.
        if ip not in _GLOBAL_UNICAST:
            return False
    elif any(ip in network for network in _INSIDE):
        return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def _lookup(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _connect(address: str, port: int, timeout_s: float) -> socket.socket:
    return socket.create_connection((address, port), timeout=timeout_s)


@dataclass(frozen=True, kw_only=True)
class WebPictures:
    """Fetches pictures from `hosts` (`*`: any), at most `max_bytes` each within `timeout_s`. Call it in a thread.

    `lookup` and `connect` are the system's unless tests say otherwise.
    """

    hosts: Collection[str]
    max_bytes: int
    timeout_s: float
    lookup: Callable[[str, int], list[str]] = _lookup
    connect: Callable[[str, int, float], socket.socket] = _connect
    tls: ssl.SSLContext = field(default_factory=ssl.create_default_context)

    def fetch(self, url: str, where: str) -> bytes:
        """The bytes behind a URL. Raises ApiError, which tells nothing of what a private address would have said."""
        deadline = time.monotonic() + self.timeout_s
        try:
            for _ in range(MAX_REDIRECTS + 1):
                answer = self._get(self._judged(url, where), where, deadline)
                if isinstance(answer, bytes):
                    return answer
                url = urljoin(url, answer)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            late = time.monotonic() >= deadline
            why = f"not within {self.timeout_s:g} s" if late else "the connection failed"
            raise _refused(f"the picture could not be fetched: {why}", where) from error
        raise _refused(f"the picture's address redirects more than {MAX_REDIRECTS} times", where)

    def _judged(self, url: str, where: str) -> SplitResult:
        """The parts of a URL that may be asked, not looked up yet."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise _refused("the picture's URL cannot be read", where) from error
        host = parts.hostname or ""
        if parts.scheme not in PORTS or not host.isascii() or not host:
            raise _refused("a picture's URL is http or https with a host in ASCII", where)
        if parts.username is not None or parts.password is not None:
            raise _refused("a picture's URL must not carry a user name or password", where)
        if port not in (None, PORTS[parts.scheme]):
            raise _refused(f"pictures are fetched from port {PORTS[parts.scheme]} only, the URL says {port}", where)
        if "*" not in self.hosts and host.rstrip(".") not in self.hosts:
            raise _refused(f"host {host[:80]!r} is not in image_hosts; send a data URL, or upload it to /v1/files", where)
        return parts

    def _get(self, parts: SplitResult, where: str, deadline: float) -> bytes | str:
        """A body, or the address that it has moved to."""
        host, port = parts.hostname or "", PORTS[parts.scheme]
        addresses = self._looked_up(host, port, deadline)
        # One private address among public ones is enough to refuse: which one is taken would be luck.
        if not addresses or not all(is_public(address) for address in addresses):
            raise _refused("the picture's host has no public address", where)
        connection = http.client.HTTPConnection(host, port)
        sock = self.connect(addresses[0], port, max(0.001, deadline - time.monotonic()))
        # Headers that drip would outlast any timeout of a single read.
        ending = threading.Timer(max(0.0, deadline - time.monotonic()), _cut, (sock,))
        ending.start()
        try:
            connection.sock = self.tls.wrap_socket(sock, server_hostname=host) if parts.scheme == "https" else sock
            target = quote(parts.path or "/", safe=_TARGET_CHARACTERS)
            query = f"?{quote(parts.query, safe=_TARGET_CHARACTERS)}" if parts.query else ""
            shown = f"[{host}]" if ":" in host else host
            headers = {"Host": shown, "Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "kvist"}
            connection.request("GET", target + query, headers=headers)
            return self._answer(connection.getresponse(), where, deadline)
        finally:
            ending.cancel()
            connection.close()
            sock.close()

    def _looked_up(self, host: str, port: int, deadline: float) -> list[str]:
        """The host's addresses. The system's resolver knows no deadline: it is left behind in a thread that ends with it."""
        found: Future[list[str]] = Future()

        def look() -> None:
            try:
                found.set_result(self.lookup(host, port))
            except Exception as error:  # noqa: BLE001  # raised where the result is taken
                found.set_exception(error)

        threading.Thread(target=look, daemon=True, name="kvist-lookup").start()
        return found.result(max(0.0, deadline - time.monotonic()))

    def _answer(self, answer: http.client.HTTPResponse, where: str, deadline: float) -> bytes | str:
        if answer.status in _REDIRECTS:
            return answer.getheader("location") or ""
        if answer.status != 200:
            raise _refused(f"the picture's host answered with status {answer.status}", where)
        parts: list[bytes] = []
        size = 0
        while part := answer.read1(_CHUNK):
            size += len(part)
            if size > self.max_bytes:
                raise _refused(f"the picture has more than {self.max_bytes} bytes (max_file_bytes, max_body_bytes)", where)
            parts.append(part)
        if time.monotonic() >= deadline or answer.length:
            raise TimeoutError
        return b"".join(parts)


class Basket:
    """The pictures of one request: together at most `max_bytes` and `seconds`, each within what `web` allows. One thread."""

    def __init__(self, web: WebPictures, *, max_bytes: int, seconds: float) -> None:
        self._web, self._max_bytes, self._seconds = web, max_bytes, seconds
        self._left, self._end = max_bytes, time.monotonic() + seconds

    def fetch(self, url: str, where: str) -> bytes:
        """As `WebPictures.fetch`. Raises ApiError, also when the request's pictures together are too much."""
        seconds = self._end - time.monotonic()
        if self._left <= 0 or seconds <= 0:
            limits = f"{self._max_bytes} bytes (max_body_bytes) or {self._seconds:g} s (deadline_s)"
            raise _refused(f"the request's pictures together take more than {limits}; send fewer", where)
        web = replace(self._web, max_bytes=min(self._web.max_bytes, self._left), timeout_s=min(self._web.timeout_s, seconds))
        data = web.fetch(url, where)
        self._left -= len(data)
        return data


def _cut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        sock.close()  # not connected any more


def _refused(message: str, where: str) -> ApiError:
    return ApiError("invalid_image", message, param=where)
