"""The rollout controller in the gateway: who hears of which version, what of it is kept, what people see and say."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.dispatch.notes import Note, Notes
from cloud_learner.gateway.peers import KnownPeer
from cloud_learner.gateway.storage.weight_pruning import log_not_pruned
from cloud_learner.gateway.storage.weight_store import WeightStore
from cloud_learner.gateway.versions.evaluators import Evaluators
from cloud_learner.gateway.versions.mismatches import VersionMismatches
from cloud_learner.gateway.versions.open_episodes import OpenEpisodes
from cloud_learner.operator.version_statuses import version_statuses
from cloud_learner.operator.view import FleetView
from cloud_learner.rollout.config import RolloutConfig
from cloud_learner.rollout.controller import RolloutController
from cloud_learner.rollout.records import DecisionKind, ShadowTally, VersionRecord, VersionState, decode_state
from cloud_learner.rollout.retention import removable
from wire.clock import Clock
from wire.errors import RejectedError, StorageError
from wire.messages import Message
from wire.messages.fleet import ChangeVersions, Response, VersionAction, VersionStatus
from wire.messages.gateway import EdgeStatus, Evaluation, Segment, ShadowReport, ThinkVersions
from wire.task_thread import Task, TaskQueue
from wire.types import EpisodeSource, Mode, PolicyVersion, Role

log = logging.getLogger(__name__)

_AWAY_NS = 600_000_000_000
"""a robot that says nothing for so long tries nothing; nor does one that is not back so long after a restart"""
_MOST_FAULTS, _FAULT_CHARS = 10_000, 300
"""of one report"""
_MAY_ACT = VersionState.canary, VersionState.promoted
_THOUGHT_WITH = 16
"""versions that a think server is told of at most"""


class RolloutService:
    """For the gateway's loop; what touches files is a task."""

    send: Callable[[str, Message], object]
    """set before the first call"""
    announce: Callable[[str, int | None], None]
    """tell a peer of a version; as well"""
    request_shadow: Callable[[str, int], None]
    """have a robot compute a version without acting by it, 0: none; as well"""
    pinned_version: Callable[[str], int]
    """the version that a robot is to keep for its job, 0: none; as well"""

    def __init__(
        self,
        config: RolloutConfig,
        ledger: Ledger,
        weights: WeightStore,
        tasks: TaskQueue,
        notes: Notes,
        view: FleetView,
        peers: Mapping[str, KnownPeer],
        clock: Clock,
    ) -> None:
        """Go on from what the ledger keeps. Raises `StorageError`."""
        self._ledger, self._weights, self._tasks, self._notes = ledger, weights, tasks, notes
        self._view, self._peers, self._clock = view, peers, clock
        self._episodes = OpenEpisodes()
        self._told: dict[str, int] = {}
        """what each robot was told to run last"""
        self._told_thinkers: dict[str, tuple[int, ...]] = {}
        self._told_shadow: dict[str, int] = {}
        self._compared = False
        """a shadow was reported of since that was kept"""
        self._withdrawn: list[int] = []
        """versions that robots do not act by unless a person pins one"""
        self._mismatches = VersionMismatches()
        self._acting: dict[str, int] = {}
        self.controller = RolloutController(config, decode_state(ledger.kept_rollout()))
        self.evaluators = Evaluators(self.controller, peers, clock)
        versions, known = [row.version for row in ledger.versions()], max(self._records(), default=0)
        # Nothing is kept: robots run the newest.
        for version in versions if known else reversed(versions):
            if version.number > known:
                # committed by a gateway that was killed before it decided
                self.controller.on_version(version.number, version.parent, clock.now_ns())
        records = self._records()
        self._versions = {one.number: one for one in versions if one.number in records}
        self._find_deleted()
        self._robots = self._expected = self.controller.state().shapes
        """robots that there were before a restart, by shape: they act by what they were told"""
        self._expected_until_ns = clock.now_ns() + _AWAY_NS
        self._stays: frozenset[int] = frozenset()
        """versions whose files may not go"""
        self._promoted: list[int] = []
        self._kept = ""
        """what the ledger is to keep"""
        self.controller.pop_decisions()
        self._view.update_versions(self.statuses())

    def version_for(self, peer: str, role: str) -> int:
        """What `peer` is to have, 0 when there is nothing. Who measures or thinks has the newest there is."""
        controller = self.controller
        if role == Role.edge:
            number = controller.version_for(peer)
            # It goes back before it tries the next one, which it may take long to fetch.
            must_go_back = number == controller.canary and self._acting.get(peer) in self._withdrawn
            return controller.current if must_go_back else number
        if role != Role.evaluator:
            return controller.current
        return self.evaluators.wanted_of(peer) or max((controller.current, controller.canary, *self._candidates()))

    def withdrawn(self, before: int) -> tuple[int, ...]:
        """Versions older than that one which no robot is to begin to act by."""
        return tuple(number for number in self._withdrawn if number < before)

    def on_version(self, version: PolicyVersion) -> None:
        """It is here, and passed the gate."""
        self._versions[version.number] = version
        self.controller.on_version(version.number, version.parent, self._clock.now_ns())
        kept = self._records()
        self._versions = {number: one for number, one in self._versions.items() if number in kept}
        self._apply()
        for name in self.evaluators.present():
            self.announce(name, None)
        self.prune()

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """A version was measured."""
        if self.evaluators.on_evaluation(evaluation):
            self._apply()
            self.evaluators.poll()

    def on_activation(self, robot: str, number: int) -> None:
        """A robot runs it."""
        self._acting[robot] = number

    def on_status(self, status: EdgeStatus) -> None:
        """Whether somebody stopped a robot in mid-episode, and whether it runs what it was told to."""
        if status.stop.stops and status.episode:
            self._episodes.stop(status.episode)
        robot, now_ns = status.robot, self._clock.now_ns()
        works = bool(status.episode) and status.mode in (Mode.policy, Mode.hold)
        if works and not self.pinned_version(robot) and self.controller.on_work(robot, now_ns):
            self._apply()
        self._acting[robot] = status.version
        wanted = self.pinned_version(robot) or self._told.get(robot, status.version)
        if self._mismatches.is_due(robot, status.version, wanted, now_ns):
            self.announce(robot, None)

    def on_shadow(self, report: ShadowReport) -> None:
        """A robot computes a version without acting by it, or cannot. Raises `InvalidDataError`."""
        robot, number = report.robot, report.number
        known = self._peers[robot]
        names = [one.name for one in known.spec.action] if known.spec is not None else []
        report.difference.require_valid(len(names))
        if number != self.controller.shadow or robot not in self.controller.shadow_robots():
            # It did not hear that this is over.
            self.request_shadow(robot, self.shadow_of(robot))
            return
        found = ShadowTally(
            report.difference,
            dict(zip(names, report.difference.largest, strict=False)),
            min(max(report.faults, 0), _MOST_FAULTS),
            {robot: report.fault[:_FAULT_CHARS]} if report.fault else {},
        )
        self.controller.on_shadow(robot, number, found)
        self._compared = True

    def on_segment(self, segment: Segment, human_steps: int) -> None:
        """A segment was stored, for the first time; `human_steps` of its episode, with the last one."""
        episode = segment.episode
        if episode.source != EpisodeSource.online:
            self.controller.on_other_work(episode.robot)
            return
        known = self._peers.get(episode.robot)
        offset_ns = known.offset_ns if known is not None and known.offset_ns is not None else 0
        if (found := self._episodes.add(segment, human_steps, offset_ns)) is not None:
            how = found.success, found.human_share, found.stopped, found.began_ns
            # robots of another shape have another task, whatever it is called
            task = f"{episode.spec_hash} {episode.task}"
            self.controller.on_episode(episode.robot, found.versions, task, *how, self._clock.now_ns())
            self._apply()

    def poll(self) -> None:
        """Do what people at the page want, and see which robots there are."""
        for change in self._view.pop_version_changes():
            try:
                self.change(*change)
            except RejectedError as error:
                self._view.reject_version_change(change, str(error))
            else:
                failed = partial(self._not_kept, partial(self._view.reject_version_change, change))
                self._tasks.submit(Task(self._write, failed=failed))
        self._tell_robots()
        if self.evaluators.poll():
            self._apply()
        if self._compared:
            self._compared = False
            self._view.update_versions(self.statuses())
            self._keep()

    def _tell_robots(self) -> None:
        now_ns = self._clock.now_ns()
        robots = {
            name: known.spec_hash
            for name, known in self._peers.items()
            if known.role == Role.edge and not known.rejected and now_ns - known.last_message_ns < _AWAY_NS
        }
        expected = self._expected if now_ns < self._expected_until_ns else {}
        taking_part = {**expected, **robots}
        self.controller.set_robots(taking_part, now_ns)
        self._withdrawn = [one.number for one in self.controller.versions() if one.state not in _MAY_ACT]
        self._tell([name for name in robots if self._peers[name].welcomed])
        if taking_part != self._robots:
            self._robots = taking_part
            self._keep()

    # --- people -----------------------------------------------------------------------------------------------------

    def handle_call(self, who: str, call: ChangeVersions, answer: Callable[[Response], object]) -> None:
        """List versions, or do what a person wants with them."""
        try:
            self.change(who, call.action, call.number, call.robot, call.robots)
        except RejectedError as error:
            answer(Response(call.call, refused=str(error)))
            return

        def found(statuses: tuple[VersionStatus, ...]) -> None:
            answer(Response(call.call, versions=statuses))

        statuses, is_change = self.statuses(), call.action != VersionAction.list

        def run() -> tuple[VersionStatus, ...]:
            if is_change:
                self._write()
            return self._with_sizes(statuses)

        failed = partial(self._not_kept, lambda text: answer(Response(call.call, refused=text)), is_change=is_change)
        self._tasks.submit(Task(run, found, failed))

    def _write(self) -> None:
        """What a person decided is kept before it is said to be done."""
        self._ledger.keep_rollout(self._kept)

    def _not_kept(self, say: Callable[[str], object], error: Exception, *, is_change: bool = True) -> None:
        if not isinstance(error, StorageError):
            raise error
        done = "done, but not kept: a gateway that is started again before that is mended does not know of it: "
        say(f"{done if is_change else ''}{error}")

    def change(self, who: str, action: str, number: int, robot: str = "", robots: tuple[str, ...] = ()) -> None:
        """`robot`: to pin; `robots`: to compute a shadow. Raises `RejectedError`."""
        controller, now_ns = self.controller, self._clock.now_ns()
        if number and number not in self._versions:
            there = (
                f"there are {min(self._versions)} to {max(self._versions)}" if self._versions else "there is none yet"
            )
            raise RejectedError(f"there is no policy version {number}: {there}; `vla-fleet versions list` shows them.")
        match action:
            case VersionAction.list:
                return
            case VersionAction.promote:
                self._require_number(action, number)
                controller.promote(number, now_ns, who)
            case VersionAction.rollback:
                controller.rollback(now_ns, number, who)
            case VersionAction.pin:
                if number and robot and robot not in self._peers:
                    raise RejectedError(f"there is no robot '{robot}' here.")
                controller.pin(robot, number, now_ns)
                self._say(who, f"pinned to {number}" if number else "pinned no more", robot)
            case VersionAction.shadow:
                controller.set_shadow(number, robots or ((robot,) if robot else ()))
                on = f"a shadow on {', '.join(sorted(controller.shadow_robots())) or 'no robot yet'}"
                self._say(who, f"version {number} is {on}" if number else "no version is a shadow any more")
            case VersionAction.freeze | VersionAction.thaw:
                controller.freeze(action == VersionAction.freeze, now_ns)
                self._say(who, "versions are frozen" if controller.frozen else "versions are free")
            case _:
                raise RejectedError(f"versions can be {', '.join(VersionAction)}, not '{action[:40]}'.")
        self._apply()

    def statuses(self) -> tuple[VersionStatus, ...]:
        """The newest versions, and all that are needed, oldest first."""
        return version_statuses(self.controller, self._versions, self._acting)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _say(self, who: str, text: str, robot: str = "") -> None:
        self._view.add_event("rollout", f"{who}: {text}", robot)

    def _require_number(self, action: str, number: int) -> None:
        if not number:
            raise RejectedError(f"{action} needs the number of a version; `vla-fleet versions list` has them.")

    def _candidates(self) -> list[int]:
        records = self.controller.versions()
        return [one.number for one in records if one.state == VersionState.candidate and one.has_weights]

    def _records(self) -> dict[int, VersionRecord]:
        return {record.number: record for record in self.controller.versions()}

    def _apply(self) -> None:
        """Tell robots and people what has changed, and keep it."""
        for decision in self.controller.pop_decisions():
            text = f"version {decision.version}: {decision.kind.replace('_', ' ')}: {decision.reason}"
            log.info("%s", text)
            if self.controller.config.canary or decision.kind not in (DecisionKind.promoted, DecisionKind.reference):
                self._view.add_event("rollout", text)
                run = partial(self._ledger.add_event, self._clock.now_ns(), "", "rollout", text)
                self._notes.submit(Note(run, droppable=True))
        self._tell_robots()
        self._view.update_versions(self.statuses())
        self._keep()

    def _keep(self) -> None:
        self._note_needed()
        self._kept = msgspec.json.encode(self.controller.state()).decode()
        self._notes.submit(Note(partial(self._ledger.keep_rollout, self._kept), key="rollout"))

    def _note_needed(self) -> None:
        self._promoted = [one.number for one in self.controller.versions() if one.state == VersionState.promoted]
        pinned = {self.pinned_version(robot) for robot in (*self._peers, *self._expected)}
        self._stays = frozenset(self.controller.needed | pinned | set(self.controller.left_to_people))

    def _tell(self, robots: list[str]) -> None:
        for name in robots:
            number = self.version_for(name, Role.edge)
            if number and self._told.get(name) != number:
                self._told[name] = number
                self.announce(name, number)
            if self._told_shadow.get(name, 0) != (shadow := self.shadow_of(name)):
                self._told_shadow[name] = shadow
                self.request_shadow(name, shadow)
        thinkers = [name for name, known in self._peers.items() if known.role == Role.thinker and known.welcomed]
        wanted = self._acted_by() if thinkers else ()
        for name in thinkers:
            told = self._told_thinkers.get(name, ())
            if told == wanted:
                continue
            self._told_thinkers[name] = wanted
            self.send(name, ThinkVersions(wanted))
            for number in wanted:
                if number not in told:
                    self.announce(name, number)

    def shadow_of(self, robot: str) -> int:
        """The version that it is to compute without acting by it, 0: none."""
        return self.controller.shadow if robot in self.controller.shadow_robots() else 0

    def _acted_by(self) -> tuple[int, ...]:
        """All versions by which robots may act now, the one that most wait for first; the shadow last."""
        controller = self.controller
        first = [controller.current, controller.canary, controller.reference]
        others = {one for name in self._robots for one in (controller.version_for(name), self.pinned_version(name))}
        ordered = dict.fromkeys([*first, *sorted(others, reverse=True), controller.shadow])
        return tuple(number for number in ordered if number)[:_THOUGHT_WITH]

    def forget(self, peer: str) -> None:
        """It said hello, and is told again."""
        self._told.pop(peer, None)
        self._told_thinkers.pop(peer, None)
        self.evaluators.forget(peer)
        self._told_shadow.pop(peer, None)

    def _with_sizes(self, statuses: tuple[VersionStatus, ...]) -> tuple[VersionStatus, ...]:
        sizes = self._weights.sizes
        return tuple(msgspec.structs.replace(one, **sizes(one.version.number)._asdict()) for one in statuses)

    def prune(self, *, full: bool = False) -> None:
        """Delete the files of versions that nobody needs; on a full disk also those that are kept for people."""

        def pruned(gone: list[int]) -> None:
            if gone and self._weights.exchange is None:
                self.controller.on_weights_gone(gone, self._clock.now_ns())
                self._apply()

        self._note_needed()  # after a restart nothing else may have happened before the disk is found to be full
        config = self.controller.config
        keep, room_bytes = (1, 0.0) if full else (config.keep, config.room_bytes)

        def deletable(parents: Mapping[int, int]) -> list[int]:
            # in the thread that deletes them: what a person has just gone back to stays
            needed = self._stays | set(self._acting.copy().values())
            return removable(parents.keys(), parents, needed, self._promoted, keep)

        self._tasks.submit(Task(partial(self._weights.prune, deletable, room_bytes), pruned, log_not_pruned))

    def _find_deleted(self) -> None:
        """See which files there are: one that was deleted may have been restored."""
        if self._weights.exchange is not None:
            return  # they are fetched when they are needed
        here = [number for number in self._versions if self._weights.sizes(number).here]
        for number in here:
            self.controller.on_version(number, self._versions[number].parent, self._clock.now_ns())
        gone = [number for number in self._versions if number not in here]
        self.controller.on_weights_gone(gone, self._clock.now_ns())
