"""The report: charts hold what they are given, and the page needs nothing but itself, in light, dark and on a phone."""

import os
import re
import shutil
from xml.etree import ElementTree

import pytest

from minitext.journey import dial, report, scaling
from minitext.journey.chart import Axis, Line, chart

RECIPE, STUDY = dial.recipe(5), dial.study_of(5)
NASTY = "<script>alert(1)</script> & \"'"


def figures():
    """The figures of a whole journey, of which some are hostile: models write what they like."""
    points = [r.to_json() | {"loss": 6 - i} for i, r in enumerate(STUDY)]
    predicted = scaling.predict(
        [p["flops"] for p in points], [p["loss"] for p in points], RECIPE.flops
    )
    right = {"sampled": 0.4, "greedy": 0.9}
    answers = {"held_out": right, "three_digits": {"sampled": 0.0, "greedy": 0.0}}
    curve = {key: [[1, 3.0], [2, 2.5], [3, "nan"]] for key in ("loss", "val_loss")}
    rewards = {
        key: [[1, 0.3], [2, 0.5]]
        for key in ("reward", "kl", "entropy", "val_correct", "val_correct_greedy")
    }
    return {
        "data": {
            "source": "stdlib", "text": "6 files", "bytes": 10_000, "sums": {"train": 9, "held_out": 1},
            "answers_of_the_teacher": 50,
        },
        "tokenizer": {
            "ids": 300, "rows": {"train": 9, "validation": 1}, "tokens": 2560, "bytes_per_token": 3.9, "epochs": 1.5,
            "example": ["W", "<b>", "3"],
        },
        "scaling": {"points": points, "prediction": predicted.to_json(), "flops": 1e12},
        "pretrain": {"flops": RECIPE.flops, "curve": curve, "samples": [{"step": 1, "text": NASTY}]},
        "evaluate": {
            "loss": 2.5, "perplexity": 12.2, "bits_per_byte": 1.1, "tokens": 99, "predicted": 2.4, "error": -0.04,
            "written": [{"before": "def ", "after": NASTY}],
        },
        "sft": {"flops": 1e11, "curve": curve, "answers": answers},
        "grpo": {"flops": 1e11, "curve": rewards, "answers": answers, "samples": [{"step": 1, "text": NASTY}]},
        "quantize": {
            "stored": [
                {"rules": rules, "bytes": 10**6 // n, "error": 0.01, "worst": 0.02, "greedy": 0.9}
                for n, rules in enumerate(("float32", "int8", "int4"), 1)
            ]
        },
        "export": {"exports": [{"name": "hf", "files": 5, "bytes": 5000, "reader": "transformers"}]},
        "serve": {"asked": [{"question": "What is 37+58?", "answer": NASTY}]},
    }  # fmt: skip


def whole():
    stages = figures()
    asked = {
        "recipe": RECIPE.to_json(),
        "study": [r.to_json() for r in STUDY],
        "settings": [],
        "quick": False,
    }
    times = {
        name: {"seconds": 3.0, "interrupted": 0, "interrupted_seconds": 0.0, "found": {}}
        for name in stages
    }  # fmt: skip
    times["serve"]["found"] = {"start": 1.0, "answers": [0.01, 0.02], "stop": 0.1}
    times["sft"]["found"] = {
        "seconds": {"step": 2.0, "compile": 1.0, "idle": 50.0},
        "mfu": 0.3,
    }
    return {
        "figures": {"asked": asked, "stages": stages},
        "times": {"stages": times, "wall": 30.0, "useful": 2.0},
    }


def drawn(html):
    return ElementTree.fromstring(re.search(r'<svg class="chart".*?</svg>', html, re.S)[0])


def test_a_chart_has_every_finite_point_where_it_belongs():
    line = Line("loss", [(0, 4.0), (5, "nan"), (5, float("inf")), (10, 2.0)])
    path = (
        drawn(chart("Loss", [line], Axis("step"), Axis("nats")))
        .find("polyline")
        .get("points")
        .split()
    )
    (x0, y0), (x1, y1) = (map(float, spot.split(",")) for spot in path)
    assert x0 < x1 and y0 < y1  # right is later, and down is less


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "points", [[(1, 1)], [(1, 1), (1, 1)], [(1e-9, 1e12), (1e9, 1e-12)], [(3, 5), (4, 5)]]
)
def test_charts_of_poor_data_are_drawn_within_their_frame(points, log):
    svg = drawn(chart("x", [Line("a", points)], Axis("x", log=log), Axis("y", log=log)))
    for text in svg.iter("text"):
        assert -1 <= float(text.get("x")) <= 480 and -1 <= float(text.get("y")) <= 291
    assert "nan" not in ElementTree.tostring(svg, encoding="unicode")


