"""``python -m benchmarks.gpu`` measures on a machine with one GPU and no network, in at most 8 minutes.

It needs an interpreter with torch, ComfyUI's requirements and this pack's own, and a ComfyUI: that of the tests, or
``--comfyui PATH``, its folder or an archive of it. It writes benchmarks/gpu.json and docs/gpu.md. On a machine without
an accelerator, or with ``--reduced``, everything runs on the CPU with reduced models in about a minute, to test this
program; its figures go to outputs/gpu.json and say nothing about a GPU. outputs/gpu.log has what the servers said.

All is measured in one real server, through the nodes of a user's graph, on core's own model classes at random weights.
Every section's result is written when it is there, an error is a result too, and what the time does not reach is named.
The exit status is 0 only if nothing failed.

Seconds per section, the important ones first. They are an ESTIMATE, made of arithmetic before any run: 12 GB/s to a GPU
from pinned memory, 6 from other memory, 3 into memory that is touched for the first time, 300 TFLOP/s in bf16 for large
matrices; pictures of 512 x 512. A forward then takes 0.8 TFLOP in SD1.5, 1.6 in SDXL, 2.1 in SD3 (SD3.5 medium), 17.7
in Flux. An update is 9 forwards without gradient in 5 calls, and 3 with gradient in 2 calls.

=========================  =======  ====================================================================================
section                    seconds  what takes the time
=========================  =======  ====================================================================================
quickstart                      40  start of the server 20, first kernels 10, 2 updates of the included model 4
SD1.5 bf16                      25  1.7 GB built and moved four times 3, first kernels of this size 10, 2 updates 2
out of memory                   20  built again 3, 2 updates 4
Flux bf16                       90  24 GB built 10, loaded 4, unloaded 8, half of it loaded and pinned 6, copied 4; 2
                                    updates 4, of which one streams 12 GB through 11 calls: 11 to 22
speed, SD1.5                    45  2 times 756 + 215 forwards at a fifth of the rate 26, and calls of small kernels
SDXL bf16                       40  5 GB built and moved four times 8, first kernels 10, 2 updates 2
Flux fp8                        60  half of the bytes of Flux bf16
SD3 bf16                        35  as SDXL bf16
SD1.5 fp8, SDXL fp8, SD3 fp8    70  as in bf16, half of the bytes
speed, SDXL                     50  as of SD1.5, twice the work at twice the rate
=========================  =======  ====================================================================================
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from tools.host import ROOT, Server, folder_of

from . import gpu_report
from .gpu_sections import Bench, Figures, failures, model, out_of_memory, quickstart, speed

REDUCED_RESULTS = ROOT / "outputs" / "gpu.json"
LOG = ROOT / "outputs" / "gpu.log"
"""What the servers said."""
PACKS = (ROOT / "tests" / "host" / "random_models", ROOT / "benchmarks" / "gpu_nodes")
LAST_SECONDS = 10
"""Less than this is left for no section."""


@dataclass(frozen=True)
class Section:
    """What is measured at a time; ``seconds`` is an estimate."""

    name: str
    seconds: int
    work: Callable[[Bench], Figures]


SECTIONS = (
    Section("quickstart", 40, quickstart),
    Section("SD1.5 bf16", 25, model("SD1.5", "bfloat16")),
    Section("out of memory", 20, out_of_memory),
    Section("Flux bf16", 90, model("Flux", "bfloat16")),
    Section("speed, SD1.5", 45, speed("SD1.5")),
    Section("SDXL bf16", 40, model("SDXL", "bfloat16")),
    Section("Flux fp8", 60, model("Flux", "float8_e4m3fn")),
    Section("SD3 bf16", 35, model("SD3", "bfloat16")),
    Section("SD1.5 fp8", 15, model("SD1.5", "float8_e4m3fn")),
    Section("SDXL fp8", 30, model("SDXL", "float8_e4m3fn")),
    Section("SD3 fp8", 25, model("SD3", "float8_e4m3fn")),
    Section("speed, SDXL", 50, speed("SDXL")),
)


class Runner:
    """Runs sections one after another in a server that is replaced when one fails, and writes down every result."""

    def __init__(self, path: Path, reduced: bool, minutes: float) -> None:
        self.path, self.reduced, self.end = path, reduced, time.monotonic() + 60 * minutes
        self.comfy: Server | None = None
        self.broken = False
        """Whether a server did not start, which another would not either."""
        self.results: dict[str, Any] = {"reduced": reduced, "machine": machine(), "sections": {}}

    def left(self) -> float:
        return self.end - time.monotonic()

    def run(self, sections: Sequence[Section]) -> bool:
        """Whether nothing failed."""
        try:
            for section in sections:
                start = time.monotonic()
                result = self._result(section)
                seconds = {} if "skipped" in result else {"seconds": round(time.monotonic() - start, 1)}
                self.results["sections"][section.name] = {**seconds, **result}
                self.write()
                print(f"{section.name}: {_said(result)}, {time.monotonic() - start:.0f} s", flush=True)
        finally:
            self._stop()
        return not any({"error", "failures"} & result.keys() for result in self.results["sections"].values())

    def _result(self, section: Section) -> dict[str, Any]:
        left, needed = self.left(), LAST_SECONDS if self.reduced else section.seconds
        if left < needed:
            return {"skipped": f"time: {max(0.0, left):.0f} s were left, about {needed} are needed"}
        if self.broken:
            return {"skipped": "no server, see above"}
        try:
            figures = section.work(Bench(self._server(), self.reduced, self.end))
        except TimeoutError:
            self._stop()
            return {"skipped": f"time: cut off after the {left:.0f} s that were left"}
        except Exception as error:
            traceback.print_exc()
            self._stop()
            return {"error": _cut(f"{type(error).__name__}: {error}")}
        assert self.comfy
        self.comfy.free()
        wrong = failures(figures)
        return {"figures": figures, **({"failures": wrong} if wrong else {})}

    def _server(self) -> Server:
        if self.comfy is None:
            comfy = Server(others=PACKS, arguments=["--cpu"] if self.reduced else [])
            self.comfy, self.broken = comfy, True
            comfy.start()
            self.broken = False
            stats = comfy.get("/system_stats")
            device = stats["devices"][0]
            self.results["machine"] |= {
                "ComfyUI": stats["system"].get("comfyui_version", "unknown"),
                "device": device["name"],
                "device memory": f"{device['vram_total'] / 1e9:.1f} GB",
            }
        return self.comfy

    def _stop(self) -> None:
        if self.comfy is not None:
            LOG.parent.mkdir(exist_ok=True)
            with LOG.open("a", encoding="utf-8") as log:
                log.write(self.comfy.log())
            self.comfy.__exit__()
            self.comfy = None

    def write(self) -> None:
        """Replace the file of results, and of a GPU's the page too."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        if not self.reduced:
            gpu_report.write(self.results)


