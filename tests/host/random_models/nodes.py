"""The nodes of the test pack; their ids start with ``Test``."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import comfy.cldm.cldm
import comfy.controlnet
import comfy.model_management
import comfy.ops
import comfy.samplers
import comfy.sd
import folder_paths
import nodes
import numpy as np
import torch
from comfy_api.latest import ComfyExtension, io
from torch import nn

from . import flow, gguf_layers
from .models import MODELS, TOKENS, build, conditioning, fill
from .patches import TestMovingGuider, TestPatch

Anything = io.Custom("*")


def schema(node: type, inputs: list[Any], outputs: list[Any]) -> io.Schema:
    """The schema of a test node: its id is its class's name; every one shows what it found in its ``ui``."""
    return io.Schema(node_id=node.__name__, category="test", inputs=inputs, outputs=outputs, is_output_node=True)


class TestRandomModel(io.ComfyNode):
    """A family's reduced model with random weights, and all that a sampling of it needs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            io.Combo.Input("architecture", options=list(MODELS)),
            io.Int.Input("rows", default=1, tooltip="Prompts in the positive conditioning."),
            io.Int.Input("seed", default=0),
            io.Combo.Input(
                "dtype", options=["float32", "bfloat16", "float16", "float8_e4m3fn"], default="float32", optional=True
            ),
            io.Boolean.Input("full_size", default=False, optional=True),
        ]
        outputs = [io.Model.Output(), io.Conditioning.Output(), io.Conditioning.Output(), io.Latent.Output()]
        return schema(cls, inputs, outputs)

    @classmethod
    def execute(
        cls, architecture: str, rows: int, seed: int, dtype: str = "float32", full_size: bool = False
    ) -> io.NodeOutput:
        model = build(architecture, seed, getattr(torch, dtype), full_size=full_size)
        linear = [name for name, part in model.model.diffusion_model.named_modules() if isinstance(part, nn.Linear)]
        samples = torch.zeros(1, *MODELS[architecture].latent)
        return io.NodeOutput(
            model,
            conditioning(architecture, rows, seed + 1, full_size=full_size),
            conditioning(architecture, 1, seed + 2, full_size=full_size),
            {"samples": samples},
            ui={
                "linear": linear,
                "classes": [kind.__name__ for kind in type(model.model.model_config).__mro__],
                "model_type": [model.model.model_type.name],
            },
        )


class TestInspect(io.ComfyNode):
    """Shows a hash of all base weights and how many layers have a weight patch; ``after`` only sets the order."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Model.Input("model"), Anything.Input("after", optional=True)]
        return schema(cls, inputs, [io.Model.Output()])

    @classmethod
    def execute(cls, model: Any, after: Any = None) -> io.NodeOutput:
        digest = hashlib.sha256()
        weights = [*model.model.named_parameters(), *model.model.named_buffers()]
        for name, tensor in sorted(weights, key=lambda one: one[0]):
            digest.update(name.encode())
            for part in stored(tensor):
                digest.update(part.contiguous().cpu().flatten().view(torch.uint8).numpy())
        return io.NodeOutput(model, ui={"hash": [digest.hexdigest()], "patched": [len(model.patches)]})


