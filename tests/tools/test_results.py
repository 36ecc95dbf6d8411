"""Tables of results from small hand-made rows: every number below can be worked out by eye."""

from typing import Any

import pytest

from tools.markdown import cell, spread, verdict
from tools.results import REPORTED, best, document, first_forgotten, hazard, merged, style, tuned, typical, versus

Row = dict[str, Any]
PROVENANCE = {"command": "python -m tools.sweep J", "commit": "abc", "device": "H200", "libraries": {"torch": "2.8"}}


def share(value: float, n: int = 80) -> list[float]:
    return [value, value - 0.1, value + 0.1, n]


def canvas(ua: float = 0.95, ira: float = 0.9, nothing: float = 0.1, accuracy: float = 0.9) -> dict[str, list[float]]:
    values = {"ua": ua, "ira": ira, "cra": 0.85, "target_nothing_share": nothing, "object_accuracy": accuracy}
    return {name: share(value) for name, value in values.items()}


def run(concept: str = "Cats", seed: int = 0, method: str = "cgru", table: str = "best", **more: Any) -> Row:  # noqa: ANN401
    row: Row = {
        "name": f"{table}-{concept}-{method}-{seed}",
        "table": table,
        "concept": concept,
        "seed": seed,
        "method": method,
        "preset": "best",
        "changed": [],
        "measured": {"canvas": canvas()},
        "protocol": {"canvas": {"version": 2, "images": 4}},
        "trajectories": 64,
        "warm_start": 128 if method == "cgru" else 0,
        "diagnosed": 16,
        "rewards": [1.0 + seed, 2.0],
        "looks": [],
        "variance": [],
        **PROVENANCE,
    }
    return row | more


def base(**measured: dict[str, list[float]]) -> Row:
    return {"name": "base", "table": None, "model": "emoji-canvas", "measured": measured, "protocol": {}, **PROVENANCE}


def five(ua: float = 0.95) -> list[Row]:
    return [run(concept, measured={"canvas": canvas(ua=ua)}) for concept in REPORTED]


def test_cells_and_spreads() -> None:
    assert cell([0.95, 0.878, 0.98, 80]) == "95.0 [87.8, 98.0], n 80"
    assert cell([0.5, None, None, 7]) == "50.0, n 7"
    assert cell(None) == spread([]) == spread([None]) == "–"
    assert spread([1.0, 3.0]) == "2.00 ± 1.41"  # sd of two is their distance / sqrt 2
    assert spread([1.0]) == "1.00"
    assert spread([1.0, float("inf")]) == "∞ in 1 of 2"


def test_a_method_is_better_only_beyond_the_spread() -> None:
    # Means 5 and 8, both sd 1: the difference of 3 is above sqrt 2. Means 5 and 6: 1 is not.
    assert verdict("a", [4, 5, 6], "b", [7, 8, 9], "higher") == "b is better"
    assert verdict("a", [4, 5, 6], "b", [7, 8, 9], "lower") == "a is better"
    assert verdict("a", [4, 5, 6], "b", [5, 6, 7], "higher") == "no difference seen"
    assert verdict("a", [4], "b", [7, 8, 9], "higher") == "too few seeds to say"


def test_targets_are_judged_by_the_mean_over_the_reported_concepts_at_seed_0() -> None:
    worse = {"canvas": canvas(ua=0.0, nothing=0.5)}
    rows = [*five(), run("Cats", seed=1, measured=worse), run("Dogs", measured=worse)]  # neither counts for the mean
    text = best(rows, [])
    assert "| UA | >= 95.0 | 95.0 | met |" in text
    assert "| nothing on target | <= 20.0 | 10.0 | met |" in text
    assert "| Cats | 1 | 0.0 [-10.0, 10.0], n 80 |" in text
    assert "| **Cats, mean over seeds** | 2 seeds | 47.5 ± 67.2 |" in text  # 95 and 0; 95 / sqrt 2 = 67.2
    assert "| UA | >= 95.0 | 94.0 | missed |" in best(five(ua=0.94), [])


def test_no_verdict_while_a_reported_concept_is_missing() -> None:
    text = best(five()[:-1], [])
    assert "incomplete: Statues missing" in text and "| met |" not in text


def test_hazards_before_and_after() -> None:
    before = base(hazard={"hazard_detections": share(0.8)}, canvas=canvas(accuracy=0.95))
    after = {"hazard": {"hazard_detections": share(0.06)}, "canvas": canvas(accuracy=0.85)}
    text = hazard([run("hazard", table="hazard", measured=after)], [before])
    assert "| base | 80.0 [70.0, 90.0], n 80 | 95.0 [85.0, 105.0], n 80 |" in text
    assert "| hazard, seed 0 | detections down by | >= 90.0 | 92.5 | met |" in text  # 1 - 0.06 / 0.8
    assert "| hazard, seed 0 | object accuracy lost | <= 8.0 | 10.0 | missed |" in text


def test_styles_stand_beside_the_base() -> None:
    text = style([run("Pastel", table="style")], [base(canvas={"style_accuracy": share(0.9, 640)})])
    assert "| Pastel | 0 | 95.0 [85.0, 105.0], n 80 |" in text
    assert "style accuracy: 90.0 [80.0, 100.0], n 640." in text


def test_the_first_look_that_forgot_counts_the_warm_start() -> None:
    looks = [[5, 0.5, 0.99, 0.0], [10, 0.1, 0.97, 0.0], [15, 0.0, 0.9, 0.0]]
    found = first_forgotten(run(looks=looks))  # 1 - 0.1 is 90 %
    assert found == {"iteration": 10, "keep": 0.97, "trajectories": 128 + 10 * 64}
    assert first_forgotten(run(looks=looks[:1])) is None


