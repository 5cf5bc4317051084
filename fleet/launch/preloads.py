"""What the processes of a fleet have in common and may import once, by what they do."""

from __future__ import annotations

from fleet.config.recipe import Recipe
from robot_edge.runtime.forking import has_gpu
from wire.types import Role

_GATEWAY = (
    "fleet.cli.__main__",
    "fleet.launch.builders",
    "cloud_learner.gateway.server",
    "cloud_learner.gateway.ingest",
    "cloud_learner.gateway.weight_store",
    "cloud_learner.operator.app",
    "cloud_learner.operator.view",
    "cloud_learner.buffer.location",
    "cloud_learner.buffer.maintenance.maintenance",
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
)
_EDGE = ("fleet.cli.__main__", "fleet.launch.robot_builders", "fleet.evaluation.demonstrations", "cv2")
_SIMULATORS = {
    "metaworld": (
        "hal.drivers.metaworld.simulation:import_simulator",
        "hal.drivers.metaworld.render",
        "hal.drivers.metaworld.expert",
        "metaworld.policies",
    )
}
_POLICY = ("torch", "policies.flow.policy", "robot_edge.inference.server", "robot_edge.inference.latent_server")
_LEROBOT = ("policies.lerobot.policy", "lerobot.policies.factory", "policies.lerobot.checkpoint")
_TRAINER = (
    "cloud_learner.training.trainer",
    "cloud_learner.buffer.loading.dataset",
    "cloud_learner.buffer.store.store",
    # an optimizer imports it when it is made
    "torch._dynamo",
)
_THINKING = (Role.trainer, Role.evaluator, Role.thinker)
"""roles that run the policy in their own process"""


def by_role(recipe: Recipe, policy: str) -> dict[Role, tuple[str, ...]]:
    """What each role of a part needs before it begins, most urgent roles first.

    `policy`: KIND:NAME of another one than the recipe's. Where there is a GPU nothing shared may touch it: roles that
    run the policy are left out.
    """
    robot = (*_EDGE, *_SIMULATORS.get(recipe.robot, ()))
    lerobot = _LEROBOT if recipe.tiny or policy.startswith("lerobot:") else ()
    needs = {Role.gateway: _GATEWAY, Role.demonstrator: robot}
    if has_gpu():
        return {**needs, Role.edge: robot}
    thinking = (*robot, *_POLICY, *lerobot)
    return {**needs, Role.edge: thinking, **dict.fromkeys(_THINKING, (*thinking, *_TRAINER))}
