"""JSON over HTTP with one server, by the standard library: a connection that is kept, and one clear error each.

No error names the address: some of them are published with an attempt.
"""

from __future__ import annotations

import http.client
import json
import socket
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
_MOST_SAID = 300  # characters of a server's own message
#: answers that another try may change: too many requests, too early, and all that is the server's own fault
_TRY_AGAIN = (408, 425, 429)


class Client:
    """One server, at `http://host[:port][/prefix]`; a last `/v1` is left away. XdError 65 for another address."""

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
            return answer.status, answer.read()
        except BaseException as error:
            connection.close()
            if (known := _known(error, timeout_s)) is not None:
                raise known from error
            raise


def _address(url: str) -> tuple[Any, str, int | None, str]:
    """How, and to which host, port and prefix, to connect."""
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in kinds or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise XdError("is no address of a server", code="bad-address", where=WHERE, found=url,
                      expected="http://HOST:PORT")  # fmt: skip
    return kinds[parts.scheme], parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1")


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
    if isinstance(error, socket.gaierror):
        return XdError(f"there is no such host: {error.strerror}", status=Status.MISSING, code="missing", where=WHERE)
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
    again = status >= 500 or status in _TRY_AGAIN
    raise XdError(f"the server answers with HTTP status {status}: {_said(body)}", where=WHERE, code="server-refused",
                  status=Status.RETRY if again else Status.REFUSED)  # fmt: skip


def _said(body: bytes) -> str:
    """The message of an error, where it is JSON as OpenAI writes it; else the text."""
    text = body.decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    for name in ("error", "message"):
        value = value.get(name, value) if isinstance(value, dict) else value
    return shortened(" ".join((value if isinstance(value, str) else text).split()) or "no message", _MOST_SAID)
