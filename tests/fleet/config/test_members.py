"""Jobs for robots of several shapes: members by name, and who may work in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fleet.config.data_directory import DataDirectory, RunIdentity
from fleet.config.overrides import Overrides
from fleet.config.process_options import EdgeOptions
from fleet.config.recipe import share_policy
from fleet.config.recipes import get_recipe
from fleet.config.weights_source import parse_source
from fleet.evaluation.held_out import HeldOutRunner, PolicyUnderTest
from fleet.launch.robot_builders import edge_processes
from wire.errors import ConfigError


def test_a_member_is_a_recipe_with_the_shared_policy():
    job, fetch = get_recipe("shapes"), get_recipe("shapes@fetch")
    assert fetch.name == "shapes@fetch" and fetch.robot == "gym-fetch" and not fetch.members
    assert job.members["fetch"].name == "shapes@fetch"
    assert {one.make_policy for one in job.members.values()} == {job.make_policy}
    assert set(job.tasks) == {task for one in job.members.values() for task in one.tasks} == set(job.instructions)
    assert job.spec == job.members["metaworld"].spec
    for name, match in (
        ("shapes@fetsch", "no member 'fetsch'. Did you mean 'fetch'.*shapes@metaworld"),
        ("state@fetch", "no members: it is for robots of one shape"),
        ("shape@fetch", "no recipe 'shape'"),
    ):
        with pytest.raises(ConfigError, match=match):
            get_recipe(name)


def test_a_recipe_says_who_may_work_in_it():
    job, pixels, state = get_recipe("shapes"), get_recipe("pixels"), get_recipe("state")
    for member in job.members.values():
        assert job.refusal(member.spec) == "" and job.member_of(member.spec).name == member.name
    assert "is none of recipe 'shapes', which has 'metaworld-sawyer-state' (metaworld)" in job.refusal(pixels.spec)
    assert job.member_of(pixels.spec) is None
    assert pixels.refusal(pixels.spec) == ""
    assert "made for robot spec" in pixels.refusal(state.spec)


def test_what_is_learned_and_how_is_the_jobs_whatever_changes_it():
    job = Overrides(policy="shared:state", set_=["training.batch=9", "evaluator.episodes=3"]).applied(
        get_recipe("shapes")
    )
    fetch = job.as_member("fetch")
    assert (fetch.name, fetch.spec, fetch.tasks) == ("shapes@fetch", get_recipe("shapes@fetch").spec, ("push",))
    assert fetch.make_policy is job.make_policy and fetch.training.batch == 9
    assert (fetch.evaluator.max_ticks, fetch.evaluator.episodes) == (50, 3), "what is the robot's own, too, can be set"


def test_what_is_of_one_shape_asks_which():
    with pytest.raises(ConfigError, match="several shapes, and what is measured is of one: shapes@metaworld, shapes@f"):
        HeldOutRunner(PolicyUnderTest(parse_source("untrained"), "shapes"))


def test_members_that_cannot_go_together_are_refused():
    fetch, reach = get_recipe("shapes@fetch"), get_recipe("shapes@reach")
    other = replace(reach, tasks=("push",), instructions={"push": "something else"})
    for members, match in (
        ({}, "need members"),
        ({"a@b": fetch}, "needs a name without an @"),
        ({"one": fetch, "two": fetch}, "members 'one' and 'two' are of one robot, 'fetch-push'"),
        ({"one": fetch, "two": other}, "task 'push' is .*give one of them another name"),
    ):
        with pytest.raises(ConfigError, match=match):
            share_policy("job", members)
    job = share_policy("job", {"push": fetch, "reach": reach}, training=replace(fetch.training, batch=7))
    assert [one.training.batch for one in job.members.values()] == [7, 7]


def test_what_is_set_of_the_job_is_set_of_each_member(tmp_path):
    given = Overrides(set_=["training.batch=7", "demonstrations=2"], policy="shared:state", delay="3")
    job = given.applied(get_recipe("shapes"))
    for one in (job, *job.members.values()):
        assert (one.training.batch, one.demonstrations, one.delay) == (7, 2, "3")
    alone = given.applied(get_recipe("shapes@fetch"))
    assert (alone.training, alone.chunking) == (job.members["fetch"].training, job.members["fetch"].chunking)
    # weights that training begins with know some robots, perhaps: the others are demonstrated with
    (tmp_path / "trained.safetensors").touch()
    begun = Overrides(from_=str(tmp_path / "trained.safetensors")).applied(get_recipe("shapes"))
    assert begun.start is not None and [one.demonstrations for one in begun.members.values()] == [10, 10, 10]


def test_a_directory_takes_further_members_and_lets_none_go(tmp_path):
    job, data = get_recipe("shapes"), DataDirectory(tmp_path)
    two = replace(job, members={name: job.members[name] for name in ("metaworld", "fetch")})
    other = replace(job, members={**job.members, "fetch": replace(job.members["fetch"], spec=get_recipe("state").spec)})
    data.prepare(RunIdentity.of(two, 0, None)).close()
    data.prepare(RunIdentity.of(job, 0, None)).close()
    assert data.identity().members.keys() == job.members.keys()
    for fewer in (two, other):
        with pytest.raises(ConfigError, match="the members fetch, metaworld, reach, one of which is gone or another"):
            data.require(RunIdentity.of(fewer, 0, None))
    with pytest.raises(ConfigError, match="belongs to recipe 'shapes'"):
        data.require(RunIdentity.of(get_recipe("shapes@fetch"), 0, None))


def test_a_member_has_the_data_directory_of_its_job():
    assert EdgeOptions(recipe="shapes@fetch").root == EdgeOptions(recipe="shapes").root == Path("data/shapes")
    with pytest.raises(ConfigError, match="a robot is of one: shapes@metaworld, shapes@fetch, shapes@reach"):
        edge_processes(EdgeOptions(recipe="shapes"))