def _said(result: dict[str, Any]) -> str:
    if "failures" in result:
        return "FAILED: " + "; ".join(result["failures"])
    return next((f"{key}: {result[key]}" for key in ("skipped", "error") if key in result), "done")


def _cut(text: str, length: int = 1000) -> str:
    """Beginning and end of a long text."""
    return text if len(text) <= 2 * length else f"{text[:length]}\n...\n{text[-length:]}"


def machine() -> dict[str, str]:
    """What the figures depend on, but for what the server knows."""
    import torch

    return {"date": date.today().isoformat(), "torch": torch.__version__, "python": platform.python_version()}


def has_accelerator() -> bool:
    """Whether torch computes on something else than the CPU here."""
    import torch

    return torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available()


def main() -> int:
    """Measure and write; 0 if nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="reduced models on the CPU, to test this program")
    parser.add_argument("--minutes", type=float, default=8.0, help="what this time does not reach is left out, by name")
    parser.add_argument("--comfyui", type=Path, metavar="PATH", help="a ComfyUI's folder, or an archive of it")
    parser.add_argument("--only", nargs="+", choices=[one.name for one in SECTIONS], metavar="NAME", help="sections")
    args = parser.parse_args()
    LOG.unlink(missing_ok=True)
    reduced = args.reduced or not has_accelerator()
    sections = [one for one in SECTIONS if not args.only or one.name in args.only]
    if args.comfyui:
        os.environ["COMFYUI_PATH"] = str(folder_of(args.comfyui.resolve()))
    path = REDUCED_RESULTS if reduced else gpu_report.RESULTS
    if reduced:
        print(f"reduced models on the CPU; the results say nothing about a GPU and go to {path}", flush=True)
    return 0 if Runner(path, reduced, args.minutes).run(sections) else 1


if __name__ == "__main__":
    sys.exit(main())
