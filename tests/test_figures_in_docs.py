"""Figures quoted in README and docs are those of the files under docs/results: a changed digit in either fails.

QUOTES has the text of a page with a field for each figure, {key:format}; `found` fills it from the files. Keys are
paths into the JSON, joined by "/"; records of a list go by what tells them apart. A percent sign in a format stands for
"in per cent", without the sign.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from tools import results

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
SWEEPS = [RESULTS / "sweeps" / f"2026-11-16-{letter}.results.jsonl" for letter in "de"]
REPORTED = ("cats", "bears", "jellyfish", "trees", "statues")
NAMES = ("loop", "piece", "name")
"""Keys by which the records of a list go."""


class Figure(float):
    """A number as the pages write it."""

    def __format__(self, spec: str) -> str:
        return super().__format__(spec).removesuffix("%").replace("-", "−")


class Exponent(Figure):
    """A small number as the pages write it: 1.2e-7."""

    def __format__(self, spec: str) -> str:
        return float.__format__(self, spec).replace("e-0", "e-").replace("0.0e+00", "0")


def flat(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """(path, leaf) of a JSON value."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from flat(part, (*path, str(key)))
    elif isinstance(value, list):
        for i, part in enumerate(value):
            names = [part[key] for key in NAMES if key in part] if isinstance(part, Mapping) else []
            yield from flat(part, (*path, *(names or [str(i)])))
    else:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        yield "/".join(path).replace(".", ","), Figure(value) if number else value


def read(name: str) -> dict[str, Any]:
    return dict(flat(json.loads((RESULTS / name).read_text(encoding="utf-8"))))


@cache
def epoch() -> dict[str, Any]:
    """One epoch at Stable Diffusion size, with what the page computes from it."""
    rows = {f"again/{key}": value for key, value in read("epoch-h200-second-start.json").items()}
    for key, value in read("epoch-h200.json").items():
        name = key.removeprefix("rows/").replace("low memory", "low")
        name = name.replace("agreement compiled/guidance", "agreement/compiled").replace(" compiled/", "/")
        rows[name] = Exponent(value) if key.endswith("first_ratio_off_max") else value
    seconds = rows["ours/epoch/seconds"]
    assert rows["facts/commit"] == rows["again/facts/commit"]
    return rows | {
        "commit": re.sub(r"^(\w{7})\w*", r"\1", rows["facts/commit"]),
        "slower": Figure(rows["low/epoch/seconds"] / seconds),
        "slower whole": Figure(rows["low/iterate_seconds"] / rows["ours/iterate_seconds"]),
        "call ms": Figure(1000 * rows["ours/sampling/seconds"] / 50),  # 50 steps of 16 pictures
        "update ms": Figure(1000 * rows["ours/policy update/seconds"] / 50),  # 16 x 50 pairs in parts of 16
        "decode ms": Figure(1000 * rows["ours/decoding/seconds"] / 51),  # x_0 and 50 states
        "peak GB": Figure(rows["ours/epoch/peak_gib"] * 1.073741824),
        "low GB": Figure(rows["low/epoch/peak_gib"] * 1.073741824),
    }


@cache
def erasers() -> dict[str, Any]:
    return {key.removeprefix("arms/"): value for key, value in read("erasers/erasers.json").items()}


@cache
def families() -> dict[str, Any]:
    found = {}
    for record in json.loads((RESULTS / "families.json").read_text(encoding="utf-8"))["families"]:
        sizes = record["million_parameters"]
        record["billion"] = sizes.get("unet", sizes.get("transformer")) / 1000
        found |= {f"{record['family']}/{key}": value for key, value in flat(record)}
    return found


@cache
def evaluation() -> dict[str, Any]:
    found = read("evaluation-h200.json")
    cost, peak = found["tflop_per_picture"], epoch()["ceiling/tflops"]
    for name in ("diffusers", "ours", "ours compiled"):
        found[f"{name} tflops"] = Figure(found[f"rows/{name}/rate"] * cost)
    for name in ("ours", "ours compiled"):
        ratios = [found[f"rows/{name}/ratios/{i}"] for i in range(3)]
        found |= {f"{name} low": Figure(min(ratios)), f"{name} high": Figure(max(ratios))}
    found |= {name: epoch()[f"flops/of_one/{name}"] for name in ("denoiser", "decoder")}
    found["torch"] = found["torch"].partition("+")[0]
    return found | {"bound": Figure(peak / cost), "reached": Figure(found["ours compiled tflops"] / peak)}


