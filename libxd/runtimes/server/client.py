"""JSON over HTTP with one server, by the standard library: a connection that is kept, and one clear error each.

No error names the address: some of them are published with an attempt.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
from typing import Any
from urllib.parse import urlsplit

from libxd import strictjson
from libxd.environment import url_variable
from libxd.errors import Status, XdError
from libxd.plain import shortened

WHERE = "$" + url_variable("server")
#: for the server to say something of itself: the first time it looks its whole machine over
ASK_TIMEOUT_S = 60.0
#: of silence while it scores a batch
SCORE_TIMEOUT_S = 900.0
#: of one answer; a batch of B prompts is answered by some hundred bytes a token
MOST_BYTES = strictjson.MAX_BYTES
_PART_BYTES = 1 << 20
#: a name or address as the system looks it up, and a path as a request may hold it
_HOST, _PATH = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?"), re.compile(r"[!-~]*")
_MOST_SAID = 300  # characters of a server's own message
#: answers that another try may change: too many requests, too early, and all that is the server's own fault
_TRY_AGAIN = (408, 425, 429)


class Client:
    """One server, at `http://host[:port][/prefix]`; a last `/v1` is left away. XdError 65 for another address.

    Proxies are not asked, whatever variables say, and redirections not followed: an answer is the named server's.
    """

    def __init__(self, url: str) -> None:
        kind, host, port, self._prefix = _address(url)
        self._connection = kind(host, port)

    def get(self, target: str) -> bytes | None:
        """The body of an answer; None: there is no such place (403, 404, 405). XdError as `post`."""
        status, body = self._exchange("GET", target, None, ASK_TIMEOUT_S)
        if status in (403, 404, 405):
            return None
        return _good(status, body)

    def post(self, target: str, value: dict[str, Any]) -> Any:
        """The JSON of an answer. XdError 69 for a request that the server refuses, 70 for an answer that is no JSON, 75
        when nobody listens, when it breaks off or falls silent, and for a failure of its own.
        """
        body = _good(*self._exchange("POST", target, json.dumps(value).encode(), SCORE_TIMEOUT_S))
        try:
            return strictjson.loads(body, WHERE)
        except XdError as error:
            raise XdError(f"the server's answer cannot be read: {error.issues[0].message}", status=Status.BUG,
                          code="engine-output", where=WHERE, path=error.issues[0].path) from error  # fmt: skip

    def close(self) -> None:
        self._connection.close()

    def _exchange(self, method: str, target: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        kept = self._connection.sock is not None
        try:
            return self._once(method, target, body, timeout_s)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError) as error:
            if not kept:
                raise _broke_off(error) from error
        # a server closes what has been idle for some seconds, and that shows at the next request alone
        try:
            return self._once(method, target, body, timeout_s)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError) as error:
            raise _broke_off(error) from error

    def _once(self, method: str, target: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        connection = self._connection
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        try:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, self._prefix + target, body, headers)
            answer = connection.getresponse()
            return answer.status, _body(answer)
        except BaseException as error:
            connection.close()
            if (known := _known(error, timeout_s)) is not None:
                raise known from error
            raise


def _body(answer: http.client.HTTPResponse) -> bytes:
    """All of it, to the end that was announced. XdError 69 when it is longer than any that can be read."""
    parts, size = [], 0
    while part := answer.read(_PART_BYTES):
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise XdError("the server's answer is too long to be read", status=Status.REFUSED, code="too-large",
                          where=WHERE, expected=f"at most {MOST_BYTES} bytes",
                          hint="a smaller batch.size asks for shorter ones")  # fmt: skip
    if answer.length:  # read in parts, http.client lets a body end early
        raise http.client.IncompleteRead(b"", answer.length)
    return b"".join(parts)


def _address(url: str) -> tuple[Any, str, int, str]:
    """How, and to which host, port and prefix, to connect. What was given is not shown: it may hold a password."""
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    named = parts.scheme in kinds and _HOST.fullmatch(parts.hostname or "") and _PATH.fullmatch(parts.path)
    if not named or "@" in parts.netloc or parts.query or parts.fragment:
        raise XdError("is no address of a server", code="bad-address", where=WHERE,
                      expected="http://HOST:PORT, without user or query")  # fmt: skip
    kind = kinds[parts.scheme]
    # without a port http.client would look for one in an IPv6 address
    return kind, str(parts.hostname), port or kind.default_port, parts.path.rstrip("/").removesuffix("/v1")


def _known(error: BaseException, timeout_s: float) -> XdError | None:
    """An error of a connection, but for the ones that may only mean that it was idle for too long."""
    if isinstance(error, http.client.RemoteDisconnected | BrokenPipeError | ConnectionResetError):
        return None
    if isinstance(error, http.client.IncompleteRead):
        return _broke_off(error)
    if isinstance(error, http.client.HTTPException):
        return XdError(f"what listens there speaks no HTTP: {type(error).__name__}", code="not-a-server", where=WHERE)
    if isinstance(error, TimeoutError):
        return XdError(f"the server does not answer within {timeout_s:g} s", status=Status.RETRY, code="no-answer",
                       where=WHERE)  # fmt: skip
    if isinstance(error, ssl.SSLError):
        said = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason
        return XdError(f"what listens there cannot be talked to over TLS: {said}", code="not-a-server", where=WHERE)
    if isinstance(error, socket.gaierror | UnicodeError):  # a name with an empty part is not looked up
        why = error.strerror if isinstance(error, OSError) else "it is no name"
        return XdError(f"there is no such host: {why}", status=Status.MISSING, code="missing", where=WHERE)
    if isinstance(error, OSError):
        return XdError(f"no server answers there: {error.strerror or type(error).__name__}", status=Status.RETRY,
                       code="no-server", where=WHERE, hint="start it, or wait until it is up")  # fmt: skip
    return None


def _broke_off(error: Exception) -> XdError:
    return XdError(f"the server broke off while it answered: {type(error).__name__}", status=Status.RETRY,
                   code="server-died", where=WHERE, hint="see what the server says, and run again")  # fmt: skip


def _good(status: int, body: bytes) -> bytes:
    """The body of an answer that is no refusal."""
    if 200 <= status < 300:
        return body
    if 300 <= status < 400:
        raise XdError("the server sends on to another address, and an answer must be its own", where=WHERE,
                      code="server-refused", status=Status.REFUSED, found=f"HTTP status {status}",
                      hint="name that address")  # fmt: skip
    again = status >= 500 or status in _TRY_AGAIN
    raise XdError(f"the server answers with HTTP status {status}: {_said(body)}", where=WHERE, code="server-refused",
                  status=Status.RETRY if again else Status.REFUSED)  # fmt: skip


def _said(body: bytes) -> str:
    """The message of an error, where it is JSON as OpenAI writes it; else the text."""
    text = body.decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    for name in ("error", "message"):
        value = value.get(name, value) if isinstance(value, dict) else value
    return shortened(" ".join((value if isinstance(value, str) else text).split()) or "no message", _MOST_SAID)
