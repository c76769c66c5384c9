"""A run knows its base model again: in every ComfyUI, whatever that calls the parameters and however it holds them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.host import ROOT

FINGERPRINTS = {
    "SD1.5": "2-b1dfec33f72441d844896ac1a2928e00",
    "SD2": "2-adfa379a1d04099841a4b12d82bfc70e",
    "SDXL": "2-4662aed7a4b930e42baaf917ff69e29e",
    "SD3": "2-dd43b75fe524fa36908284231324113f",
    "Flux": "2-c0bef85c54e44bd5cefdee69dad71640",
    "Flux 2": "2-cf2193883fec898f92772988357700be",
    "Qwen-Image": "2-3027fb800b32d5016163a2dd177f93ca",
    "Z-Image": "2-ecc1b1d3c562801ae9293d61d5872354",
    "Lumina 2": "2-ac4012fac740809bb339185088fbb010",
    "Wan": "2-845e0f1b82e71b1fb8af7d96ac7ced5c",
}
"""Of the models in probe_fingerprint.py: the same in every host, or runs made in one do not open in another."""
EARLIER = {
    "SD3": ["19e47c946af69c59f6c5d94eedb963d1"],
    "Flux": ["3c815659f8c9b000a3c13948a5e17357", "3b0b10c8a9ff9b757064c9f8e62dab6c"],
    "Flux 2": ["905d363983d9877cdfbbeed6df3f827a", "f00b122f0391cfa3919f401d21e5f525"],
    "Z-Image": ["d864b5103c2ac0a9c2f5edbd5d5cd7fa", "5806915a5aa3a78a21a318e65d3504a0"],
    "Lumina 2": ["d6fa4244960d1d834785a898c9181772", "b94076cf6b07bed09bcf3a77baf10a24"],
}
"""What version 0.1.0 made of the same models in ComfyUI 0.3.75 and in 0.33."""
QUANTIZED = {
    "scaled_fp8": "2-0b96296cc3d5c678ca3c7f238f7798a6",
    "float8_e4m3fn": "2-135523981274f4b8265cb1eafeda36b6",
    "int8_tensorwise": "2-9fb9f3d61522cbb86aa3b051611e5a3c",
}


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """What probe_fingerprint.py prints."""
    command = [sys.executable, Path(__file__).with_name("probe_fingerprint.py"), tmp_path_factory.mktemp("output")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_model_has_the_same_fingerprint_in_every_host(probed):
    assert probed["families"] == FINGERPRINTS
    assert probed["half"] == FINGERPRINTS["Flux"], "its values are exact in bf16 too"


def test_the_order_of_parameters_and_a_weight_that_nothing_reads_do_not_count(probed):
    assert probed["reordered"] == FINGERPRINTS["Flux"]
    assert probed["unused"] == FINGERPRINTS["Z-Image"]


def test_other_weights_and_other_patches_have_other_fingerprints(probed):
    once, again, weaker, another = probed["lora"]
    assert once == again
    different = [
        FINGERPRINTS["SD3"],
        once,
        weaker,
        another,
        *(probed[f"one {what}"] for what in ("weight", "bias", "gain")),
    ]
    assert len({FINGERPRINTS["Flux"], *different}) == 1 + len(different)


def test_quantized_models_have_the_same_fingerprint_in_every_host_that_loads_them(probed):
    assert {"scaled_fp8", "float8_e4m3fn"} <= probed["quantized"].keys()
    assert probed["quantized"] == {form: QUANTIZED[form] for form in probed["quantized"]}


def test_what_version_0_1_0_called_a_model_in_any_host_is_known(probed):
    for family, names in EARLIER.items():
        assert set(names) <= set(probed["earlier"][family]), family
    assert not FINGERPRINTS.keys() - probed["earlier"].keys()
    assert all(probed["quantized earlier"].values())


def test_a_run_of_version_0_1_0_goes_on_and_is_stored_anew_with_its_next_update(probed):
    stored, opened, saved, reopened = probed["run"]
    assert stored in EARLIER["Flux"]
    assert opened == stored, "opening alone writes nothing"
    assert saved == reopened == FINGERPRINTS["Flux"]