@cache
def faster() -> dict[str, Any]:
    """The options of the faster path: 60 and 30 iterations, and seconds."""
    names = {"60": "fast-60/table.json", "30": "fast/table.json", "time": "fast/time.json"}
    found = {f"{key}/{path}": value for key, name in names.items() for path, value in read(name).items()}
    seconds = [arm["iterations"] for arm in json.loads((RESULTS / names["time"]).read_text("utf-8")).values()]
    return found | {"unlike": Figure(max(max(arm) / min(arm) for arm in seconds) - 1)}


@cache
def sweep() -> dict[str, Any]:
    """The runs of `best` by their names, the base, and means over them."""
    rows = [json.loads(line) for path in SWEEPS for line in path.read_text(encoding="utf-8").splitlines()]
    found = dict(flat(rows))

    def measured(names: list[str], what: str) -> list[float]:
        return [found[f"{name}/measured/canvas/{what}/0"] for name in names]

    groups = {
        "concepts": [f"best-{name}-0" for name in REPORTED],
        "cats": [f"best-cats-{seed}" for seed in range(3)],
        "paper cgru": [f"paper-cgru-{seed}" for seed in range(3)],
        "paper ddpo": [f"paper-ddpo-{seed}" for seed in range(3)],
    }
    spreads = {(group, what): measured(names, what) for group, names in groups.items() for what in ("ua", "ira")}
    found |= {f"{group} {what}": Figure(mean(values)) for (group, what), values in spreads.items()}
    found |= {f"{group} {what} sd": Figure(stdev(values)) for (group, what), values in spreads.items()}
    for method in ("cgru", "ddpo"):
        runs = [row for row in rows if row["name"].startswith(f"versus-{method}-")]
        spent = [first["trajectories"] for row in runs if (first := results.first_forgotten(row))]
        assert len(spent) == 3
        found |= {f"{method} spent": Figure(mean(spent)), f"{method} spent sd": Figure(stdev(spent))}
    return found


@cache
def replacement() -> dict[str, Any]:
    """What is drawn instead; beside it the base's lowest share of clean pictures of a class."""
    found = read("replacement.json")
    clean = [value for key, value in found.items() if key.startswith("base/clean/")]
    return found | {"lowest": Figure(min(clean) / found["base/n_each"]), "short": found["commit"][:7]}


class Tables(HTMLParser):
    """The tables of a page: rows of texts, a caption being a row of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.words: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag in ("tr", "caption"):
            self.tables[-1].append([])
        if tag in ("td", "th", "caption"):
            self.words = []

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th", "caption") and self.words is not None:
            self.tables[-1][-1].append(" ".join(" ".join(self.words).split()))
            self.words = None

    def handle_data(self, data: str) -> None:
        if self.words is not None:
            self.words.append(data)


@cache
def small() -> dict[str, Any]:
    """reproduce-small.html: "caption/row/column/i" is the i-th number of a cell; and what is drawn instead."""
    page, found = Tables(), dict[str, Any]()
    html = (RESULTS / "reproduce-small.html").read_text(encoding="utf-8")
    page.feed(html)
    mixed = []
    for (caption, *_), head, *rows in (table for table in page.tables if len(table[0]) == 1):
        mixed += [(head, rows)] if caption.startswith("Number of pictures") else []
        for row in rows:
            for column, text in zip(head, row, strict=False):
                numbers = re.findall(r"-?\d+\.?\d*", text)
                found |= {f"{caption}/{row[0]}/{column}/{i}": n for i, n in enumerate(numbers)}
    (classes,) = ([row[0] for row in table[2:]] for table in page.tables if table[0] == ["UA and IRA by class"])
    own = [dict(zip(head, row, strict=True)) for name, (head, rows) in zip(classes, mixed, strict=True) for row in rows
           if row[0] == name]  # fmt: skip
    drawn = {label: sum(int(row[label] or 0) for row in own) for label in own[0] if label}
    total = sum(drawn.values())
    (commit,) = set(re.findall(r"commit (\w{7})\w*\.", html))
    return found | {**drawn, "total": total, "other share": Figure(drawn["other"] / total), "commit": commit}


HTML, WORDS = "Methods, mean over classes", "Prompts in other words (benchmark paraphrase), mean over classes"


def by_method(row: str, caption: str, column: str) -> str:
    """A line of README's table of 20 classes."""
    sign = "" if "Fréchet" in column else " %"
    cells = [f"{{{caption}/{m}/{column}/0}}{sign} [{{{caption}/{m}/{column}/1}}, {{{caption}/{m}/{column}/2}}]"
             for m in ("CGRU", "DDPO")]  # fmt: skip
    return f"| {row} | {{{caption}/base model/{column}/0}}{sign} | {cells[0]} | {cells[1]} |"


def shares(run: str, what: str) -> str:
    path = f"{run}/measured/canvas/{what}"
    return f"{{{path}/0:.1%}} % [{{{path}/1:.1%}}, {{{path}/2:.1%}}], n {{{path}/3:.0f}}"


def arm(label: str, key: str, n: int, seconds: str) -> str:
    """A line of performance.md's table of options."""
    b, s = ("**", "**") if key.startswith("60") else ("", "")
    ua, ira = (
        f"{b}{{{key}/{what}_difference/mean:+.1%}}{s} [{{{key}/{what}_difference/low:+.1%}}, "
        f"{{{key}/{what}_difference/high:+.1%}}]"
        for what in ("ua", "ira")
    )
    return f"| {label} | {{{key}/ua:.1%}} | {{{key}/ira:.1%}} | {ua} | {ira} | {n} | {seconds}".rstrip() + " |"


def replaced(concept: str, instead: str) -> str:
    """A line of evaluation.md's table of what is drawn instead."""
    run, clean = f"runs/uce {concept}", f"runs/uce {concept}/replacement_clean"
    return (
        f"| {concept} | {{{clean}/value:.1%}} % [{{{clean}/low:.1%}}, {{{clean}/high:.1%}}] | "
        f"{{{run}/clean/{instead}:.0f}} {instead} | {{{run}/frechet/value:.1f}} | {{{run}/frechet_base/value:.1f}} |"
    )


def timed(name: str) -> str:
    return f"{{time/{name}/median:.1f}}"


