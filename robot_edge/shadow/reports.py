"""Two reports of one shadow as one."""

from __future__ import annotations

from wire.messages.gateway import ShadowReport


def merged(before: ShadowReport, news: ShadowReport) -> ShadowReport:
    """Of what came of one version on one robot."""
    difference, faults = before.difference.plus(news.difference), before.faults + news.faults
    return ShadowReport(news.robot, news.number, difference, faults, news.fault or before.fault)
