"""A sweep as cells: the whole product, names that are files, targets where a benchmark has a place for them."""

from dataclasses import replace
from pathlib import Path

import pytest

from cgru.cli.parse import parse
from cgru.cli.sweeping import read_sweep
from cgru.experiments.cells import Cell, Measure
from cgru.experiments.settings import config_of
from cgru.experiments.sweep import MOST, Sweep, plan


def test_a_sweep_is_the_product_with_the_base_first() -> None:
    cells = plan(Sweep(("Dogs", "Cats"), (0, 1), ("cgru", "ddpo")))
    assert [cell.name for cell in cells] == [
        "base",
        "dogs-cgru-s0",
        "dogs-ddpo-s0",
        "dogs-cgru-s1",
        "dogs-ddpo-s1",
        "cats-cgru-s0",
        "cats-ddpo-s0",
        "cats-cgru-s1",
        "cats-ddpo-s1",
    ]
    assert cells[0] == Cell("base", "sweep", "emoji-canvas", measures=(Measure("canvas"),))
    last = cells[-1]
    assert (last.concept, last.seed, last.method, last.preset) == ("Cats", 1, "ddpo", "on-policy")
    assert last.measures == (Measure("canvas", 1, "Cats"),)
    assert config_of(last, "cpu").seed == 1


def test_the_base_is_not_compared_with_itself() -> None:
    """kid and cmmd are distances to the base's own pictures; its cell would fail at each try."""
    base, *_ = plan(Sweep(("Dogs", "Cats"), benchmarks=("kid", "canvas", "cmmd")))
    assert (base.name, base.measures) == ("base", (Measure("canvas"),))
    runs = plan(Sweep(("Dogs", "Cats"), benchmarks=("kid",)))
    assert [cell.name for cell in runs] == ["dogs-anchored-s0", "cats-anchored-s0"]
    assert runs[0].measures == (Measure("kid", 1, "Dogs"),)


def test_a_run_alone_has_nobody_to_share_the_base_with() -> None:
    assert [cell.name for cell in plan(Sweep(("Dogs",)))] == ["dogs-anchored-s0"]


def test_a_concept_is_spelled_as_in_the_vocabulary() -> None:
    (cell,) = plan(Sweep(("dog",)))
    assert (cell.concept, cell.name) == ("Dogs", "dogs-anchored-s0")


def test_a_benchmark_gets_the_concept_where_it_has_a_place_for_it() -> None:
    targets = {
        (cell.concept, measure.benchmark): measure.target
        for cell in plan(Sweep(("Dogs", "Ink", "skulls"), benchmarks=("canvas", "paraphrase", "hazard"), images=2))
        for measure in cell.measures
    }
    assert {key for key, target in targets.items() if target is not None} == {
        ("Dogs", "canvas"),
        ("Dogs", "paraphrase"),
        ("Ink", "canvas"),
        ("skulls", "hazard"),
    }
    assert len(targets) == 12  # three runs and the base, three benchmarks each


def test_hazards_are_measured_by_hazard_unasked() -> None:
    base, dogs, hazard = plan(Sweep(("Dogs", "hazard")))
    assert [measure.benchmark for measure in base.measures] == ["canvas", "hazard"]
    assert dogs.measures == (Measure("canvas", 1, "Dogs"),)
    assert hazard.measures == (Measure("hazard", 1, "hazard"),)


def test_another_model_is_trained_and_measured_only_if_asked(tmp_path: Path) -> None:
    (van_gogh,) = plan(Sweep(("Van Gogh",), model="some/model"))
    assert (van_gogh.name, van_gogh.preset, van_gogh.measures) == ("van-gogh-cgru-s0", "paper-object", ())
    (dogs,) = plan(Sweep(("Dogs",), preset="paper-object"))
    assert dogs.method == "cgru"
    assert dogs.model == config_of(dogs, "cpu").model != "emoji-canvas"


WHOLE = Sweep(("Dogs",))


@pytest.mark.parametrize(
    "sweep, told",
    [
        (replace(WHOLE, concepts=()), "no concept to sweep over"),
        (replace(WHOLE, seeds=()), "no seed to sweep over"),
        (replace(WHOLE, methods=()), "no method to sweep over"),
        (replace(WHOLE, concepts=("Dogs", "dog")), "'dogs-anchored-s0' is in the sweep twice"),
        (replace(WHOLE, seeds=(1, 1)), "'dogs-anchored-s1' is in the sweep twice"),
        (replace(WHOLE, concepts=("Dgos",)), "unknown concept 'Dgos'.*Did you mean 'Dogs'"),
        (replace(WHOLE, methods=("cgru", "ddpoo")), "unknown method 'ddpoo'.*Did you mean 'ddpo'"),
        (replace(WHOLE, preset="bset"), "unknown preset 'bset'.*Did you mean 'best'"),
        (replace(WHOLE, images=0), "--images 0; allowed: 1 to 10000"),
        (replace(WHOLE, settings=("seed=3",)), "'seed=3' is no setting of a sweep; allowed: --seeds"),
        (replace(WHOLE, settings=("model=some/model",)), "'model=some/model' is no .*; allowed: --model"),
        (replace(WHOLE, settings=("method=ddpo",)), "'method=ddpo' is no .*; allowed: --methods"),
        (replace(WHOLE, settings=("policy.iteration=3",)), "policy.iterations"),
        (replace(WHOLE, seeds=tuple(range(MOST + 1))), f"{MOST + 1} runs; allowed: at most {MOST}"),
    ],
)
def test_a_mistake_is_said_before_anything_runs(sweep: Sweep, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        plan(sweep)


def test_the_command_line_says_the_same() -> None:
    words = ["sweep", "Dogs", "policy.iterations=3", "Cats", "--seeds", "0, 2", "--methods", "cgru,ddpo"]
    assert read_sweep(parse([*words, "critic.epochs=1"])) == Sweep(
        ("Dogs", "Cats"), (0, 2), ("cgru", "ddpo"), settings=("policy.iterations=3", "critic.epochs=1")
    )
    with pytest.raises(ValueError, match="--seeds has '-1'"):
        read_sweep(parse(["sweep", "Dogs", "--seeds", "0,-1"]))


def test_commands_make_the_same_by_hand() -> None:
    _, dogs, _ = plan(Sweep(("Dogs", "Cats"), settings=("policy.iterations=3",)))
    unlearn, evaluate = dogs.commands(Path("runs/x"), "auto")
    assert unlearn == (
        "cgru unlearn Dogs --model emoji-canvas --method anchored --preset demo --seed 0 --device auto --out runs "
        "policy.iterations=3"
    )
    assert evaluate == "cgru evaluate runs/x --benchmark canvas --target Dogs --images 1 --device auto"
