"""JSON over HTTP for rewards that are computed elsewhere: limited in size and time, tried again when that can help."""

from __future__ import annotations

import base64
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from io import BytesIO
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from PIL import Image

MAX_REQUEST = 96 * 2**20
"""Bytes; a picture of 4096 x 4096 that cannot be compressed takes 64 MiB."""
MAX_REPLY = 2**20
TOKENS = "TREEGRPO_REWARD_TOKENS"
"""Environment variable: ``host=token``, several with spaces between; the host with its port if the address has one."""


class _TemporaryError(Exception):
    """What may go away by itself."""


class _NoRedirects(HTTPRedirectHandler):
    """A redirect could lead pictures and token to another host, and would turn the POST into a GET."""

    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass(frozen=True)
class Endpoint:
    """An address that takes JSON and answers with JSON."""

    reward: str
    """Whose errors these are."""
    url: str
    timeout: float = 120.0
    """Seconds for an answer."""
    attempts: int = 4
    wait: float = 0.5
    """Seconds before the second attempt; doubled for each further one."""

    def __post_init__(self) -> None:
        if not _is_address(self.url):
            raise ValueError(
                f"source of reward {self.reward!r} is {self.url!r}: give an address that starts with http:// or "
                "https://, for example http://127.0.0.1:8189/score"
            )
        parts = urlsplit(self.url)
        if "@" in parts.netloc:
            raise ValueError(
                f"source of reward {self.reward!r} has a password in it, which would be stored with the workflow: put "
                f"a token for {parts.hostname} into the environment variable {TOKENS}"
            )

    def post(self, content: Any) -> Any:
        """Send JSON; returns the JSON of the answer.

        Raises ConnectionError if there is none after all attempts (broken connections and the statuses 429 and 5xx are
        tried again), TimeoutError if it takes too long, and ValueError for any answer that is not what was asked for.
        """
        body = json.dumps(content).encode()
        if len(body) > MAX_REQUEST:
            raise self.wrong(
                f"would get {len(body) / 2**20:.0f} MiB, more than {MAX_REQUEST >> 20}: score smaller pictures"
            )
        for attempt in range(self.attempts):
            try:
                return self._parsed(self._exchange(body))
            except _TemporaryError as error:
                last = error
            if attempt < self.attempts - 1:
                time.sleep(self.wait * 2**attempt)
        raise ConnectionError(
            f"reward {self.reward!r}: no answer from {self.url} after {self.attempts} attempts; the last: {last}. "
            "Check that the server runs and that the address is right"
        ) from last

    def wrong(self, what: str) -> ValueError:
        """The error for an answer that cannot be used."""
        return ValueError(f"reward {self.reward!r}: {self.url} {what}")

    def _exchange(self, body: bytes) -> bytes:
        request = Request(self.url, body, {"Content-Type": "application/json"})  # noqa: S310 (http or https, see above)
        if token := token_for(urlsplit(self.url).netloc):
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        try:
            with build_opener(_NoRedirects).open(request, timeout=self.timeout) as reply:
                return self._read(reply)
        except HTTPError as error:
            with error:
                raise self._refused(error) from None
        except TimeoutError:
            raise self._late() from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise self._late() from None
            raise _TemporaryError(str(reason) or repr(reason)) from error

    def _read(self, reply: Any) -> bytes:
        """Everything, within time and size: a time-out of the socket alone would let a server drip for ever."""
        end, read = time.monotonic() + self.timeout, b""
        while chunk := reply.read1(2**16):
            read += chunk
            if len(read) > MAX_REPLY:
                raise self.wrong(f"answered with more than {MAX_REPLY >> 10} KiB: is it a reward server?")
            if time.monotonic() > end:
                raise TimeoutError
        length = reply.headers.get("Content-Length")
        if length and length.isdigit() and int(length) != len(read):
            raise _TemporaryError(f"the connection broke after {len(read)} of {length} bytes")
        return read

    def _late(self) -> TimeoutError:
        return TimeoutError(
            f"reward {self.reward!r}: {self.url} took longer than {self.timeout:g} s. Check that the server is not "
            "stuck, or score fewer or smaller pictures"
        )

    def _refused(self, error: HTTPError) -> Exception:
        if 300 <= error.code < 400:
            return self.wrong(f"redirects to {error.headers.get('Location')}: give the final address as source")
        try:
            text = error.read(2000).decode("utf-8", "replace")
        except (OSError, HTTPException):
            text = ""
        said = f"answered with status {error.code}: {_short(text)}"
        if error.code == 429 or error.code >= 500:
            return _TemporaryError(said)
        hint = f" (put host=token into the environment variable {TOKENS})" if error.code in (401, 403) else ""
        return self.wrong(said + hint)

    def _parsed(self, reply: bytes) -> Any:
        try:
            return strict_json(reply)
        except ValueError as error:
            text = _short(reply[:2000].decode("utf-8", "replace"))
            raise self.wrong(f"did not answer with JSON ({error}) but: {text}. Is it a reward server?") from None


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and " " not in url
            and url.isprintable()
        )
    except ValueError:
        return False


def strict_json(text: bytes) -> Any:
    """What the JSON says. ValueError for anything else, also for NaN and Infinity, which Python would take."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def token_for(host: str) -> str:
    """The token of a host (with its port, if the address has one) in the environment; empty: there is none."""
    for entry in os.environ.get(TOKENS, "").split():
        name, equals, token = entry.partition("=")
        if not equals or not token:
            raise ValueError(f"the environment variable {TOKENS} has an entry that is not host=token")
        if name.lower() == host.lower():
            return token
    return ""


def png_base64(picture: Image.Image) -> str:
    """The picture as a PNG file in base64."""
    file = BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


def _short(text: str) -> str:
    """The message of an error in JSON, or the beginning of any other text."""
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        text = str(json.loads(text)["error"])
    line = " ".join(text.split())
    return line[:300] + "…" if len(line) > 300 else line or "nothing"
