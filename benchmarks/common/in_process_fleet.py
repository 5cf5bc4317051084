"""The whole loop in one thread and in simulated time: the real robots, lines, gateway, buffer and trainer, no sockets.

Made for tests and for benchmarks that compare learners: the same seed gives the same run, however busy the machine is.
One control period of all robots is one `turn`; the trainer takes its steps in a fixed ratio to it.
"""

from __future__ import annotations

from pathlib import Path

from fleet.config.data_directory import DataDirectory
from fleet.config.recipe import Recipe
from fleet.evaluation.demonstrations import demonstrate
from fleet.evaluation.evaluator import RolloutResult, rollout
from fleet.launch import factories, learning
from policies.interface.capabilities import Explores
from robot_edge.control.loop import ControlLoop
from robot_edge.inference.server import Inference
from robot_edge.runtime.process_group import control_hello
from robot_edge.uplink.server import Uplink
from wire.clock import Clock, ManualClock, SimulatedClock
from wire.transport.memory_channel import MemoryServer, memory_pair

_DRAIN_ROUNDS = 2000


class RehearsedRobot:
    """Control, inference and uplink of one robot, turned by hand."""

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        data: DataDirectory,
        server: MemoryServer,
        clock: Clock,
        seed: int,
        *,
        operated: bool,
    ) -> None:
        control_up, uplink_control = memory_pair()
        control_inference, inference_control = memory_pair()
        uplink_inference, inference_uplink = memory_pair()
        self.loop: ControlLoop = factories.make_control(
            recipe, name, control_up, control_inference, clock, operated=operated, paced=False
        )
        line = server.connect(name)
        self.uplink = Uplink(name, data.edge(name), line, uplink_control, uplink_inference, clock)
        policy = recipe.make_policy(recipe.spec, seed)
        self.inference = Inference(name, policy, inference_control, inference_uplink, clock, config=recipe.slow)
        self.loop.robot.connect()
        self.inference.hello()
        control_up.send(control_hello(self.loop, recipe.tasks))

    def turn(self) -> None:
        self.loop.tick()
        self.inference.poll()
        self.uplink.poll()

    def finish(self) -> None:
        """End the running episode; what is recorded still has to be drained."""
        self.loop.close()
        self.uplink.poll()
        self.uplink.control_gone()


class InProcessFleet:
    """Robots, gateway and trainer on one data directory."""

    def __init__(
        self,
        root: Path,
        recipe: Recipe,
        robots: int = 2,
        seed: int = 0,
        *,
        operated: bool = True,
        first_demonstration_seed: int = 0,
        max_steps: int = 0,
    ) -> None:
        self.recipe = recipe
        self.data = DataDirectory(root)
        self.server = MemoryServer()
        self.clock = ManualClock()
        self.gateway, self.view, self.ledger, self.sealer = factories.make_gateway(
            recipe, self.data, self.server, self.clock
        )
        self._demonstrations = 0
        self._first_demonstration_seed = first_demonstration_seed
        self.demonstrate(recipe.demonstrations * len(recipe.tasks))
        line = self.server.connect("trainer")
        self.trainer = learning.make_trainer(recipe, "trainer", self.data, line, seed, max_steps, self.clock)
        self.robots = [
            RehearsedRobot(recipe, f"robot-{n}", self.data, self.server, self.clock, 1000 * seed + n, operated=operated)
            for n in range(robots)
        ]

    def demonstrate(self, episodes: int) -> None:
        """Add so many demonstrations, the tasks in turn."""
        name = "demonstrator"
        first_seed = self._first_demonstration_seed + self._demonstrations
        self._demonstrations += episodes
        gateway = self.server.connect(name)
        demonstrate(self.recipe, name, self.data.edge(name), gateway, episodes, first_seed, self.gateway.poll)

    def turn(self, rounds: int, gradient_steps_per_round: float = 0.2) -> None:
        """`rounds` control periods of every robot, and the trainer's share of gradient steps."""
        owed = 0.0
        for _ in range(rounds):
            for robot in self.robots:
                robot.turn()
            if not self.robots:
                self.clock.advance(self.recipe.spec.period_ns)
            self.gateway.poll()
            owed += gradient_steps_per_round
            while owed >= 1.0:
                owed -= 1.0
                self.trainer.step()

    def drain(self) -> None:
        """Robots stop and everything they recorded arrives."""
        for robot in self.robots:
            robot.finish()
        for _ in range(_DRAIN_ROUNDS):
            if all(robot.uplink.drained for robot in self.robots):
                return
            for robot in self.robots:
                robot.uplink.poll()
            self.gateway.poll()
        raise AssertionError("the spools did not drain")

    def close(self) -> None:
        for robot in self.robots:
            robot.uplink.close()
        self.trainer.close()
        self.ledger.close()


def success(recipe: Recipe, weights: bytes, episodes: int, first_seed: int, seed: int = 0) -> dict[str, float]:
    """Held-out success of `weights` by task, over `episodes` seeds each."""
    found = rollouts(recipe, weights, episodes, first_seed, seed)
    return {task: sum(one.success for one in every) / episodes for task, every in found.items()}


def rollouts(
    recipe: Recipe, weights: bytes, episodes: int, first_seed: int, seed: int = 0
) -> dict[str, list[RolloutResult]]:
    """What comes of `weights` by task, in `episodes` scenes each."""
    policy = recipe.make_policy(recipe.spec, seed)
    policy.load(weights, 1)
    if isinstance(policy, Explores):
        policy.stop_exploring()
    clock = SimulatedClock()
    robot = factories.make_robot(recipe.robot, recipe.unpaced_config, clock)
    robot.connect()
    config = recipe.evaluator
    scheduler = factories.scheduler_factory(recipe)(policy.trained)
    conditions = factories.make_conditions(recipe, clock, seed)
    try:
        return {
            task: [
                rollout(robot, policy, scheduler, task, first_seed + n, config.max_ticks, conditions)
                for n in range(episodes)
            ]
            for task in recipe.tasks
        }
    finally:
        robot.close()