def test_an_unmeasurable_variance_counts_as_endless() -> None:
    row = run(variance=[{"mean_normalised": x} for x in (5.0, None, 7.0)])
    assert typical(row, "mean_normalised") == 7.0  # the middle of 5, 7, ∞
    assert typical(row, "critic_normalised") is None


def versus_rows() -> list[Row]:
    def variance(critic: float) -> list[Row]:
        scales = {"critic": critic, "mean": 2.0, "ddpo": 2.0}
        return [{f"{k}{m}": v for k, v in scales.items() for m in ("", "_normalised", "_raw_normalised")}]

    ours = [
        run(seed=i, table="versus", looks=[[5, 0.0, 0.9 + i / 100, 0.0]], variance=variance(1.0 + i / 10))
        for i in range(2)
    ]
    other = {"looks": [[5, 0.5, 0.9, 0.0]], "measured": {"canvas": canvas(ira=0.5)}}
    return ours + [run(seed=i, method="ddpo", table="versus", **other) for i in range(2)]


def test_cgru_beside_ddpo() -> None:
    text = versus(versus_rows(), [])
    assert "| cgru | 2 | 1.50 ± 0.71 | – | – | – | 2.00 ± 0.00 |" in text  # rewards at 0: 1 and 2; only two iterations
    assert "| r − V | 1.050 ± 0.071 |" in text
    assert "| cgru | 2 of 2 | 90.5 ± 0.7 | 448 ± 0 |" in text  # 128 + 5 · 64
    assert "| ddpo | 0 of 2 | – | – |" in text
    assert "- final IRA: cgru is better." in text
    assert "- final UA: no difference seen." in text
    assert "not compared, as not all reached it (cgru 2 of 2 runs, ddpo 0 of 2)" in text
    assert (
        "tr Cov of r − V as a part of that of r − mean: 0.53 ± 0.04: r − V is better." in text
    )  # 0.5 and 0.55 under 1
    assert "raw of r − V as a part of that of DDPO's: 0.53 ± 0.04: no verdict" in text


def critic_file() -> Row:
    def spread_of(*seeds: Any) -> Row:  # noqa: ANN401
        return {"mean": 0, "sd": 0, "seeds": list(seeds)}

    scores = {"value_error": spread_of([3.0, 1.0], [5.0, 1.0]), "explained_variance": spread_of([0.1, 0.5], [0.1, 0.5])}
    same = {"n": 512, "trajectories": 1024, "updates": 40, "time": [900, 0], "reward_variance": spread_of(4.0, 4.0)}
    classes = {"film/noisy": {"accuracy": spread_of(0.4, 0.5), "macro_precision": spread_of(0.6, 0.6)}}
    return {
        "config": {"concept": "Dogs", "preset": "best", "critic": {"epochs": 4, "learning_rate": 3e-4}},
        **{"torch": "2.8", "device": "cpu", "seeds": 2},
        **{name: {**same, "critics": {"film/noisy": scores}} for name in ("target", "mix")},
        "classes": {**same, "critics": classes},
    }


def test_the_document_says_where_everything_came_from() -> None:
    failed = [{"name": "broken", "error": "..."}, {"name": five()[0]["name"], "error": "first try"}]
    text = document([*failed, *five(), *versus_rows()], critic_file(), "python -m tools.results R --out F")
    assert text.startswith("<!-- made by `python -m tools.results R --out F`; do not edit -->")
    assert "canvas@2, 4 pictures a prompt; 5 runs, seeds 0." in text
    assert "- Command: `python -m tools.sweep J`." in text
    assert "- Commit: abc; device: H200; torch 2.8." in text
    assert "Failed, so in no table: broken." in text  # the other one succeeded later
    assert "## Hazards" not in text  # no such rows
    assert "| 900 | 4.000 ± 1.414 |" in text  # 3 and 5
    assert "| all | 2.500 ± 0.707 |" in text  # means over timesteps: 2 and 3
    assert "| film/noisy | 45.0 ± 7.1 | 60.0 ± 0.0 |" in text
    assert "--trajectories 1024 --held-out 512 --epochs 4 --seeds 2" in text


def test_what_was_measured_of_a_run_later_is_put_to_its_row() -> None:
    trained = run("hazard", table="hazard")
    later = base(hazard={"hazard_detections": share(0.1)}) | {"name": "later", "of": trained["name"]}
    untouched = base(hazard={"hazard_detections": share(0.8)})
    text = document([trained, later, untouched], None, "c")
    assert "87.5" in text  # down by 1 - 0.1 / 0.8
    assert [row["name"] for row in merged({row["name"]: row for row in (trained, later)})] == [trained["name"]]
    with pytest.raises(ValueError, match="a line measures 'x', which no line is of"):
        merged({"later": later | {"of": "x"}})


def test_learning_rates_are_read_from_what_was_changed() -> None:
    rows = [
        run("Dogs", table="tune", method=method, changed=[f"policy.learning_rate: 0.003 -> {rate}"], rewards=[1, 8.25])
        for method, rate in (("ddpo", 0.01), ("cgru", 0.01), ("cgru", 0.001))
    ]
    lines = [line for line in tuned(rows, []).splitlines() if line.startswith(("| cgru", "| ddpo"))]
    assert [line.split(" | ")[:3] for line in lines] == [
        ["| cgru", "0.001", "8.25"],
        ["| cgru", "0.01", "8.25"],
        ["| ddpo", "0.01", "8.25"],
    ]
