"""The sweep's queue: each job once, whoever asks; and what a row keeps of a run's metrics."""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tools.sweep import claimed, history, open_claims, read_rows, target_of

JOBS = [{"name": name} for name in ("a", "b", "c", "d")]


def names(jobs: Iterable[dict[str, Any]]) -> list[str]:
    return [job["name"] for job in jobs]


def test_workers_share_the_jobs_and_a_job_is_claimed_only_when_asked_for(tmp_path: Path) -> None:
    claims = open_claims(tmp_path, JOBS)
    first, second = claimed(JOBS, claims), claimed(JOBS, claims)
    assert names([next(first), next(second), next(second)]) == ["a", "b", "c"]
    assert sorted(path.name for path in claims.iterdir()) == ["a", "b", "c"]  # nobody has asked for d yet
    assert names(first) == ["d"]
    assert names(second) == []


def test_many_workers_at_once_take_every_job_exactly_once(tmp_path: Path) -> None:
    jobs = [{"name": str(i)} for i in range(200)]
    claims = open_claims(tmp_path, jobs)
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: names(claimed(jobs, claims)), range(8)))
    assert sorted(sum(taken, []), key=int) == names(jobs)


def test_a_new_start_reclaims_what_has_no_result_and_what_failed(tmp_path: Path) -> None:
    list(claimed(JOBS, open_claims(tmp_path, JOBS)))  # all claimed, then everything was killed
    rows = [{"name": "a"}, {"name": "c", "error": "out of memory"}]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_rows(tmp_path / "results.jsonl") == rows
    assert names(claimed(JOBS, open_claims(tmp_path, JOBS))) == ["b", "c", "d"]


@pytest.mark.parametrize("name", ["a", "x/y"])
def test_names_that_would_share_a_folder_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="each once"):
        open_claims(tmp_path, [*JOBS, {"name": name}])


def test_a_row_keeps_rewards_looks_and_variances_with_their_iterations() -> None:
    shares = {"watch/target_share": 0.75, "watch/keep_share": 0.96875, "watch/nothing_share": 0.0, "watch/gap": 0.1}
    metrics = [
        {"iteration": 0, "reward/mean": 1.23456, "variance/mean": 2.0, "variance/mean_normalised": None},
        {"iteration": 1, "reward/mean": None, **shares},
    ]
    assert history(metrics) == {
        "rewards": [1.235, None],
        "looks": [[2, 0.75, 0.969, 0.0]],  # after two iterations
        "variance": [{"iteration": 0, "mean": 2.0, "mean_normalised": None}],
    }


def test_a_benchmark_gets_only_targets_it_has_a_place_for() -> None:
    concepts = ("Dogs", "Pastel", "hazard")
    assert [target_of("canvas", concept) for concept in concepts] == ["Dogs", "Pastel", None]
    assert [target_of("hazard", concept) for concept in concepts] == [None, None, "hazard"]
    assert target_of("canvas", None) is None
