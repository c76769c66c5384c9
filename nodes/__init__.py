"""The ComfyUI layer: the only place that imports ComfyUI."""

from comfy_api.latest import ComfyExtension, io

from .advantage import TreeAdvantage
from .evaluate import Evaluate
from .export import Export
from .loop import LoopEnd, LoopStart
from .plan import Schedule, TreePlan
from .policy import Policy
from .preview import BestLeaf, Preview
from .prompts import Encode, Prompts
from .reward import RewardFromFloats, RewardModel, RewardScorer
from .sampling import TreeSampler
from .tiny_model import TinyModel
from .update import LoRAUpdate

NODES: list[type[io.ComfyNode]] = [
    TinyModel,
    Policy,
    Prompts,
    Encode,
    TreePlan,
    Schedule,
    TreeSampler,
    RewardModel,
    RewardScorer,
    RewardFromFloats,
    TreeAdvantage,
    LoRAUpdate,
    Evaluate,
    Preview,
    BestLeaf,
    LoopStart,
    LoopEnd,
    Export,
]


class TreeGRPOExtension(ComfyExtension):
    """All nodes of the pack."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES
