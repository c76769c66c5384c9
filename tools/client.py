"""A small client of ComfyUI's own HTTP and websocket interface, for the tests and the demo.

Beside the standard library it uses what ComfyUI requires: aiohttp to follow a run live, numpy and Pillow for pictures.
"""

from __future__ import annotations

import asyncio
import copy
import io
import itertools
import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

if TYPE_CHECKING:
    import numpy as np

Event = Callable[[str, dict[str, Any]], None]


class InvalidGraphError(ValueError):
    """The server refused a graph; the message names every node and input at fault."""


class InterruptedRunError(RuntimeError):
    """The run was interrupted."""


class ExecutionError(RuntimeError):
    """A node raised: ``node_id``, ``node_type`` and the exception's ``kind`` (class), ``message`` and ``traceback``."""

    def __init__(self, details: dict[str, Any]) -> None:
        self.node_id = str(details["node_id"])
        self.node_type = str(details["node_type"])
        self.message = str(details["exception_message"]).strip()
        self.kind = str(details["exception_type"])
        self.traceback = "".join(details["traceback"])
        super().__init__(f"node {self.node_id} ({self.node_type}): {self.kind}: {self.message}\n{self.traceback}")


@dataclass(frozen=True)
class Node:
    """A node of a graph; ``node[0]`` is the link to its first output."""

    id: str

    def __getitem__(self, output: int) -> list[Any]:
        return [self.id, output]


class Graph(dict[str, dict[str, Any]]):
    """A graph in API format: node id -> class_type and inputs."""

    @classmethod
    def load(cls, path: Path) -> Graph:
        """Read a graph exported in API format."""
        return cls(json.loads(path.read_text(encoding="utf-8")))

    def add(self, class_type: str, /, **inputs: Any) -> Node:
        """Add a node under an unused id; inputs are values or links (``node[output]``)."""
        node = Node(next(str(i) for i in itertools.count(1) if str(i) not in self))
        self[node.id] = {"class_type": class_type, "inputs": inputs}
        return node

    def find(self, class_type: str) -> Node:
        """The one node of this type. Raises LookupError if there is none or more than one."""
        found = [node for node, content in self.items() if content["class_type"] == class_type]
        if len(found) != 1:
            raise LookupError(f"{len(found)} nodes of type {class_type} in the graph, expected one")
        return Node(found[0])

    def inputs(self, node: Node) -> dict[str, Any]:
        """The node's inputs, to read or change."""
        inputs: dict[str, Any] = self[node.id]["inputs"]
        return inputs

    def upstream(self, node: Node) -> Graph:
        """A copy of the node and all that it depends on, under the same ids."""
        found, waiting = Graph(), [node.id]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found[name] = copy.deepcopy(self[name])
                waiting += [value[0] for value in self[name]["inputs"].values() if isinstance(value, list)]
        return found


@dataclass(frozen=True)
class Outputs:
    """What a finished run showed: ``outputs[node]`` is the node's ``ui`` dictionary, e.g. ``{"images": [...]}``."""

    ui: dict[str, dict[str, Any]]
    cached: frozenset[str]
    """Ids of the nodes that were not run because their output was kept from an earlier run."""

    def __getitem__(self, node: Node) -> dict[str, Any]:
        return self.ui[node.id]


