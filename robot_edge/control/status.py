"""What a control loop says of itself."""

from __future__ import annotations

import numpy as np

from robot_edge.control.command_inbox import CommandInbox
from robot_edge.control.config import EpisodeRules
from robot_edge.control.episodes.intervention import InterventionPart
from robot_edge.control.episodes.tracker import EpisodeTracker
from robot_edge.control.guarded_robot import GuardedRobot
from robot_edge.control.mode import Hold, Mode
from robot_edge.control.rate import Rate
from wire.messages.gateway import EdgeStatus


def edge_status(
    name: str,
    now_ns: int,
    tick: int,
    state: np.ndarray,
    decided: tuple[Mode, Hold],
    inbox: CommandInbox,
    tracker: EpisodeTracker,
    open_outcome: str,
    rules: EpisodeRules,
    driver: GuardedRobot,
    rate: Rate,
    takeovers: int,
    by_person: bool,
) -> EdgeStatus:
    """`state`: float32[ds], seen last; `takeovers`: of the scripted operator; `open_outcome`: of the newest episode,
    while a person may still say otherwise; `by_person`: one has the robot. What the uplink knows is left open.
    """
    (mode, hold), episode, job = decided, tracker.episode, inbox.job
    return EdgeStatus(
        robot=name,
        time_ns=now_ns,
        mode=mode.value,
        reason=hold.reason.value,
        detail=hold.detail,
        task=episode.task if episode else "",
        episode=episode.id if episode else "",
        tick=tick - tracker.first_tick,
        state=state,
        version=inbox.version,
        ticks=rate.ticks,
        missed_ticks=rate.missed,
        late_p99_s=rate.late_s(0.99),
        starved_ticks=tracker.starved,
        episodes=tracker.ended,
        interventions=takeovers + inbox.interventions,
        steps_recorded=0,
        spooled=0,
        job=job.id if job is not None else "",
        job_episodes=inbox.finished,
        fault=driver.fault.detail or driver.observation_fault.detail,
        stop=driver.stop_state,
        by_person=bool(rules.reset_by_person),
        open_outcome=open_outcome,
        part=_part(mode, tracker, by_person),
    )


def _part(mode: Mode, tracker: EpisodeTracker, by_person: bool) -> str:
    if not tracker.running or not (by_person or mode is Mode.script):
        return ""
    return tracker.intervention.part if by_person else InterventionPart.correction