BASE = "base/measured/canvas"
DEMO = re.compile(r"`demo`: Dogs, two cores \(docs/lab.md, commit (\w{7})\) \| (.*?) \| (.*?) \|")
"""README's line of the demo, which has no file: its figures are the log's."""
QUOTES: list[tuple[str, Any, str]] = [
    *(("README.md", small, line) for line in (
        by_method("forgotten (UA), n 80 a class", HTML, "UA ↑"),
        by_method("other classes kept (IRA), n 304 a class", HTML, "IRA ↑"),
        by_method("styles kept (CRA)", HTML, "CRA ↑"),
        by_method("Fréchet distance to real art, judge's features", HTML, "Fréchet distance ↓"),
        by_method("forgotten in other words", WORDS, "UA ↑"),
        by_method("the same, words held out of training", WORDS, "UA, held-out words ↑"),
        "Of {total} target pictures of `anchored` the judge calls {other} ({other share:.0%} %) `other`",
        "It calls {nothing} `nothing`",
        "one H200, commit {commit}):",
        "post-ASR {Attack success rates/CGRU, seed 0/post-ASR ↓/0} % "
        "[{Attack success rates/CGRU, seed 0/post-ASR ↓/1}, {Attack success rates/CGRU, seed 0/post-ASR ↓/2}]",
        "({Attack success rates/base model, without the word/post-ASR ↓/0} % "
        "[{Attack success rates/base model, without the word/post-ASR ↓/1}, "
        "{Attack success rates/base model, without the word/post-ASR ↓/2}])",
    )),
    ("docs/unlearning.md", sweep, "UA {paper cgru ua:.1%} ± {paper cgru ua sd:.1%} % and "
     "{paper ddpo ua:.1%} ± {paper ddpo ua sd:.1%} % over 3 seeds"),
    *(("CHANGELOG.md", small, line) for line in (
        f"CGRU UA {{{HTML}/CGRU/UA ↑/0}} % [{{{HTML}/CGRU/UA ↑/1}}, {{{HTML}/CGRU/UA ↑/2}}], "
        f"IRA {{{HTML}/CGRU/IRA ↑/0}} % [{{{HTML}/CGRU/IRA ↑/1}}, {{{HTML}/CGRU/IRA ↑/2}}]; "
        f"DDPO's advantage {{{HTML}/DDPO/UA ↑/0}} and {{{HTML}/DDPO/IRA ↑/0}} %; "
        f"CRA {{{HTML}/base model/CRA ↑/0}} → {{{HTML}/CGRU/CRA ↑/0}} %, "
        f"Fréchet {{{HTML}/base model/Fréchet distance ↓/0}} → {{{HTML}/CGRU/Fréchet distance ↓/0}}, "
        "{other share:.0%} % of target pictures judged `other`; "
        "hazards {Pictures in which a category is seen/base model/total ↓/0} → "
        "{Pictures in which a category is seen/CGRU, seed 0/total ↓/0} of 288",
    )),
    ("CHANGELOG.md", sweep, "UA {concepts ua:.1%}, IRA {concepts ira:.1%}, nothing recognisable"),
    ("CHANGELOG.md", sweep, "object {base/measured/canvas/object_accuracy/0:.1%} %"),
    ("CHANGELOG.md", evaluation, "{rows/ours/ratios/0:.1f} × in the first of three blocks (compiled "
     "{rows/ours compiled/ratios/0:.1f} ×)"),
    ("CHANGELOG.md", epoch, "{ours/epoch/seconds:.1f} s compiled, {ours/epoch/ratio:.1f} × a DDPO-style loop"),
    ("CHANGELOG.md", epoch, "{ours/epoch/peak_gib:.1f} GiB, compiled in {compilation/compile_seconds:.0f} s; in the "
     "low-memory mode {low/epoch/seconds:.1f} s and {low/epoch/peak_gib:.1f} GiB"),
    *(("README.md", sweep, line) for line in (
        "UA {paper cgru ua:.1%} ± {paper cgru ua sd:.1%} % and {paper ddpo ua:.1%} ± {paper ddpo ua sd:.1%} % "
        "(3 seeds)",
        "UA {concepts ua:.1%} ± {concepts ua sd:.1%} %, n {best-cats-0/measured/canvas/ua/3:.0f} each | "
        "IRA {concepts ira:.1%} ± {concepts ira sd:.1%} %, n {best-cats-0/measured/canvas/ira/3:.0f} each "
        "(base: object accuracy {base/measured/canvas/object_accuracy/0:.1%}, "
        "n {base/measured/canvas/object_accuracy/3:.0f})",
        "| Cats, seeds 0, 1, 2 | UA {cats ua:.1%} ± {cats ua sd:.1%} % | IRA {cats ira:.1%} ± {cats ira sd:.1%} % |",
        f"| the style Ink | UA {shares('style-ink-0', 'ua')} | IRA {shares('style-ink-0', 'ira')} "
        "(base: style accuracy {base/measured/canvas/style_accuracy/0:.1%}, n "
        "{base/measured/canvas/style_accuracy/3:.0f}) |",
        "n {base-hazard/measured/hazard/hazard_detections/3:.0f} | "
        "{base-hazard/measured/hazard/hazard_detections/0:.1%} → "
        "{hazard-0-detections/measured/hazard/hazard_detections/0:.1%} % | "
        f"object accuracy {shares('hazard-0', 'object_accuracy')} "
        "(base {base/measured/canvas/object_accuracy/0:.1%})",
        "({ddpo spent:.0f} ± {ddpo spent sd:.0f} against {cgru spent:.0f} ± {cgru spent sd:.0f})",
    )),
    *(("docs/emoji-canvas.md", sweep, f"| {what} | {{{BASE}/{key}/0:.1%}} % | {{{BASE}/{key}/1:.1%}} – "
       f"{{{BASE}/{key}/2:.1%}} | {{{BASE}/{key}/3:.0f}} |") for what, key in (
        ("object accuracy under the judge", "object_accuracy"),
        ("style accuracy under the judge", "style_accuracy"),
        ("nothing recognisable", "nothing_share"),
    )),
    ("docs/emoji-canvas.md", sweep,
     "| Fréchet distance on judge features | {base/measured/canvas/frechet_judge/0:.2f} |"),
    ("docs/evaluation.md", small, "{Pictures in which a category is seen/base model/CLIPScore ↑/0} "
     "({Pictures in which a category is seen/base model/CLIPScore ↑/1} – "
     "{Pictures in which a category is seen/base model/CLIPScore ↑/2})"),
    ("README.md", epoch, "an epoch of the paper takes {ours/epoch/seconds:.1f} s compiled, a DDPO-style loop "
     "{reference/epoch/seconds:.1f} s in the same process ({ours/epoch/ratio:.1f} ×), preset `fast` "
     "{fast/epoch/seconds:.1f} s, the low-memory mode {low/epoch/seconds:.1f} s within {low/epoch/peak_gib:.1f} GiB"),
    ("README.md", erasers,
     "has UA {uce/ua:.1%} % with IRA {uce/ira:.1%} %. `anchored` has {anchored/ua:.1%} and {anchored/ira:.1%}, "
     "ESD-x {esd-x/ua:.1%} and {esd-x/ira:.1%}, ESD-u {esd-u/ua:.1%} and {esd-u/ira:.1%}, SLD {sld/ua:.1%} and "
     "{sld/ira:.1%}"),
    *(("docs/evaluation.md", replacement, line) for line in (
        "replacement.json`, commit {short}, CPU; n {runs/uce Cats/replacement_clean/n:.0f} target pictures)",
        replaced("Cats", "Dogs"),
        replaced("Dogs", "Cats"),
        "{base/clean_share/value:.1%} % [{base/clean_share/low:.1%}, {base/clean_share/high:.1%}], "
        "n {base/clean_share/n:.0f}, from {lowest:.0%} % (Birds)",
    )),
    *(("docs/concepts.md", lambda: read("walk.json"), line) for line in (
        "| before the first loss, commit | {walks/before/commit} | {walks/now/commit} |",
        "`main` and `policy_loss` included | {walks/before/frames:.0f} | {walks/now/frames:.0f} |",
        "in which they are first entered | {walks/before/package_switches:.0f} | {walks/now/package_switches:.0f} |",
        "| files entered | {walks/before/files:.0f} | {walks/now/files:.0f} |",
        "| functions entered | {walks/before/functions:.0f} | {walks/now/functions:.0f} |",
    )),
    *(("docs/performance.md", families, line) for line in (
        "UNet of {sdxl/billion:.2f} billion parameters | {sdxl/iteration_s:.1f} s | "
        "{sdxl/peak_allocated_gib:.1f} GiB | {sdxl/first_ratio_off:.0f} | {sdxl/edit_mib:.1f} MiB |",
        "transformer of {sd3/billion:.2f} billion | {sd3/iteration_s:.1f} s | {sd3/peak_allocated_gib:.1f} GiB | "
        "{sd3/first_ratio_off:.0f} | {sd3/edit_mib:.1f} MiB |",
        "{sdxl/settings/trajectories:.0f} trajectories of {sdxl/settings/steps:.0f} steps",
        "commit {sdxl/commit}, `docs/results/families.json`",
    )),
    *(("docs/performance.md", evaluation, line) for line in (
        "with torch {torch} (`docs/results/evaluation-h200.json`, {date};",
        "| diffusers | | 1 | 1 | {rows/diffusers/rate:.2f} | {diffusers tflops:.0f} |",
        "| ours, eager | ≥ 5 × | **{rows/ours/ratios/0:.1f} ×** | {rows/ours/ratio:.1f} × "
        "({ours low:.1f} to {ours high:.1f}) | {rows/ours/rate:.2f} | {ours tflops:.0f} |",
        "compiled in {compile_seconds:.0f} s, not counted | | **{rows/ours compiled/ratios/0:.1f} ×** | "
        "{rows/ours compiled/ratio:.1f} × ({ours compiled low:.1f} to {ours compiled high:.1f}) | "
        "{rows/ours compiled/rate:.2f} | {ours compiled tflops:.0f} |",
        "Peak memory was {peak_gib:.1f} GiB. diffusers slowed from {rows/diffusers/rates/0:.2f} to "
        "{rows/diffusers/rates/2:.2f} pictures/s",
        "costs {denoiser:.3f} TFLOP × 2 × 50 + {decoder:.1f} = {tflop_per_picture:.1f} TFLOP.",
        "the bound is {bound:.1f} pictures/s. Compiled, we reach {reached:.0%} % of it",
    )),
    *(("docs/performance.md", epoch, line) for line in (
        "**{ours/epoch/ratio:.1f} ×**: {ours/epoch/seconds:.1f} against {reference/epoch/seconds:.1f} s.",
        "| **{ours/epoch/seconds:.1f}**; `train.iterate`, which also computes diagnostics, "
        "{ours/iterate_seconds:.1f} |",
        "| **{ours/sampling/tflops:.0f}**; {ours/sampling/seconds:.1f} s.",
        "| **{ours/policy update/tflops:.0f}**; {ours/policy update/seconds:.1f} s |",
        "| **{ours/decoding/tflops:.0f}**; {ours/decoding/seconds:.1f} s.",
        "| **{fast/epoch/seconds:.1f} s** (sampling {fast/sampling/seconds:.1f}, update "
        "{fast/policy update/seconds:.1f}, decoding {fast/decoding/seconds:.1f}, critic {fast/critic/seconds:.1f}); "
        "`train.iterate` {fast/iterate_seconds:.1f} s |",
        "| **{ours/epoch/peak_gib:.1f} GiB** ({peak GB:.1f} GB) |",
        "| **{low/epoch/peak_gib:.1f} GiB** ({low GB:.1f} GB) allocated, torch limited to 11 GiB in all; "
        "{low/epoch/seconds:.1f} s: **{slower:.2f} ×** the full-speed mode in the same run.",
        "which also moves the idle networks, {low/iterate_seconds:.1f} s, {slower whole:.2f} ×.",
        "| **{compilation/compile_seconds:.0f} s** / **{again/compilation/compile_seconds:.0f} s**, "
        "{compilation/graphs:.0f} graphs; for `fast` {compilation/fast_compile_seconds:.0f} s / "
        "{again/compilation/fast_compile_seconds:.0f} s.",
        "| compiled {ours/first_ratio_off_max:.1e}, low-memory {low/first_ratio_off_max:.1e}, "
        "`fast` {fast/first_ratio_off_max:.1e}; the reference {reference/first_ratio_off_max:.1e} |",
        "not compiled {agreement/guidance 5/ours_to_reference:.2f} / {agreement/guidance 5/ours_to_fp32:.2f} / "
        "{agreement/guidance 5/reference_to_fp32:.2f}, at guidance 1 {agreement/guidance 1/ours_to_reference:.3f} / "
        "{agreement/guidance 1/ours_to_fp32:.3f} / {agreement/guidance 1/reference_to_fp32:.3f}; compiled, on pairs of "
        "its own rollouts, {agreement/compiled 5/ours_to_reference:.2f} / {agreement/compiled 5/ours_to_fp32:.2f} / "
        "{agreement/compiled 5/reference_to_fp32:.2f} |",
        "Both files record the commit as `{commit}`",
        "{facts/date}, torch 2.11.0, {ceiling/tflops:.0f} TFLOP/s in a matrix product",
        "One H200 does {ceiling/tflops:.0f} TFLOP/s in a plain bf16 matrix product",
        "a denoiser call took {call ms:.0f} ms, an update of 16 pairs {update ms:.0f} ms and a decode of 16 pictures "
        "{decode ms:.0f} ms",
        "they take {ours/reward/seconds:.2f} s of an epoch",
        "`fast` at Stable Diffusion size takes {fast/epoch/seconds:.1f} s an epoch",
    )),
    ("docs/performance.md", lambda: read("demo.json"),
     "takes {now/median:.1f} s on two quiet cores (AMD EPYC), against {before/median:.1f} s before the fast path "
     "({commit_before}): **{ratio:.2f} ×**"),
    ("docs/performance.md", lambda: read("demo.json"), "at {commit:.7}; the warm start"),
    ("docs/performance.md", lambda: read("demo.json"),
     "the warm start before them took {now/start:.0f} s, against {before/start:.0f} s"),
    *(("docs/performance.md", faster, line) for line in (
        f"| `best`, 60 iterations as it is | {{60/best/ua:.1%}} | {{60/best/ira:.1%}} | | | 15 | {timed('best')} |",
        "Iterations of one arm differ by up to {unlike:.0%} %",
        "`steps-each` and `steps-shared` lose 1.2 and 1.5 points",  # as in their lines below
        arm("`fast`, 60 iterations as it is", "60/fast", 15, timed("fast")),
        "| `best`, 30 iterations | {30/best/ua:.1%} | {30/best/ira:.1%} | | | 15 | |",
        arm("`fast`, 30 iterations, and all below", "30/fast", 15, ""),
        arm("`fast-variance`: `fast` with the steps of `steps-variance`", "30/fast-variance", 15, ""),
        arm("`steps-each`: 30 % of the steps, of each trajectory its own", "30/steps-each", 5, timed("steps-each")),
        arm("`steps-shared`: 30 %, the same for a batch", "30/steps-shared", 5, timed("steps-shared")),
        arm("`steps-variance`: 30 %, likelier where r − V was large", "30/steps-variance", 5, timed("steps-variance")),
        arm("`decode-half`: the critic sees half-size pictures", "30/decode-half", 5, timed("decode-half")),
        arm("`decode-quarter`", "30/decode-quarter", 5, timed("decode-quarter")),
        arm("`latents`: the critic sees no pictures", "30/latents", 5, timed("latents")),
        arm("`tower-frozen`: the critic's tower does not learn", "30/tower-frozen", 5, timed("tower-frozen")),
        arm("`merged`: rollouts with the LoRA in the weights", "30/merged", 5, timed("merged")),
    )),
]  # fmt: skip


