"""The command for a GPU works on a CPU, with reduced models; the page says what has been measured, and no more."""

from __future__ import annotations

import json
import sys
import time

import pytest

from benchmarks import gpu, gpu_report, gpu_sections
from tools.host import ROOT

FIGURES = {"before", "peak", "held", "weights", "estimate", "grad_norm", "stages", "seconds"}


def run(monkeypatch, tmp_path, *arguments):
    """Exit status and results of the reduced form."""
    path = tmp_path / "gpu.json"
    monkeypatch.setattr(gpu, "REDUCED_RESULTS", path)
    monkeypatch.setattr(gpu, "LOG", tmp_path / "gpu.log")
    monkeypatch.setattr(sys, "argv", ["gpu", "--reduced", *arguments])
    return gpu.main(), json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.host
def test_the_reduced_form_measures_everything(monkeypatch, tmp_path):
    chosen = ["quickstart", "SD1.5 bf16", "out of memory", "SD3 fp8", "speed, SD1.5"]
    status, results = run(monkeypatch, tmp_path, "--only", *chosen)
    assert status == 0
    assert results["reduced"]
    assert results["machine"]["device"] == "cpu"
    sections = results["sections"]
    assert sections.keys() == set(chosen)
    assert all(section["seconds"] > 0 for section in sections.values())
    quickstart, *models, memory, speed = (
        sections[name]["figures"] for name in ("quickstart", "SD1.5 bf16", "SD3 fp8", "out of memory", "speed, SD1.5")
    )
    assert quickstart["updates"] == 2
    for found in models:
        assert found["full"].keys() == found["half"].keys() == FIGURES
        assert found["full"]["held"] == found["full"]["weights"] == found["half"]["weights"]
        assert 0.2 < found["half"]["held"] / found["half"]["weights"] < 0.5
        assert found["gradient"]["cosine"] > 0.999
        assert found["half"]["peak"] is None, "torch does not count the CPU's memory"
    assert memory["sizes"] == [1]
    assert memory["cosine"] > 0.999
    assert speed["ratio"] > 1
    page = gpu_report.page(results)
    assert "not counted here" in page and "became 1" in page


def test_a_section_that_fails_is_a_result_and_the_others_go_on(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "LOG", tmp_path / "gpu.log")

    class NoServer:
        log = staticmethod(lambda: "")
        get = staticmethod(lambda _: {"system": {}, "devices": [{"name": "none", "vram_total": 1}]})

        def __init__(self, **_):
            self.start = self.free = lambda: None
            self.__exit__ = lambda: None

    def broken(_):
        raise RuntimeError("no kernel image")

    def slow(_):
        raise TimeoutError

    sections = [
        gpu.Section("broken", 1, broken),
        gpu.Section("wrong", 1, lambda _: {"gradient": {"cosine": 0.18}}),
        gpu.Section("long", 1, slow),
        gpu.Section("right", 1, lambda _: {"gradient": {"cosine": 1.0}}),
    ]
    monkeypatch.setattr(gpu, "Server", NoServer)
    runner = gpu.Runner(tmp_path / "gpu.json", reduced=True, minutes=1)
    assert not runner.run(sections)
    results = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["sections"]
    assert results["broken"]["error"] == "RuntimeError: no kernel image"
    assert results["wrong"]["failures"] == ["the gradients' cosine is 0.1800, it should be above 0.999"]
    assert results["long"]["skipped"].startswith("time: cut off")
    assert "failures" not in results["right"]


@pytest.mark.host
def test_a_server_that_does_not_start_is_not_tried_again(monkeypatch, tmp_path):
    (tmp_path / "main.py").write_text("raise SystemExit('no torch here')")
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    status, results = run(monkeypatch, tmp_path)
    assert status == 1
    first, *others = results["sections"].values()
    assert "no torch here" in first["error"]
    assert len(others) == len(gpu.SECTIONS) - 1
    assert all(section == {"skipped": "no server, see above"} for section in others)
    assert "no torch here" in (tmp_path / "gpu.log").read_text()


def test_what_the_time_does_not_reach_is_skipped_by_name(monkeypatch, tmp_path):
    status, results = run(monkeypatch, tmp_path, "--minutes", "0.1")
    assert status == 0
    assert results["sections"].keys() == {section.name for section in gpu.SECTIONS}
    assert all("s were left, about" in section["skipped"] for section in results["sections"].values())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"full": {"peak": 14, "estimate": 10}}, "1.40 times the estimate"),
        ({"half": {"peak": 11, "estimate": 10}}, "no less memory"),
        ({"half": {"held": 7, "weights": 10}}, "half: the device holds 0.70"),
        ({"sizes": []}, "not halved"),
        ({"gradient": {"cosine": float("nan")}}, "cosine is nan"),
        ({"updates": 1, "exported": True}, "1 updates for 2"),
    ],
)
def test_figures_out_of_range_are_failures(change, said):
    right = {
        "full": {"peak": 11, "estimate": 10},
        "half": {"peak": 6, "estimate": 5},
        "gradient": {"cosine": 1.0},
        "sizes": [1],
        "updates": 2,
        "exported": True,
    }
    assert gpu_sections.failures(right) == []
    (failure,) = gpu_sections.failures(right | change)
    assert said in failure


def test_a_model_that_does_not_fit_is_named_with_its_size():
    class Small:
        get = staticmethod(lambda _: {"system": {"ram_free": 20e9}, "devices": [{"vram_total": 16e9}]})

    bench = gpu_sections.Bench(Small(), reduced=False, end=time.monotonic())
    assert bench.lacking(16e9, 1.0) == "the device has 16.0 GB, 17.6 GB are needed"
    assert bench.lacking(24e9, 0.5) == "main memory has 20.0 GB, 26.4 GB are needed"
    assert bench.lacking(12e9, 0.5) == ""


def test_page_and_readme_say_what_the_results_say():
    results = gpu_report.read()
    assert gpu_report.PAGE.read_text(encoding="utf-8") == gpu_report.page(results)
    assert results is None or not results["reduced"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for text in (readme, gpu_report.page(results)):
        assert (gpu_report.NOT_YET in text) == (results is None)


def test_the_sections_fit_into_the_time():
    assert sum(section.seconds for section in gpu.SECTIONS) <= 8 * 60
