"""The benchmark of policies, with networks so small that all of its ways run on a CPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.common.table import render
from benchmarks.policies import __main__ as policies
from benchmarks.policies import cases, row
from benchmarks.policies.cases import Case
from benchmarks.policies.models import arm
from benchmarks.policies.together import ALONE, PROCESSES, THREADS
from policies.common.runtime import Runtime
from wire.errors import ConfigError

SMALL = Case("small", "flow", "small", pixels=32, batch=2)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_row_has_sizes_times_and_memory(tmp_path: Path) -> None:
    (found,) = row.work(row.RowJob(SMALL, seconds=0.1), tmp_path)
    policy = SMALL.make(tmp_path, "small", Runtime())
    assert found["parameters (M)"] == found["trained (M)"] == sum(p.numel() for p in policy.module.parameters()) / 1e6
    assert found["published (MB)"] == len(policy.save()) / 1e6
    assert found["act p99 ms"] >= found["act ms"] > 0
    assert found["chunks/s"] == pytest.approx(1e3 / found["act ms"])
    assert found["training step ms"] > 0
    # how much depends on what this process gave back before: a row has a process of its own otherwise
    assert None not in (found["MiB to train"], found["MiB to act"])


def test_a_training_step_for_which_there_is_no_memory_stays_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hungry = msgspec.structs.replace(SMALL, train_gib=1e9)
    job = row.RowJob(hungry, seconds=0.05)
    (found,) = row.work(job, tmp_path)
    assert found["training step ms"] is found["MiB to train"] is None
    assert found["MiB to act"] is not None
    assert 0.1 < row.available_gib() < 1e9
    monkeypatch.setattr(policies, "child", lambda job: row.work(job, tmp_path))
    lacking = msgspec.structs.replace(SMALL, needs=("no_such_package",))
    result = policies.survey(policies.BenchmarkPlan("cpu", (hungry,), (), lacking, Runtime(), 0.05, False))
    assert "Not measured: the training step of small, for want of memory." in result.notes
    assert any("twice `MiB to act`" in note for note in result.notes)


def test_the_cpu_table_has_every_size_of_our_own_policy_and_one_with_a_backbone() -> None:
    ours = [case for case in policies.plan("cpu", "full", False).rows if case.kind == "flow"]
    assert {case.size for case in ours} == {"pixels", "state", "small", "medium", "large"}
    assert [case.name for case in ours if case.vlm] == ["flow, small + VLM"]


def test_what_is_frozen_counts_as_not_trained(tmp_path: Path) -> None:
    frozen = msgspec.structs.replace(SMALL, config={"training": {"train": ["fast.*"]}})
    (found,) = row.work(row.RowJob(frozen, seconds=0.05), tmp_path)
    assert 0 < found["trained (M)"] < found["parameters (M)"]
    assert found["published (MB)"] < 4.1 * found["parameters (M)"]


def test_variants_are_compared_with_float32_at_the_same_noise(tmp_path: Path) -> None:
    plain = cases.Variant("float32 again", Runtime())
    job = row.RowJob(SMALL, seconds=0.1, variants=(plain, cases.BFLOAT16, cases.INT8))
    same, half, small = row.work(job, tmp_path)
    assert same["largest (%)"] == 0
    assert same["weights MB"] == same["float32 weights MB"]
    assert 0 < half["mean change (% of range)"] <= half["largest (%)"] < 5
    assert half["weights MB"] < 0.6 * half["float32 weights MB"]
    assert small["weights MB"] < half["weights MB"]
    assert 0 < small["largest (%)"] < 5


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="the backbone needs transformers")
def test_both_paths_run_at_once_as_they_would_on_a_gpu() -> None:
    job = row.RowJob(cases.TINY_VLM, seconds=0.3, parallel=True, runtime=Runtime(dtype="bfloat16"))
    found = policies.child(job)
    assert [one["think and act"] for one in found] == [ALONE, THREADS, PROCESSES]
    for one in found:
        assert one["act Hz"] > 0
        assert one["think Hz"] > 0
        assert one["act p99 ms"] >= one["act p50 ms"]


def test_a_policy_whose_package_is_missing_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = msgspec.structs.replace(SMALL, name="other", needs=("no_such_package",))
    broken = msgspec.structs.replace(SMALL, name="broken")
    chosen = policies.BenchmarkPlan("cpu", (SMALL, lacking, broken), (), lacking, Runtime(), 0.1, False)

    def child(job: row.RowJob) -> list[dict[str, object]]:
        if job.case.name == "broken":
            raise policies.RowFailedError("exit 1: out of memory")
        return [{"policy": job.case.name}]

    monkeypatch.setattr(policies, "child", child)
    result = policies.survey(chosen)
    assert [one["policy"] for one in result.rows] == ["small"]
    assert "Not measured: other: no_such_package not installed." in result.notes
    assert "Not measured: other at both paces: no_such_package not installed." in result.notes
    assert "Not measured: broken: exit 1: out of memory." in result.notes
    assert result.goals == []
    assert "no_such_package" in render(result, "python -m benchmarks.policies")


@pytest.mark.slow
def test_a_row_that_fails_says_why() -> None:
    impossible = msgspec.structs.replace(SMALL, size="colossal")
    with pytest.raises(policies.RowFailedError, match=r"exit 1: .*no size 'colossal'"):
        policies.child(row.RowJob(impossible))


def _both(act_hz: float, think_hz: float, how: str) -> dict[str, object]:
    return {"policy": "flow", "think and act": how, "act Hz": act_hz, "think Hz": think_hz}


def test_the_goal_is_judged_while_both_paths_run() -> None:
    alone = _both(500.0, 30.0, ALONE)
    fast, slow = policies._goals([alone, _both(140.0, 1.0, THREADS), _both(120.0, 2.5, PROCESSES)])
    assert (fast.value, fast.holds, slow.value, slow.holds) == (120.0, True, 2.5, True)
    fast, slow = policies._goals([alone, _both(90.0, 3.0, THREADS), _both(50.0, 4.0, PROCESSES)])
    assert (fast.value, fast.holds, slow.holds) == (90.0, False, True)
    fast, slow = policies._goals([alone, _both(140.0, 1.0, THREADS)])
    assert (fast.holds, slow.holds) == (True, False)
    (none,) = policies._goals([])
    assert not none.holds


def test_only_the_real_sizes_on_a_gpu_are_judged() -> None:
    assert policies.plan("cuda", "full", False).judged
    assert not policies.plan("cuda", "tiny", False).judged
    assert not policies.plan("cuda", "full", True).judged
    assert not policies.plan("cpu", "full", False).judged
    names = [case.name for case in policies.plan("cuda", "full", False).rows]
    assert "lerobot SmolVLA, 450 M" in names
    assert "flow, large, 3 B backbone" in names


def test_a_job_survives_its_way_to_the_process() -> None:
    for case, variants in cases.VARIANTS_ON_CPU:
        job = row.RowJob(case, "cuda:1", 2.0, variants, True, Runtime(int8=True))
        assert msgspec.json.decode(msgspec.json.encode(job), type=row.RowJob) == job


def test_a_gpu_that_is_not_there_is_said_before_anything_runs() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="no CUDA device"):
        policies.main(["--device", "cuda"])


def test_on_a_gpu_the_file_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = policies.Result("Policies", [{"policy": "flow"}])
    monkeypatch.setattr(policies, "measure", lambda quick, device, size: result)
    monkeypatch.setattr(policies, "gpu_name", lambda device: "NVIDIA Big-1 (80 GB)")
    monkeypatch.setattr(policies.table, "RESULTS", tmp_path)
    assert policies._on_gpu("cuda", "full", ["--write", "--json", str(tmp_path / "r.json")]) == 0
    text = (tmp_path / "policies_nvidia_big_1_80_gb.md").read_text()
    assert "on NVIDIA Big-1 (80 GB)" in text
    assert "`python -m benchmarks.policies --device cuda`" in text
    assert "NVIDIA Big-1" in json.loads((tmp_path / "r.json").read_text())["machine"]


def test_the_large_sizes_are_what_they_are_called() -> None:
    from benchmarks.policies.models import SMOLVLM_500M, THREE_B, Dims

    def parameters(dims: Dims) -> float:
        keys = dims.hidden // dims.heads * dims.key_heads
        text = dims.layers * (2 * dims.hidden * (dims.hidden + keys) + 3 * dims.hidden * dims.inner)
        vision = dims.vision_layers * (4 * dims.vision_hidden**2 + 2 * dims.vision_hidden * dims.vision_inner)
        return (text + vision + dims.vocabulary * dims.hidden) / 1e9

    assert parameters(THREE_B) == pytest.approx(3.0, abs=0.15)
    assert parameters(SMOLVLM_500M) == pytest.approx(0.46, abs=0.05)
    assert (THREE_B.image_px // THREE_B.patch_px) % THREE_B.scale == 0
    assert len(arm().cameras) == 2