class Client:
    """Talks to the ComfyUI server at ``address`` (host:port)."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.client_id = uuid.uuid4().hex
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def request(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> bytes:
        """GET ``path``, or POST it if there is a body: bytes as they are, anything else as JSON."""
        if body is not None and not isinstance(body, bytes):
            body, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"http://{self.address}{path}", body, headers or {})
        with self._open(asked, timeout=60) as reply:
            return bytes(reply.read())

    def get(self, path: str) -> Any:
        """The JSON at ``path``."""
        return json.loads(self.request(path))

    def run(self, graph: dict[str, dict[str, Any]], timeout: float = 600, on_event: Event | None = None) -> Outputs:
        """Queue a graph and wait for it. Raises InvalidGraphError, ExecutionError, InterruptedRunError or TimeoutError.

        ``on_event(type, data)`` is called with the server's messages as they come; a second of silence is ("tick", {}).
        """
        if on_event is None:
            return self.wait(self.submit(graph), timeout)
        return asyncio.run(self._run_live(graph, timeout, on_event))

    def submit(self, graph: dict[str, dict[str, Any]]) -> str:
        """Queue a graph and return the run's id at once."""
        try:
            reply = json.loads(self.request("/prompt", {"prompt": graph, "client_id": self.client_id}))
        except urllib.error.HTTPError as error:
            if error.code != 400:
                raise
            raise InvalidGraphError(_explain(json.loads(error.read()))) from None
        if reply["node_errors"]:  # the server runs the branches that are valid: here that is a mistake in the graph too
            self.request("/queue", {"delete": [reply["prompt_id"]]})
            self.interrupt(reply["prompt_id"])
            raise InvalidGraphError(_explain(reply))
        return str(reply["prompt_id"])

    def wait(self, run: str, timeout: float = 600) -> Outputs:
        """Wait for the run of that id; raises as :meth:`run` does. A run that takes too long is interrupted."""
        end, pause = time.monotonic() + timeout, 0.02
        while (outputs := self.finished(run)) is None:
            if time.monotonic() > end:
                self.interrupt(run)
                raise TimeoutError(f"run {run} took longer than {timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        return outputs

    def finished(self, run: str) -> Outputs | None:
        """The outputs of a run, or None if it has not ended; raises as :meth:`run` does."""
        history = self.get(f"/history/{run}")
        if run not in history:
            return None
        messages = dict(history[run]["status"]["messages"])
        if "execution_error" in messages:
            raise ExecutionError(messages["execution_error"])
        if "execution_interrupted" in messages:
            node = messages["execution_interrupted"]["node_id"]
            raise InterruptedRunError(f"run {run} was interrupted in node {node}")
        return Outputs(history[run]["outputs"], frozenset(messages["execution_cached"]["nodes"]))

    async def _run_live(self, graph: dict[str, dict[str, Any]], timeout: float, on_event: Event) -> Outputs:
        import aiohttp

        url = f"http://{self.address}/ws?clientId={self.client_id}"
        async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=0) as socket:
            run, end = self.submit(graph), time.monotonic() + timeout
            while True:
                if time.monotonic() > end:
                    self.interrupt(run)
                    raise TimeoutError(f"run {run} took longer than {timeout:g} s")
                try:
                    message = await socket.receive(timeout=1)
                except asyncio.TimeoutError:
                    on_event("tick", {})
                    if (outputs := self.finished(run)) is not None:  # its last messages were for another page
                        return outputs
                    continue
                if message.type != aiohttp.WSMsgType.TEXT:
                    continue
                event = message.json()
                on_event(event["type"], event["data"])
                if event["type"] == "executing" and event["data"]["node"] is None and event["data"]["prompt_id"] == run:
                    outputs = self.finished(run)
                    assert outputs is not None, "it is in the history before it is said to have ended"
                    return outputs

    def interrupt(self, run: str | None = None) -> None:
        """Interrupt the run of that id, or whatever is running."""
        self.request("/interrupt", {"prompt_id": run} if run else {})

    def free(self) -> None:
        """Unload every model and forget every cached output, so that the next run computes everything anew."""
        self.request("/free", {"unload_models": True, "free_memory": True})
        time.sleep(0.5)  # the server answers before its worker, now idle, has done it

    def object_info(self) -> dict[str, Any]:
        """Node id -> its inputs, outputs and texts, of every node the server knows."""
        info: dict[str, Any] = self.get("/object_info")
        return info

    def files(self, node: str, name: str) -> list[str]:
        """The choices of a node's file list, e.g. ``files("LoraLoaderModelOnly", "lora_name")``."""
        choices = self.get(f"/object_info/{node}")[node]["input"]["required"][name]
        return list(choices[1]["options"] if choices[0] == "COMBO" else choices[0])

    def view(self, image: dict[str, str]) -> bytes:
        """The bytes of a file that a node showed: an entry of ``outputs[node]["images"]``."""
        return self.request("/view?" + urlencode(image))

    def images(self, shown: dict[str, Any]) -> np.ndarray:
        """The pictures that a node showed (``outputs[node]``), (N, H, W, 3) uint8; all of one size."""
        import numpy as np
        from PIL import Image

        return np.stack([np.asarray(Image.open(io.BytesIO(self.view(one))).convert("RGB")) for one in shown["images"]])

    def upload(self, path: Path) -> str:
        """Put a picture into the server's input folder; returns the name that LoadImage knows it by."""
        edge = uuid.uuid4().hex
        head = f'--{edge}\r\nContent-Disposition: form-data; name="image"; filename="{path.name}"\r\n\r\n'
        body = head.encode() + path.read_bytes() + f"\r\n--{edge}--\r\n".encode()
        reply = self.request("/upload/image", body, {"Content-Type": f"multipart/form-data; boundary={edge}"})
        return str(json.loads(reply)["name"])


def _explain(reply: dict[str, Any]) -> str:
    """The server's account of an invalid graph, a line for each fault."""
    error = reply.get("error") or {}
    lines = [f"{error.get('message', 'part of the graph is invalid')} {error.get('details', '')}".strip()]
    for node, faults in reply["node_errors"].items():
        place = f"node {node} ({faults['class_type']})"
        lines += [f"{place}: {fault['message']}: {fault['details']}" for fault in faults["errors"]]
    return "\n".join(lines)
