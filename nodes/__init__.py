"""The ComfyUI layer: the only place that imports ComfyUI."""

from comfy_api.latest import ComfyExtension, io

from . import host
from .advantage import TreeAdvantage
from .evaluate import Evaluate
from .export import Export
from .human import HumanReward
from .judging import add_routes
from .loop import LoopEnd, LoopStart, hold_outside
from .plan import Schedule, TreePlan
from .policy import Policy
from .preview import BestLeaf, Preview
from .prompts import Encode, Prompts
from .reward import RewardFromFloats, RewardModel, RewardScorer
from .sampling import TreeSampler
from .search import Search
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
    HumanReward,
    TreeAdvantage,
    LoRAUpdate,
    Evaluate,
    Preview,
    BestLeaf,
    Search,
    LoopStart,
    LoopEnd,
    Export,
]


class TreeGRPOExtension(ComfyExtension):
    """All nodes of the pack, the routes of those that ask in the browser, and what a loop needs to be told early."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        # Not in on_load, which ComfyUI 0.3.75 does not call.
        server = host.server()
        if server is not None:
            add_routes(server.routes)
            server.add_on_prompt_handler(hold_outside)
        return NODES
