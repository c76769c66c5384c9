"""Rewards over HTTP: what is sent and taken, and what every kind of broken server leads to."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any

import pytest
import torch
from PIL import Image

from treegrpo_core.rewards import WeightedReward, load_reward, score, web
from treegrpo_core.rewards.remote import BATCH, RemoteReward
from treegrpo_core.rewards.vlm_judge import VlmJudgeReward
from treegrpo_core.rewards.web import TOKENS, token_for

Answer = tuple[int, dict[str, str], bytes]


class Stub(ThreadingHTTPServer):
    """Answers the n-th request with ``answer(n, content)``; keeps what it was sent."""

    daemon_threads = True

    def __init__(self, answer: Callable[[int, Any], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), StubHandler)
        self.answer, self.lock = answer, threading.Lock()
        self.requests: list[Any] = []
        self.tokens: list[str | None] = []
        self.times: list[float] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/score"


class StubHandler(BaseHTTPRequestHandler):
    server: Stub

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.requests)
            self.server.requests.append(content)
            self.server.tokens.append(self.headers["Authorization"])
            self.server.times.append(time.monotonic())
        status, headers, body = self.server.answer(number, content)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        raise AssertionError("a redirect was followed")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[int, Any], Answer]], Stub]]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    servers: list[Stub] = []

    def start(answer: Callable[[int, Any], Answer]) -> Stub:
        servers.append(Stub(answer))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ok(content: Any) -> Answer:
    return 200, {}, json.dumps(content).encode()


def means(number: int, content: Any) -> Answer:
    """The mean pixel of each picture, as a server would score."""
    pictures = [Image.open(BytesIO(base64.b64decode(image))) for image in content["images"]]
    return ok({"scores": [sum(picture.tobytes()) / 255 / len(picture.tobytes()) for picture in pictures]})


def remote(server: Stub, timeout: float = 5.0) -> RemoteReward:
    return RemoteReward(server.url, timeout=timeout, wait=0.01)


def grey(*values: float, side: int = 8) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None, None, None].expand(len(values), side, side, 3).clone()


# what is sent and taken


def test_pictures_and_prompts_arrive_in_order_and_scores_come_back(stub: Any) -> None:
    values = [place / 255 for place in range(0, 255, 6)]
    server = stub(means)
    prompts = [f"fox „{place}“" for place in range(len(values))]
    torch.testing.assert_close(remote(server).score(grey(*values), prompts), torch.tensor(values))
    assert [len(request["images"]) for request in server.requests] == [BATCH, BATCH, len(values) - 2 * BATCH]
    assert [text for request in server.requests for text in request["prompts"]] == prompts
    assert set(server.requests[0]) == {"prompts", "images"}


def test_the_pixels_that_arrive_are_the_ones_sent(stub: Any) -> None:
    server = stub(lambda number, content: ok({"scores": [1]}))
    exact = torch.randint(0, 256, (1, 5, 9, 3), generator=torch.Generator().manual_seed(0))
    remote(server).score(exact / 255, [""])
    picture = Image.open(BytesIO(base64.b64decode(server.requests[0]["images"][0])))
    assert picture.format == "PNG" and picture.mode == "RGB" and picture.size == (9, 5)
    assert list(picture.tobytes()) == exact.flatten().tolist()


def test_large_pictures_are_spread_over_requests(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = stub(means)
    images = torch.rand(3, 64, 64, 3)  # noise: 16 kB each in base64
    monkeypatch.setattr("treegrpo_core.rewards.remote.MAX_REQUEST", 40_000)
    assert remote(server).score(images, ["ä" * 100] * 3).shape == (3,)
    assert [len(request["images"]) for request in server.requests] == [2, 1]


def test_a_picture_beyond_the_limit_is_refused_before_it_is_sent(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = stub(means)
    monkeypatch.setattr(web, "MAX_REQUEST", 2**20)
    with pytest.raises(ValueError, match="'remote'.*MiB, more than 1: score smaller pictures"):
        remote(server).score(torch.rand(1, 640, 640, 3), [""])
    assert server.requests == []


def test_the_token_goes_to_its_host_only_and_is_not_kept(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trusted, other = stub(means), stub(means)
    host = trusted.url.split("/")[2]
    monkeypatch.setenv(TOKENS, f"example.com=one {host}=two=2")
    reward = remote(trusted)
    reward.score(grey(0), [""])
    remote(other).score(grey(0), [""])
    assert trusted.tokens == ["Bearer two=2"] and other.tokens == [None]
    assert "two" not in repr(vars(reward))
    monkeypatch.setenv(TOKENS, "secret")
    with pytest.raises(ValueError, match="not host=token") as refusal:
        token_for(host)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("name", ["remote", "vlm_judge"])
@pytest.mark.parametrize(
    "address",
    ["", "127.0.0.1:8189", "file:///etc/passwd", "ftp://a/b", "http://", "http://[", "http://a:x/", "javascript:1"],
)
def test_what_is_no_web_address_is_refused(name: str, address: str) -> None:
    source = f"{address} model" if name == "vlm_judge" else address
    with pytest.raises(ValueError, match=f"source of reward '{name}'.*http://127.0.0.1"):
        load_reward(name, source=source)


def test_a_password_in_the_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match=TOKENS) as refusal:
        load_reward("remote", source="http://me:secret@example.com/score")
    assert "secret" not in str(refusal.value)


# broken servers


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_go_away_is_tried_again_after_growing_pauses(stub: Any, status: int) -> None:
    server = stub(lambda number, content: means(number, content) if number == 2 else (status, {}, b"busy"))
    reward = RemoteReward(server.url, wait=0.05)
    torch.testing.assert_close(reward.score(grey(1.0), [""]), torch.ones(1))
    first, second, third = server.times
    assert second - first >= 0.05 and third - second >= 0.1


def test_a_server_that_only_fails_is_given_up_with_its_words(stub: Any) -> None:
    server = stub(lambda number, content: (500, {}, json.dumps({"error": "out of paint"}).encode()))
    with pytest.raises(ConnectionError, match="'remote'.*after 4 attempts.*status 500: out of paint.*Check"):
        remote(server).score(grey(1.0), [""])
    assert len(server.requests) == 4


def test_no_server_at_all(stub: Any) -> None:
    server = stub(means)
    server.shutdown()
    server.server_close()
    with pytest.raises(ConnectionError, match="'remote'.*after 4 attempts.*refused"):
        remote(server).score(grey(1.0), [""])


def test_a_server_that_hangs_is_left(stub: Any) -> None:
    server = stub(lambda number, content: time.sleep(3) or means(number, content))
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"'remote'.*longer than 0\.2 s"):
        remote(server, timeout=0.2).score(grey(1.0), [""])
    assert time.monotonic() - start < 2 and len(server.requests) == 1


def test_a_server_that_drips_is_left(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def drip(handler: StubHandler) -> None:
        handler.rfile.read(int(handler.headers["Content-Length"]))
        handler.send_response(200)
        handler.end_headers()
        for _ in range(40):
            handler.wfile.write(b" ")
            time.sleep(0.1)

    monkeypatch.setattr(StubHandler, "do_POST", drip)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="longer than"):
        remote(stub(means), timeout=0.3).score(grey(1.0), [""])
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"scores": [1, 2, 3]}', "3 scores for 2 pictures"),
        (b'{"scores": []}', "0 scores for 2 pictures"),
        (b'{"scores": 1}', 'without a list "scores"'),
        (b"[1, 2]", 'without a list "scores"'),
        (b'{"scores": [1, NaN]}', "NaN is no number"),
        (b'{"scores": [1, -Infinity]}', "-Infinity is no number"),
        (b'{"scores": [1, 1e999]}', "score 'inf' for picture 1.*'cat'"),
        (b'{"scores": [1, 1e200]}', "score '1e.200' for picture 1"),
        (b'{"scores": [1, null]}', "score 'None' for picture 1"),
        (b'{"scores": [true, 1]}', "score 'True' for picture 0"),
        (b'{"scores": ["1", 1]}', "score '1' for picture 0"),
        (b"<!doctype html><title>Welcome</title>", "did not answer with JSON.*Welcome.*Is it a reward server"),
        (b"", "did not answer with JSON.*but: nothing"),
        (b"\xff\xfe", "did not answer with JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b" " * (web.MAX_REPLY + 1), "more than 1024 KiB"),
    ],
)
def test_answers_that_cannot_be_used_are_refused_at_once(stub: Any, body: bytes, message: str) -> None:
    server = stub(lambda number, content: (200, {}, body))
    with pytest.raises(ValueError, match=f"^reward 'remote': {server.url} .*{message}"):
        score([WeightedReward(remote(server))], grey(0.0, 1.0), ["fox", "cat"])
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(stub: Any, status: int) -> None:
    other = stub(means)
    server = stub(lambda number, content: (status, {"Location": other.url}, b""))
    with pytest.raises(ValueError, match=f"redirects to {other.url}: give the final address"):
        remote(server).score(grey(1.0), [""])
    assert other.requests == [] and len(server.requests) == 1


@pytest.mark.parametrize(("status", "hint"), [(400, "too blue"), (401, TOKENS), (404, "too blue")])
def test_refused_requests_are_not_repeated(stub: Any, status: int, hint: str) -> None:
    server = stub(lambda number, content: (status, {}, b'{"error": "too blue"}'))
    with pytest.raises(ValueError, match=f"status {status}: too blue.*{hint}" if status == 401 else hint):
        remote(server).score(grey(1.0), [""])
    assert len(server.requests) == 1


# vlm_judge


def judge(server: Stub, answer: str = "") -> VlmJudgeReward:
    return VlmJudgeReward(f"{server.url.removesuffix('score')}v1/ some/model", timeout=5, wait=0.01)


def said(content: object) -> Answer:
    return ok({"choices": [{"message": {"role": "assistant", "content": content}}]})


def test_the_judge_is_asked_for_each_picture_with_its_prompt(stub: Any) -> None:
    def rate(number: int, content: Any) -> Answer:
        text, picture = content["messages"][0]["content"]
        data = picture["image_url"]["url"].removeprefix("data:image/png;base64,")
        level = Image.open(BytesIO(base64.b64decode(data))).tobytes()[0]
        return said(f" {level / 255 * 10:.1f}\n") if f"prompt {level}" in text["text"] else said("mixed up")

    server = stub(rate)
    values = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    prompts = [f"prompt {round(255 * value)} {{braces}}" for value in values]
    torch.testing.assert_close(judge(server).score(grey(*values), prompts), torch.tensor(values) * 10)
    assert {request["model"] for request in server.requests} == {"some/model"}
    assert {request["temperature"] for request in server.requests} == {0}


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("10", 10), ("10.0", 10), ("7.25", 7.25), (" 3 ", 3)])
def test_numbers_are_taken(stub: Any, text: str, number: float) -> None:
    assert judge(stub(lambda *_: said(text))).score(grey(1.0), [""]).tolist() == [number]


@pytest.mark.parametrize(
    "text", ["11", "-1", "8/10", "I would say 8", "8, 9", "nan", "10.5", "1e1", "", "<think>", "٣", "007", None, 7]
)
def test_anything_else_than_a_number_is_refused(stub: Any, text: object) -> None:
    with pytest.raises(ValueError, match="'vlm_judge'.*expected a number from 0 to 10"):
        judge(stub(lambda *_: said(text))).score(grey(1.0), [""])


@pytest.mark.parametrize("content", [{}, [], {"choices": []}, {"choices": [{}]}, {"choices": None}])
def test_answers_of_another_interface_are_refused(stub: Any, content: object) -> None:
    with pytest.raises(ValueError, match="'vlm_judge'.*without \"choices\""):
        judge(stub(lambda *_: ok(content))).score(grey(1.0), [""])


@pytest.mark.parametrize("source", ["", "http://127.0.0.1:8000/v1", "http://127.0.0.1/v1 a model"])
def test_the_judge_needs_an_address_and_a_model(source: str) -> None:
    with pytest.raises(ValueError, match="'vlm_judge'.*an address and a model's name"):
        load_reward("vlm_judge", source=source)
