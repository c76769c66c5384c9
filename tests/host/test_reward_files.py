"""Weights of learned rewards in a real ComfyUI: found, fetched, refused, kept in memory, put on the device."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from checkpoints import save, small_clip, small_imagereward
from graphs import training

from tools.client import ExecutionError, Graph
from tools.host import Server


@pytest.fixture(scope="module")
def folder(comfy: Server) -> Path:
    folder = comfy.base / "models" / "reward_models"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def trained_on(comfy: Server, graph: Graph, run_name: str, **inputs: object) -> list[str]:
    """Train once on a reward: the lines of the run's log."""
    training(graph, run_name).set("reward", **inputs)
    comfy.run(graph)
    return (comfy.output / "treegrpo" / run_name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()


def test_a_training_runs_on_a_learned_reward_of_a_local_file(comfy, folder, graph, run_name) -> None:
    torch.save({"state_dict": small_clip()}, folder / "HPS_v2.1_compressed.pt")
    logged = len(comfy.log())
    (line,) = trained_on(comfy, graph, run_name, name="hpsv2.1")
    assert '"hpsv2.1"' in line
    assert "Requested to load Clip" in comfy.log()[logged:]  # by core's memory management


def test_a_loop_loads_the_weights_once(comfy, folder, graph, run_name) -> None:
    torch.save({"state_dict": small_clip()}, folder / "HPS_v2_compressed.pt")
    nodes = training(graph, run_name, iterations=3).set("reward", name="hpsv2.0")
    again = graph.add("TreeGRPORewardModel", name="jpeg", weight=0.0, previous=nodes.reward[0])
    nodes.set("scorer", reward=again[0])
    logged = len(comfy.log())
    comfy.run(graph)
    assert comfy.log()[logged:].count("reward hpsv2.0 loaded") == 1


def test_a_reward_is_loaded_again_after_the_user_freed_the_memory(comfy, folder, graph, run_name) -> None:
    torch.save({"state_dict": small_clip()}, folder / "HPS_v2.1_compressed.pt")
    for _update in range(2):
        lines = trained_on(comfy, graph, run_name, name="hpsv2.1")
        comfy.request("/free", {"unload_models": True, "free_memory": True})
        graph = Graph()
    assert len(lines) == 2 and all('"hpsv2.1"' in line for line in lines)


def test_a_missing_file_names_where_to_get_it_and_where_to_put_it(comfy, folder, graph, run_name) -> None:
    training(graph, run_name).set("reward", name="imagereward")
    with pytest.raises(ExecutionError) as failure:
        comfy.run(graph)
    error = failure.value
    assert error.node_type == "TreeGRPORewardModel" and error.kind == "FileNotFoundError"
    assert all(part in error.message for part in ("ImageReward.pt", "huggingface.co/THUDM/ImageReward", "download"))


BAD = {
    "another file": ({"name": "clipscore"}, "clip-vit-large-patch14.safetensors", "has 4 bytes, not 1710540580"),
    "damaged": ({"name": "pickscore"}, "PickScore_v1.safetensors", "no safetensors file or is damaged"),
    "outside": ({"name": "clipscore", "source": "../../secret.pt"}, "any", "outside models/reward_models"),
    "no such source": ({"name": "clipscore", "source": "none.pt"}, "any", "none.pt is missing"),
    "source for none": ({"name": "jpeg", "source": "any"}, "any", "takes none"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_and_sources_are_refused(case, comfy, folder, graph, run_name) -> None:
    inputs, file, told = BAD[case]
    (folder / file).write_bytes(b"oops")
    training(graph, run_name).set("reward", **inputs)
    with pytest.raises(ExecutionError) as failure:
        comfy.run(graph)
    assert failure.value.node_type == "TreeGRPORewardModel" and told in failure.value.message
    (folder / file).unlink()


def test_old_graphs_without_the_new_inputs_still_run(comfy, graph, run_name) -> None:
    nodes = training(graph, run_name)
    assert not {"source", "download"} & graph.inputs(nodes.reward).keys()
    comfy.run(graph)


# downloads, from a server that answers as Hugging Face does


class Hub(ThreadingHTTPServer):
    """Serves ``files``, path in the address -> content, and remembers what was asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.slow = False


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        content = self.server.files.get(self.path)
        self.server.asked.append(self.path)
        self.send_response(200 if content is not None else 404)
        if content is None:
            self.send_header("X-Error-Code", "EntryNotFound")
        else:
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        content = self.server.files.get(self.path, b"")
        with contextlib.suppress(ConnectionError):  # the host hangs up when its user cancels: a test's own doing
            if self.server.slow:
                for first in range(0, len(content), 1 << 16):
                    self.wfile.write(content[first : first + (1 << 16)])
                    time.sleep(0.1)
            else:
                self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()


@pytest.fixture(scope="module")
def online(hub: Hub) -> Iterator[Server]:
    """A server of its own that takes the hub for Hugging Face."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        patch.setenv("HF_HUB_DISABLE_XET", "1")
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        with Server() as server:
            yield server


def saved(content: object, folder: Path) -> bytes:
    torch.save(content, folder / "file.pt")
    return (folder / "file.pt").read_bytes()


HPS = "/xswu/HPSv2/resolve/main/HPS_v2.1_compressed.pt"


def test_nothing_is_fetched_unless_the_user_ticked_download(online, hub, graph, run_name, tmp_path) -> None:
    hub.files = {HPS: saved({"state_dict": small_clip()}, tmp_path)}
    training(graph, run_name).set("reward", name="hpsv2.1")
    with pytest.raises(ExecutionError, match="is missing"):
        online.run(graph)
    assert hub.asked == []


def test_a_ticked_download_arrives_whole_and_is_used_again(online, hub, graph, run_name, tmp_path) -> None:
    hub.files = {HPS: saved({"state_dict": small_clip()}, tmp_path)}
    (line,) = trained_on(online, graph, run_name, name="hpsv2.1", download=True)
    folder = online.base / "models" / "reward_models"
    assert '"hpsv2.1"' in line and [path.name for path in folder.iterdir()] == ["HPS_v2.1_compressed.pt"]
    assert (folder / "HPS_v2.1_compressed.pt").read_bytes() == hub.files[HPS]
    asked = len(hub.asked)
    trained_on(online, Graph(), run_name + " again", name="hpsv2.1", download=True)
    assert len(hub.asked) == asked


def test_a_download_of_another_file_or_of_none_leaves_nothing_behind(online, hub, run_name, tmp_path) -> None:
    hub.files = {
        "/THUDM/ImageReward/resolve/main/ImageReward.pt": saved(small_imagereward(), tmp_path),
        "/google-bert/bert-base-uncased/resolve/main/vocab.txt": b"x" * 231_508,
    }
    folder = online.base / "models" / "reward_models"
    for name, told in (("imagereward", "has another SHA-256"), ("pickscore", "could not be fetched")):
        graph = Graph()
        training(graph, run_name).set("reward", name=name, download=True)
        with pytest.raises(ExecutionError) as failure:
            online.run(graph)
        assert told in failure.value.message
    left = {path.name for path in folder.iterdir()} - {"HPS_v2.1_compressed.pt"}
    assert left == {"ImageReward.pt"}  # complete, and nothing of it is checked but its weights


def test_cancel_stops_a_download_and_leaves_nothing_behind(online, hub, graph, run_name) -> None:
    file = "/xswu/HPSv2/resolve/main/HPS_v2_compressed.pt"
    hub.files, hub.slow = {file: bytes(64 << 20)}, True
    training(graph, run_name).set("reward", name="hpsv2.0", download=True)
    threading.Timer(5, lambda: online.request("/interrupt", b"")).start()
    started = time.monotonic()
    try:
        with pytest.raises(Exception, match=r"(?i)interrupt"):
            online.run(graph)
    finally:
        hub.slow = False
    assert time.monotonic() - started < 60
    names = {path.name for path in (online.base / "models" / "reward_models").iterdir()}
    assert not any("download" in name or "v2_" in name for name in names)


def test_clipscore_finds_towers_where_comfyui_keeps_them(comfy, graph, run_name) -> None:
    weights = small_clip(quick_gelu=True)
    image = {name: value for name, value in weights.items() if name.startswith("visual.")}
    for kind, part in (("clip_vision", image), ("text_encoders", {k: v for k, v in weights.items() if k not in image})):
        folder = comfy.base / "models" / kind
        folder.mkdir(parents=True, exist_ok=True)
        save(part, folder / f"{kind} of mine.safetensors")
    source = "clip_vision of mine.safetensors + text_encoders of mine.safetensors"
    (line,) = trained_on(comfy, graph, run_name, name="clipscore", source=source)
    assert '"clipscore"' in line
