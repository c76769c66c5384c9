"""``treegrpo serve-reward``: the same scores as here, and what it refuses."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from io import BytesIO
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from tools.host import ROOT
from treegrpo_core.cli import main
from treegrpo_core.rewards import Reward, load_reward, remote, web
from treegrpo_core.rewards.remote import RemoteReward
from treegrpo_core.rewards.web import MAX_REQUEST, TOKENS
from treegrpo_core.serve import MAX_IMAGES, MAX_PIXELS, TOKEN, RewardServer

Start = Callable[..., RewardServer]


class Says:
    """A reward that does what a test wants."""

    name = "says"

    def __init__(self, what: Any) -> None:
        self.what = what

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        if isinstance(self.what, Exception):
            raise self.what
        return torch.tensor(self.what)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("no_proxy", "127.0.0.1,::1,localhost")
    servers: list[RewardServer] = []

    def run(reward: Reward, token: str = "", host: str = "127.0.0.1") -> RewardServer:
        servers.append(RewardServer(reward, host, 0, token))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1]

    yield run
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(server: RewardServer, body: bytes, path: str = "/score", **headers: str) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    sent = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", path, body, sent)
    answer = connection.getresponse()
    status, content = answer.status, json.loads(answer.read())
    connection.close()
    return status, content


def png(mode: str = "RGB", size: tuple[int, int] = (4, 4)) -> str:
    file = BytesIO()
    Image.new(mode, size).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def body(*images: str) -> bytes:
    return json.dumps({"prompts": ["fox"] * len(images), "images": images}).encode()


@pytest.mark.parametrize("name", ["jpeg", "text_image", "background_match"])
def test_served_scores_equal_the_ones_here(start: Start, name: str) -> None:
    images = torch.randint(0, 256, (20, 64, 64, 3), generator=torch.Generator().manual_seed(0)) / 255
    prompts = ["fox on red", "small cat on blue"] * 10
    served = RemoteReward(start(load_reward(name)).url).score(images, prompts)
    torch.testing.assert_close(
        served, load_reward(name).score(images, prompts), rtol=0, atol=0 if name == "jpeg" else 1e-5
    )


def test_the_largest_picture_passes(start: Start) -> None:
    images = torch.full((1, 4096, 4096, 3), 0.5)
    assert torch.equal(
        RemoteReward(start(load_reward("jpeg")).url).score(images, [""]), load_reward("jpeg").score(images, [""])
    )


def test_requests_at_the_same_time_are_all_answered(start: Start) -> None:
    server, scores = start(load_reward("jpeg")), []
    threads = [threading.Thread(target=lambda: scores.append(ask(server, body(png())))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(scores) == 8 and {status for status, _ in scores} == {200}


PNG_16_BITS = base64.b64encode(base64.b64decode(png())[:24] + b"\x10" + base64.b64decode(png())[25:]).decode()
CUT = base64.b64encode(base64.b64decode(png(size=(64, 64)))[:60]).decode()


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        (b"not json", 400, "not JSON"),
        (b'{"prompts": [NaN]}', 400, "NaN is no number"),
        (b"[" * 100_000, 400, "nested too deeply"),
        (b"[]", 400, "expected"),
        (b"{}", 400, "expected"),
        (b'{"prompts": "fox", "images": []}', 400, "expected"),
        (b'{"prompts": [1], "images": ["a"]}', 400, "expected"),
        (b'{"prompts": [], "images": []}', 400, "1 to 256"),
        (json.dumps({"prompts": ["a"], "images": [png(), png()]}).encode(), 400, "1 prompts and 2 images"),
        (body(*["x"] * 257), 400, "1 to 256"),
        (body("not base64!"), 400, "image 0 is not a PNG"),
        (body(png(), base64.b64encode(b"GIF89a").decode()), 400, "image 1 is not a PNG"),
        (body(png("L")), 400, "image 0 is not RGB with 8 bits"),
        (body(png("RGBA")), 400, "image 0 is not RGB with 8 bits"),
        (body(png("I;16")), 400, "image 0 is not RGB with 8 bits"),
        (body(PNG_16_BITS), 400, "image 0 is not"),
        (body(CUT), 400, "not a complete PNG|not a PNG"),
        (body(png(), png(size=(4, 5))), 400, "different sizes"),
        (body(*[png(size=(4096, 4096))] * 5), 413, "too many pixels"),
    ],
)
def test_what_cannot_be_scored_is_refused(start: Start, sent: bytes, status: int, message: str) -> None:
    answered, content = ask(start(load_reward("jpeg")), sent)
    assert answered == status and re.search(message, content["error"])


def test_other_types_and_places_are_refused(start: Start) -> None:
    server = start(load_reward("jpeg"))
    assert ask(server, body(png()), Content_Type="text/plain")[0] == 415
    assert ask(server, body(png()), path="/../../etc/passwd")[0] == 404


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (f"Content-Length: {MAX_REQUEST + 1}", b"413"),
        ("Content-Length: 99999999999999999999", b"411"),
        ("Content-Length: -1", b"411"),
        ("Transfer-Encoding: chunked", b"411"),
        ("X-None: 1", b"411"),
    ],
)
def test_bodies_that_are_too_large_are_refused_unread(start: Start, header: str, status: bytes) -> None:
    with socket.create_connection(start(load_reward("jpeg")).server_address[:2], timeout=5) as connection:
        connection.sendall(f"POST /score HTTP/1.1\r\nContent-Type: application/json\r\n{header}\r\n\r\n".encode())
        assert connection.recv(64).split()[1] == status


@pytest.mark.parametrize(
    ("what", "status", "message"),
    [
        ([float("nan")], 422, "'says' returned nan"),
        ([1.0, 2.0], 422, "'says' returned scores of shape"),
        (ValueError("too blue"), 422, "'says' failed.*too blue"),
        (OSError("/secret/path"), 500, "'says' failed: OSError"),
    ],
)
def test_failures_of_the_reward_reach_the_client(start: Start, what: Any, status: int, message: str) -> None:
    answered, content = ask(start(Says(what)), body(png()))
    assert answered == status and re.search(message, content["error"]) and "secret" not in content["error"]


def test_the_server_goes_on_after_failures(start: Start) -> None:
    reward = Says(RuntimeError("no"))
    server = start(reward)
    assert ask(server, body(png()))[0] == 422
    reward.what = [2.0]
    assert ask(server, body(png())) == (200, {"scores": [2.0]})


def test_without_the_token_nothing_is_scored(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(Says([3.0]), token="s3cret")
    assert ask(server, body(png()))[0] == 401
    assert ask(server, body(png()), Authorization="Bearer wrong")[0] == 401
    assert ask(server, body(png()), Authorization="Bearer s3cret") == (200, {"scores": [3.0]})
    with pytest.raises(ValueError, match=f"401.*{TOKENS}"):
        RemoteReward(server.url).score(torch.zeros(1, 4, 4, 3), [""])
    monkeypatch.setenv(TOKENS, f"{server.url.split('/')[2]}=s3cret")
    assert RemoteReward(server.url).score(torch.zeros(1, 4, 4, 3), [""]).tolist() == [3.0]


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.168.0.5", "example.com"])
def test_other_computers_are_let_in_with_a_token_only(host: str) -> None:
    with pytest.raises(ValueError, match=f"--host is '{host}'.*{TOKEN}"):
        RewardServer(Says([1.0]), host, 0)


def test_the_command_refuses_what_it_cannot_serve(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setitem(sys.modules, "rapidocr_onnxruntime", None)
    for arguments, message in (
        (["beauty"], "unknown reward 'beauty'"),
        (["diversity"], "compares pictures"),
        (["jpeg", "--host", "0.0.0.0"], TOKEN),
        (["colour", "--source", "blue"], "#rrggbb"),
        (["ocr"], "pip install rapidocr-onnxruntime"),
    ):
        assert main(["serve-reward", *arguments, "--port", "0"]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one child")
@pytest.mark.skipif(signal.getsignal(signal.SIGINT) is signal.SIG_IGN, reason="children of a background job ignore it")
def test_the_command_serves_until_interrupted() -> None:
    command = [
        sys.executable,
        "-m",
        "treegrpo_core.cli",
        "serve-reward",
        "colour",
        "--source",
        "#000000",
        "--port",
        "0",
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split(" at ")[1].split(";")[0]
        assert url.startswith("http://127.0.0.1:")
        reward = RemoteReward(url)
        assert reward.score(torch.tensor([0.0, 1.0])[:, None, None, None].expand(2, 4, 4, 3), ["", ""]).tolist() == [
            1,
            0,
        ]
        time.sleep(0.1)
        try:
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=20)
        finally:
            process.kill()  # or the end of the block would wait for it for ever
        assert process.returncode == 0 and "stopped" in out


def test_the_page_names_the_limits_that_hold() -> None:
    page = (ROOT / "docs" / "remote_reward.md").read_text(encoding="utf-8").replace("\n", " ")
    mib, default = MAX_REQUEST // 2**20, web.Endpoint("remote", "http://127.0.0.1/")
    for words in (
        f"`remote` sends at most {remote.BATCH} images and {mib} MiB in a request, and reads at most "
        f"{web.MAX_REPLY // 2**10} KiB of answer",
        f"takes at most {mib} MiB and {MAX_IMAGES} images, together at most {MAX_PIXELS} pixels",
        f"{default.attempts} times in all, after {default.wait}, {default.wait * 2:g} and {default.wait * 4:g} seconds",
        f"longer than {default.timeout:g} seconds",
        TOKEN,
        TOKENS,
    ):
        assert words in page
