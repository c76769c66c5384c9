"""Judging in the browser: the sessions that nodes wait for, and the routes through which pages see and answer them.

A session lives on the server, so a page that is loaded again finds it where it was. The node waits in its worker
thread, the routes run in the server's; the session's lock lies between them.
"""

from __future__ import annotations

import io
import re
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..treegrpo_core.human import Answer, Judging
from ..treegrpo_core.human_log import Judgement, append, fingerprint, now
from . import host

if TYPE_CHECKING:
    from aiohttp import web
    from torch import Tensor

EVENT = "treegrpo.human"
ROUTE = "/treegrpo/human"
LONGEST_SIDE = 1024
"""Of the pictures that are shown and kept in the log, in pixels."""

OPEN: dict[str, Session] = {}
"""Sessions that a node waits for, by id."""
CLOSED: deque[str] = deque(maxlen=1000)
"""Ids of the last sessions that are over, to say so to a page that still shows one."""


class RefusedError(ValueError):
    """An answer that cannot be taken, and the HTTP status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Posted(BaseModel):
    """What a page posts: its answer, and what it believes to answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    run: str
    update: int
    prompt_id: str
    count: int = Field(ge=0)
    """:attr:`Session.count` as the page saw it: an answer to an older state is refused."""
    answer: Answer


@dataclass
class Session:
    """One judging: what is shown, what was answered, and how long the node still waits."""

    judging: Judging
    prompts: tuple[str, ...]
    pictures: list[list[bytes]]
    """JPEG files by prompt and leaf."""
    folder: Path
    update: int
    prompt_id: str
    seconds: float
    """Time without an answer after which the judging is over; 0: no limit."""
    id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    count: int = 0
    """Answers received so far, with undo and the ones taken back."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    changed: threading.Event = field(default_factory=threading.Event)
    is_open: bool = True

    def __post_init__(self) -> None:
        self.names = [tuple(map(fingerprint, row)) for row in self.pictures]
        self.answered = time.monotonic()

    @property
    def seconds_left(self) -> float | None:
        """None: no limit."""
        return max(0.0, self.answered + self.seconds - time.monotonic()) if self.seconds else None

    def state(self) -> dict[str, Any]:
        """All that a page shows, as JSON. The session must be open."""
        judging, index = self.judging, self.judging.prompt
        return {
            "session": self.id,
            "run": self.folder.name,
            "update": self.update,
            "prompt_id": self.prompt_id,
            "mode": judging.mode,
            "leaves": judging.leaves,
            "prompts": judging.prompts,
            "prompt": index,
            "text": self.prompts[index] if index is not None else "",
            "stars": judging.stars,
            "pair": judging.pair,
            "asked": len(judging.given[index]) if index is not None else 0,
            "pairs": len(judging.pairs[0]),
            "can_undo": judging.done > 0,
            "count": self.count,
            "seconds_left": self.seconds_left,
        }

    def answer(self, posted: Posted) -> dict[str, Any]:
        """Take an answer and write it to the log; returns the new state. RefusedError if it does not fit."""
        with self.lock:
            if not self.is_open:
                raise over(self.id)
            mine = (self.folder.name, self.update, self.prompt_id)
            if (posted.run, posted.update, posted.prompt_id) != mine:
                raise RefusedError(
                    409,
                    f"this answer is for update {posted.update} of run {posted.run!r}, the judging for update "
                    f"{self.update} of run {mine[0]!r}; load the page again",
                )
            if posted.count != self.count:
                raise RefusedError(409, "another page has answered meanwhile; what you see now is up to date")
            try:
                index = self.judging.place(posted.answer)
            except ValueError as error:
                raise RefusedError(400, str(error)) from None
            try:
                append(self.folder, self._judgement(index, posted.answer), self.pictures[index])
            except OSError as error:
                raise RefusedError(500, f"the answer was not taken, because it cannot be written: {error}") from None
            self.judging.add(posted.answer)
            self.count += 1
            self.answered = time.monotonic()
            self.is_open = self.judging.prompt is not None
            self.changed.set()
            return self.state()

    def _judgement(self, index: int, answer: Any) -> Judgement:
        return Judgement(
            time=now(),
            session=self.id,
            run=self.folder.name,
            update=self.update,
            mode=self.judging.mode,
            prompt_index=index,
            prompt=self.prompts[index],
            leaves=self.names[index],
            answer=answer,
        )

    def wait(self) -> bool:
        """Show the session until it is answered (True) or the time is up (False); the host's interrupt ends it too."""
        OPEN[self.id] = self
        host.tell_pages(EVENT, {"session": self.id, "open": True})
        try:
            while True:
                host.stop_if_interrupted()
                with self.lock:
                    if self.judging.prompt is None:
                        return True
                    if self.seconds_left == 0:
                        self.is_open = False
                        return False
                self.changed.wait(0.1)
                self.changed.clear()
        finally:
            with self.lock:
                self.is_open = False
            del OPEN[self.id]
            CLOSED.append(self.id)
            host.tell_pages(EVENT, {"session": self.id, "open": False})


def over(session: str) -> RefusedError:
    """Why a session is not there: it ended, or never was."""
    if session in CLOSED or session in OPEN:
        return RefusedError(409, "this judging is over: it was finished, stopped, or its time was up")
    return RefusedError(404, "there is no such judging; load the page again")


def session_of(request: web.Request) -> Session:
    """The open session that a request names. RefusedError if there is none."""
    name = request.match_info["session"]
    session = OPEN.get(name)
    if session is None or not session.is_open:
        raise over(name)
    return session


def picture_of(session: Session, prompt: str, leaf: str) -> bytes:
    """The JPEG file of a leaf. RefusedError unless both are numbers in range."""
    if not (re.fullmatch(r"[0-9]{1,6}", prompt) and re.fullmatch(r"[0-9]{1,6}", leaf)):
        raise RefusedError(404, "prompt and leaf of a picture are numbers")
    if int(prompt) >= session.judging.prompts or int(leaf) >= session.judging.leaves:
        raise RefusedError(404, f"there is no leaf {leaf} of prompt {prompt}")
    return session.pictures[int(prompt)][int(leaf)]


def posted_of(data: Any) -> Posted:
    """What a page posted. RefusedError names the first thing that is wrong with it."""
    try:
        return Posted.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise RefusedError(400, f"{place or 'answer'}: {first['msg']}") from None


def add_routes(routes: web.RouteTableDef) -> None:
    """Register the routes; no path or name that a page sends is used as a file's."""
    from aiohttp import web

    def refused(error: RefusedError) -> web.Response:
        return web.json_response({"error": str(error)}, status=error.status)

    @routes.get(ROUTE)
    async def sessions(_: web.Request) -> web.Response:
        return web.json_response([session.state() for session in list(OPEN.values()) if session.is_open])

    @routes.get(ROUTE + "/{session}")
    async def state(request: web.Request) -> web.Response:
        try:
            return web.json_response(session_of(request).state())
        except RefusedError as error:
            return refused(error)

    @routes.get(ROUTE + "/{session}/{prompt}/{leaf}")
    async def picture(request: web.Request) -> web.Response:
        try:
            found = picture_of(session_of(request), request.match_info["prompt"], request.match_info["leaf"])
        except RefusedError as error:
            return refused(error)
        return web.Response(body=found, content_type="image/jpeg", headers={"Cache-Control": "private, max-age=3600"})

    @routes.post(ROUTE + "/{session}")
    async def answer(request: web.Request) -> web.Response:
        try:
            session = session_of(request)
            try:
                data = await request.json()
            except ValueError:
                raise RefusedError(400, "the answer is not JSON") from None
            return web.json_response(session.answer(posted_of(data)))
        except RefusedError as error:
            return refused(error)


def jpegs(images: Tensor, prompts: int) -> list[list[bytes]]:
    """(P * L, H, W, 3) float in [0, 1] -> JPEG files by prompt and leaf, at most :data:`LONGEST_SIDE` pixels a side."""
    from PIL import Image

    files = []
    for image in images:
        picture = Image.fromarray((image.clamp(0, 1) * 255).round().byte().numpy())
        picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
        stream = io.BytesIO()
        picture.save(stream, "JPEG", quality=95, subsampling=0)
        files.append(stream.getvalue())
    leaves = len(files) // prompts
    return [files[prompt * leaves : (prompt + 1) * leaves] for prompt in range(prompts)]
