"""``treegrpo serve-reward``: a reward as a server, with the schema of docs/remote_reward.md."""

from __future__ import annotations

import base64
import hmac
import json
import logging
import os
import re
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from ipaddress import ip_address
from pathlib import Path
from threading import Lock
from typing import Any, TypeGuard

import torch
from PIL import Image
from torch import Tensor

from .rewards import Checkpoint, Reward, WeightedReward, known_rewards, load_reward, missing, module_of, score
from .rewards.web import MAX_REQUEST, strict_json

TOKEN = "TREEGRPO_SERVE_TOKEN"  # noqa: S105 (the variable's name)
MAX_IMAGES = 256
MAX_PIXELS = 4 * 4096 * 4096
"""Of all pictures of a request together: a small file can be a huge picture."""
_log = logging.getLogger(__name__)

PNG_RGB8 = b"\x08\x02"
"""Bytes 24 and 25 of a PNG file: bits a channel and kind of colour. Pillow would cut 16 bits down without a word."""


class RefusedError(Exception):
    """A request that cannot be answered: the status and what to do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RewardServer(ThreadingHTTPServer):
    """Scores pictures with one reward. It reads JSON and PNG, and executes nothing of what it is sent."""

    daemon_threads = True

    def __init__(self, reward: Reward, host: str = "127.0.0.1", port: int = 8189, token: str = "") -> None:
        """ValueError if others could reach it without a token. Port 0: any that is free."""
        if not token and not _loopback(host):
            raise ValueError(
                f"--host is {host!r}, where other computers can reach it: set the environment variable {TOKEN} to a "
                "token that clients must send, or use 127.0.0.1"
            )
        self.reward, self.token = reward, token.encode()
        self.lock = Lock()
        self.device = torch.device("cuda" if module_of(reward) and torch.cuda.is_available() else "cpu")
        if module := module_of(reward):
            module.to(self.device)
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        name = host if isinstance(host, str) else host.decode()
        return f"http://{f'[{name}]' if ':' in name else name}:{port}/score"

    @torch.no_grad()
    def scores(self, body: bytes) -> list[float]:
        """The scores of the pictures in a request's body. Raises RefusedError, whatever fails."""
        with self.lock:
            try:
                images, prompts = _pictures(body)
                return score([WeightedReward(self.reward)], images.to(self.device), prompts)[0].tolist()
            except RefusedError:
                raise
            except ValueError as error:
                raise RefusedError(422, str(error)) from error
            except Exception as error:
                _log.exception("reward %r failed", self.reward.name)
                said = f"reward {self.reward.name!r} failed: {type(error).__name__}; see the server's output"
                raise RefusedError(500, said) from error


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "TreeGRPO", ""
    timeout = 60
    """Seconds without a byte after which a client is left."""

    def do_POST(self) -> None:
        self.unread = 0
        try:
            try:
                self._answer(200, {"scores": self.server.scores(self._body())})
            except RefusedError as refused:
                self._answer(refused.status, {"error": str(refused)})
            self._drain()
        except OSError as error:
            self.log_error("the client went away: %s", error)

    def _body(self) -> bytes:
        """All of the body, once the request may send one. Raises RefusedError."""
        self.unread = length = self._length()
        self._permitted()
        if length > MAX_REQUEST:
            raise RefusedError(
                413, f"the body has {length} bytes, more than {MAX_REQUEST}: send fewer pictures at once"
            )
        body = self.rfile.read(length)
        self.unread = 0
        if len(body) < length:
            raise RefusedError(400, f"the body ended after {len(body)} of {length} bytes: send all of it")
        return body

    def _length(self) -> int:
        text = self.headers.get("Content-Length", "")
        if self.headers.get("Transfer-Encoding") or not re.fullmatch("[0-9]{1,15}", text):
            raise RefusedError(411, "send the body in one piece, with its length in Content-Length")
        return int(text)

    def _permitted(self) -> None:
        given = self.headers.get("Authorization", "").encode()
        if self.server.token and not hmac.compare_digest(given, b"Bearer " + self.server.token):
            raise RefusedError(401, "send the server's token as 'Authorization: Bearer ...'")
        if self.path != "/score":
            raise RefusedError(404, "there is nothing at this address: POST to /score")
        # A page in a browser cannot send this type to another host without being asked first.
        if self.headers.get_content_type() != "application/json":
            raise RefusedError(415, "send JSON, with Content-Type: application/json")

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content, allow_nan=False).encode()
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _drain(self) -> None:
        """Take what a refused client still sends, up to a limit: it could not read the answer otherwise."""
        left = min(self.unread, 2 * MAX_REQUEST)
        while left > 0 and (chunk := self.rfile.read1(min(left, 2**16))):
            left -= len(chunk)


def _pictures(body: bytes) -> tuple[Tensor, list[str]]:
    """(N, H, W, 3) float in [0, 1] and N prompts of a request. Raises RefusedError."""
    try:
        content = strict_json(body)
    except ValueError as error:
        raise RefusedError(400, f"the body is not JSON: {error}") from error
    prompts, images = (content.get(key) if isinstance(content, dict) else None for key in ("prompts", "images"))
    if not _texts(prompts) or not _texts(images):
        raise RefusedError(400, 'expected {"prompts": [text, ...], "images": [PNG file in base64, ...]}')
    if len(prompts) != len(images) or not 0 < len(images) <= MAX_IMAGES:
        raise RefusedError(400, f"{len(prompts)} prompts and {len(images)} images: send as many, 1 to {MAX_IMAGES}")
    opened = [_opened(place, text) for place, text in enumerate(images)]
    if len({picture.size for picture in opened}) > 1:
        raise RefusedError(400, "the images have different sizes: send one size in a request")
    width, height = opened[0].size
    if len(opened) * width * height > MAX_PIXELS:
        raise RefusedError(413, f"{len(opened)} images of {width} x {height} are too many pixels: send fewer at once")
    try:
        pixels = [torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8) for picture in opened]
    except (OSError, SyntaxError, ValueError) as error:
        raise RefusedError(400, f"an image is not a complete PNG file: {error}") from error
    return torch.stack(pixels).reshape(len(pixels), height, width, 3) / 255, prompts


def _texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _opened(place: int, text: str) -> Image.Image:
    """A PNG file whose pixels are not decoded yet. Raises RefusedError."""
    try:
        data = base64.b64decode(text, validate=True)
        picture = Image.open(BytesIO(data), formats=("PNG",))
    except (ValueError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise RefusedError(400, f"image {place} is not a PNG file in base64: {error}") from error
    if data[24:26] != PNG_RGB8:
        raise RefusedError(400, f"image {place} is not RGB with 8 bits a channel: convert it, without alpha")
    return picture


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(name: str, source: str, host: str, port: int, models: Path | None, say: Callable[[str], object]) -> str:
    """Serve a reward of the registry until Ctrl-C; returns what to print then. ValueError, OSError, ImportError."""

    def locate(checkpoint: Checkpoint) -> Path:
        file = (models or Path()) / checkpoint.file
        return file if models and file.is_file() else missing(checkpoint)

    if name in (known := known_rewards()) and known[name].compares:
        raise ValueError(
            f"reward {name!r} compares pictures with each other, so it cannot score them request by request"
        )
    reward = load_reward(name, source=source, locate=locate)
    with RewardServer(reward, host, port, os.environ.get(TOKEN, "").strip()) as server:
        say(f"reward {name!r} at {server.url}; stop with Ctrl-C")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return "stopped"
    return "stopped"