def stored(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold this one: itself, or the parts of a quantized one."""
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
    return [getattr(tensor, name) for name in names] or [tensor]


class TestGGUF(io.ComfyNode):
    """The model of a GGUF file, in layers of :mod:`.gguf_layers`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(cls, [io.String.Input("unet_name"), io.String.Input("weight_dtype")], [io.Model.Output()])

    @classmethod
    def execute(cls, unet_name: str, weight_dtype: str) -> io.NodeOutput:
        return io.NodeOutput(gguf_layers.load(f"{folder_paths.models_dir}/diffusion_models/{unet_name}"))


class TestFewBits(io.ComfyNode):
    """UNETLoader on hardware that multiplies numbers of few bits, as core sees it when it loads a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.String.Input("unet_name"), io.String.Input("weight_dtype")]
        return schema(cls, inputs, [io.Model.Output()])

    @classmethod
    def execute(cls, unet_name: str, weight_dtype: str) -> io.NodeOutput:
        management = comfy.model_management
        asked = [f"supports_{form}_compute" for form in ("fp8", "nvfp4", "mxfp8")]
        before = {name: getattr(management, name) for name in asked if hasattr(management, name)}
        try:
            for name in before:
                setattr(management, name, lambda _device=None: True)
            return io.NodeOutput(nodes.UNETLoader().load_unet(unet_name, weight_dtype)[0])
        finally:
            for name, function in before.items():
                setattr(management, name, function)


class TestRewards(io.ComfyNode):
    """As many different rewards as asked for."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(cls, [io.Int.Input("count")], [io.Float.Output(is_output_list=True)])

    @classmethod
    def execute(cls, count: int) -> io.NodeOutput:
        return io.NodeOutput([float(7 * index % count) for index in range(count)])


class TestFloats(io.ComfyNode):
    """The numbers of a JSON list."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(cls, [io.String.Input("values")], [io.Float.Output(is_output_list=True)])

    @classmethod
    def execute(cls, values: str) -> io.NodeOutput:
        return io.NodeOutput([float(value) for value in json.loads(values)])


class TestLeaves(io.ComfyNode):
    """Shows all values of a TREE's leaves."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(cls, [io.Custom("TREE").Input("tree")], [])

    @classmethod
    def execute(cls, tree: Any) -> io.NodeOutput:
        return io.NodeOutput(ui={"values": tree.leaves.flatten().tolist()})


class TestValues(io.ComfyNode):
    """Shows all values of a latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(cls, [io.Latent.Input("latent")], [])

    @classmethod
    def execute(cls, latent: dict[str, Any]) -> io.NodeOutput:
        return io.NodeOutput(ui={"values": latent["samples"].flatten().tolist()})


class FilmVAE:
    """Decodes as core's VAE does for films: latents (N, C, F, H, W) to pictures (N, F, H, W, 3)."""

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return latents[:, :3].movedim(1, -1).sigmoid()


class TestFilmVAE(io.ComfyNode):
    """A :class:`FilmVAE`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(cls, [], [io.Vae.Output()])

    @classmethod
    def execute(cls) -> io.NodeOutput:
        return io.NodeOutput(FilmVAE())


class GreedyVAE:
    """Takes everything else off the device before it decodes, as a large VAE does on a small device."""

    def __init__(self, vae: Any) -> None:
        self.vae = vae

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        comfy.model_management.unload_all_models()
        return self.vae.decode(latents)


class TestGreedyVAE(io.ComfyNode):
    """A :class:`GreedyVAE` around a VAE."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(cls, [io.Vae.Input("vae")], [io.Vae.Output()])

    @classmethod
    def execute(cls, vae: Any) -> io.NodeOutput:
        return io.NodeOutput(GreedyVAE(vae))


class TestControlNet(io.ComfyNode):
    """A ControlNet with random weights that fits the reduced SD1.5."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(cls, [io.Int.Input("seed", default=0)], [io.ControlNet.Output()])

    @classmethod
    def execute(cls, seed: int) -> io.NodeOutput:
        config = {**MODELS["SD1.5"].unet_config, "num_heads": 8, "hint_channels": 3}
        for name in ("out_channels", "transformer_depth_output"):
            del config[name]
        module = comfy.cldm.cldm.ControlNet(**config, operations=comfy.ops.disable_weight_init, dtype=torch.float32)
        fill(module, seed)
        device = comfy.model_management.get_torch_device()
        return io.NodeOutput(comfy.controlnet.ControlNet(module, load_device=device))


class TestAttentionPatch(io.ComfyNode):
    """Changes cross-attention by tensors and a layer of its own, as packs for image prompts do."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(cls, [io.Model.Input("model")], [io.Model.Output()])

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        layer = nn.Linear(4, 1)
        fill(layer, 0)
        picture, mask = torch.linspace(-1, 1, 4), torch.linspace(0.5, 1.5, TOKENS)[:, None]
        strength = torch.tensor(0.5)

        def more(query: Any, key: Any, value: Any, _options: Any) -> tuple[Any, Any, Any]:
            return query * strength, key, value * mask + layer(picture)

        clone = model.clone()
        clone.set_model_attn2_patch(more)
        return io.NodeOutput(clone)


class SecondModelGuider(comfy.samplers.CFGGuider):
    """Holds a second model beside the first and wants both on the device for as long as it samples."""

    def outer_sample(self, *arguments: Any, **named: Any) -> Any:
        comfy.model_management.load_models_gpu([self.second])
        return super().outer_sample(*arguments, **named)

    def predict_noise(self, *arguments: Any, **named: Any) -> Any:
        if self.second not in comfy.model_management.loaded_models():
            raise RuntimeError("the second model was taken off the device amid a sampling")
        return super().predict_noise(*arguments, **named)


class TestSecondModelGuider(io.ComfyNode):
    """A :class:`SecondModelGuider`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Model.Input("model"), io.Model.Input("second"), io.Float.Input("cfg")]
        prompts = [io.Conditioning.Input("positive"), io.Conditioning.Input("negative")]
        return schema(cls, [*inputs, *prompts], [io.Guider.Output()])

    @classmethod
    def execute(cls, model: Any, second: Any, cfg: float, positive: Any, negative: Any) -> io.NodeOutput:
        guider = SecondModelGuider(model)
        guider.second = second
        guider.set_conds(positive, negative)
        guider.set_cfg(cfg)
        return io.NodeOutput(guider)


class TestMultiGPU(io.ComfyNode):
    """Attaches to a model what core's MultiGPU CFG Split does where there is a second device: a copy of it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(cls, [io.Model.Input("model")], [io.Model.Output()])

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        return io.NodeOutput(spread(model.clone()))


def spread(model: Any) -> Any:
    second = model.clone()
    second.is_multigpu_base_clone = True
    model.set_additional_models("multigpu", [second])
    return model


class TestMultiGPUTree(io.ComfyNode):
    """The same, to the model of a tree that has grown."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(cls, [io.Custom("TREE").Input("tree")], [io.Custom("TREE").Output()])

    @classmethod
    def execute(cls, tree: Any) -> io.NodeOutput:
        spread(tree.policy.guider.model_patcher)
        return io.NodeOutput(tree)


class TestLora(io.ComfyNode):
    """Core's own LoRA patches with random weights on every linear layer of the model's blocks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(cls, [io.Model.Input("model")], [io.Model.Output()])

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        generator, lora = torch.Generator().manual_seed(0), {}
        for name, part in model.model.named_modules():
            if isinstance(part, nn.Linear) and "blocks" in name:
                outputs, inputs = part.weight.shape
                lora[f"{name}.lora_A.weight"] = torch.randn(1, inputs, generator=generator) / inputs**0.5
                lora[f"{name}.lora_B.weight"] = torch.randn(outputs, 1, generator=generator) / 4
        patched, _clip = comfy.sd.load_lora_for_models(model, None, lora, 1.0, 0.0)
        return io.NodeOutput(patched)


class OneBuffer:
    """Copies a weight to where the one before it was, as a host that streams weights through a buffer does."""

    def __init__(self) -> None:
        self.memory = np.empty(0, np.uint8)

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        if self.memory.size < weight.nbytes:
            self.memory = np.empty(weight.nbytes, np.uint8)
        place = self.memory[: weight.nbytes]
        place[:] = weight.detach().contiguous().flatten().view(torch.uint8).numpy()  # behind autograd's back
        return torch.from_numpy(place).view(weight.dtype).view(weight.shape)


class TestStreamed(io.ComfyNode):
    """The model with this share of its layers streamed through one buffer, by core's own door for changed weights."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(cls, [io.Model.Input("model"), io.Float.Input("share")], [io.Model.Output()])

    @classmethod
    def execute(cls, model: Any, share: float) -> io.NodeOutput:
        clone, buffer = model.clone(), OneBuffer()
        layers = [name for name, part in clone.model.named_modules() if hasattr(part, "comfy_cast_weights")]
        layers = [name for name in layers if getattr(clone.model.get_submodule(name), "weight", None) is not None]
        for index, name in enumerate(layers):
            if (index + 1) * share % 1 < share:  # spread evenly
                clone.add_weight_wrapper(f"{name}.weight", buffer)
        return io.NodeOutput(clone)


class TestLateInPlace(io.ComfyNode):
    """A patch that changes a tensor in place, which a backward needs, below a noise level."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(cls, [io.Model.Input("model"), io.Float.Input("below")], [io.Model.Output()])

    @classmethod
    def execute(cls, model: Any, below: float) -> io.NodeOutput:
        def patch(arguments: dict[str, Any]) -> torch.Tensor:
            denoised = arguments["denoised"]
            square = denoised * denoised
            if float(arguments["sigma"].max()) < below:
                return (square + denoised).sub_(denoised.mul_(0.5)).sub_(square)  # denoised is part of the graph
            return square + denoised - denoised * 0.5 - square

        clone = model.clone()
        clone.set_model_sampler_post_cfg_function(patch)
        return io.NodeOutput(clone)


class Extension(ComfyExtension):
    """All nodes of the pack."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            TestRandomModel,
            TestInspect,
            TestFewBits,
            TestGGUF,
            TestRewards,
            TestFloats,
            TestLeaves,
            TestValues,
            TestFilmVAE,
            TestGreedyVAE,
            TestControlNet,
            TestAttentionPatch,
            TestSecondModelGuider,
            TestMultiGPU,
            TestMultiGPUTree,
            TestLora,
            TestStreamed,
            TestLateInPlace,
            TestPatch,
            TestMovingGuider,
            *flow.NODES,
        ]