def test_nothing_to_draw_is_said():
    html = chart("Loss", [Line("a", []), Line("b", [(-1, 1)])], Axis("x", log=True), Axis("y"))
    assert "<svg" not in html and "nothing was recorded" in html


def test_the_page_asks_nobody_and_runs_nothing():
    page = report.page(whole())
    assert (
        "http" not in page
        and "<script" not in page
        and "@import" not in page
        and "src=" not in page
    )
    assert NASTY not in page and "&lt;script&gt;" in page
    for title in report.TITLES.values():
        assert f"<h2>{title}</h2>" in page


def test_a_part_of_the_way_has_a_page_too():
    found = whole()
    for name in reversed(list(report.TITLES)):
        del found["figures"]["stages"][name]
        assert f'id="{name}"' not in report.page(found)


@pytest.mark.parametrize(
    ("loss", "low", "high", "said"),
    [
        (2.5, 2.3, 2.45, "4.00% too low, and the measured loss is outside that interval"),
        (2.5, 2.3, 2.55, "4.00% too low, and the measured loss is inside that interval"),
        (2.0, 2.3, 2.45, "20.00% too high, and the measured loss is outside that interval"),
    ],
)
def test_predictions_are_printed_beside_what_was_measured(loss, low, high, said):
    found = whole()
    stages = found["figures"]["stages"]
    stages["scaling"]["prediction"] |= {"loss": 2.4, "low": low, "high": high}
    stages["evaluate"] |= {"loss": loss, "error": 2.4 / loss - 1}
    assert f"Measured afterwards: {loss:.4f}. The prediction was {said}." in report.page(found)


def test_two_models_give_no_interval():
    found = whole()
    del found["figures"]["stages"]["scaling"]["points"][2:]
    page = report.page(found)
    assert "interval" not in page and "left out predict" not in page and "4.00% too low." in page


def test_a_quick_journey_says_so():
    found = whole()
    assert "--quick" not in report.page(found)
    found["figures"]["asked"]["quick"] = True
    assert "--quick" in report.page(found)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = os.environ.get("MINITEXT_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            "no Chromium: install it, or set MINITEXT_CHROMIUM"
        )
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        yield running
        running.close()


@pytest.mark.parametrize(
    ("width", "scheme"), [(1200, "light"), (1200, "dark"), (375, "light"), (375, "dark")]
)
def test_browsers_show_it_without_a_fault_or_another_host(browser, tmp_path, width, scheme):
    path, faults = tmp_path / "report.html", []
    path.write_text(report.page(whole()), encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text))
    page.on(
        "request",
        lambda r: faults.append(r.url) if not r.url.startswith(("file:", "data:")) else None,
    )
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
        "the page scrolls sideways"
    )
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert contrast(ink, paper) > 7
    for line in page.locator("svg.chart polyline").all():
        assert contrast(line.evaluate("e => getComputedStyle(e).stroke"), paper) > 3
    context.close()
    assert not faults


def contrast(one, other):
    """The ratio of WCAG 2.1."""

    def luminance(color):
        parts = [int(n) / 255 for n in re.findall(r"\d+", color)[:3]]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