@cache
def text_of(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize(("page", "found", "quote"), QUOTES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_figure_is_that_of_its_file(page: str, found: Any, quote: str) -> None:  # noqa: ANN401
    expected = " ".join(quote.format_map(found()).split())
    assert expected in text_of(page), f"{page} should say: {expected}"


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md", "docs/unlearning.md", "docs/evaluation.md"])
def test_no_figure_is_left_out(page: str) -> None:
    rest = DEMO.sub("", text_of(page))
    for _, found, quote in (row for row in QUOTES if row[0] == page):
        rest = rest.replace(" ".join(quote.format_map(found()).split()), "")
    assert not re.findall(r".{40}\d\.\d+ ?(?:%|×|s\b|ms\b|GiB|GB|TFLOP|points|±)|.{40} \[[−+]?\d+\.\d", rest)


def test_the_table_of_runs_is_what_the_tool_makes_of_the_files(tmp_path: Path) -> None:
    made = tmp_path / "made.md"
    options = ["--critic", RESULTS / "critic.json", "--out", made]
    subprocess.run([sys.executable, "-m", "tools.results", *SWEEPS, *options], cwd=ROOT, check=True)
    kept = (RESULTS / "unlearning.md").read_text(encoding="utf-8")
    assert made.read_text(encoding="utf-8").splitlines()[1:] == kept.splitlines()[1:]  # the first has the command


def test_the_demo_s_figures_are_the_log_s() -> None:
    row = DEMO.search(text_of("README.md"))
    assert row is not None
    _, _, entry = text_of("docs/lab.md").partition(f"`make demo` at {row[1]}")
    assert row[2] in entry[:200] and row[3] in entry[:200]


def test_the_options_commits_are_those_recorded() -> None:
    files = [RESULTS / name / "results.jsonl" for name in ("fast", "fast-60")]
    rows = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
    commits = {row["commit"][:7] for row in rows if "commit" in row}
    assert len(commits) == 5
    assert all(commit in text_of("docs/performance.md") for commit in commits)


def is_whole_clone() -> bool:
    told = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    return told.returncode == 0 and told.stdout.strip() == "false"


@pytest.mark.skipif(not is_whole_clone(), reason="needs git and the whole history")
def test_a_commit_that_a_page_names_is_in_the_repository_or_is_said_not_to_be() -> None:
    said = re.search(r"Commits that are not in this repository: ([^.]*)\.", text_of("docs/lab.md"))
    assert said is not None
    lost = set(said[1].split(", "))
    for page in ("README.md", "CHANGELOG.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))):
        for commit in re.findall(r"\b[0-9a-f]{7}\b", text_of(page)):
            known = subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True)
            assert (known.returncode == 0) == (commit not in lost), f"{page} names {commit}; docs/lab.md lists {lost}"
            assert commit not in lost or "not in this repository" in text_of(page), f"{page}: say that {commit} is lost"
