"""minitext.book.steps: step-throughs that are whole by themselves. tests/test_book.py moves them in a browser."""

import re
from html.parser import HTMLParser
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from minitext.book.steps import StepThrough, step_through
from minitext.errors import UserError
from minitext.perf import figures

CAPTIONS = ["one", 'a < b & "c" </figcaption><script>alert(1)</script>', "it's ℓ"]


class Parsed(HTMLParser):
    """Tags with attributes in order, and the text of captions."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.captions: list[str] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = self.inside or tag == "figcaption"
        if tag == "figcaption":
            self.captions.append("")

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "figcaption"

    def handle_data(self, data):
        if self.inside:
            self.captions[-1] += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def boxes() -> StepThrough:
    """Three frames that matplotlib draws."""
    import matplotlib

    matplotlib.use("agg")

    def frames():
        for number, caption in enumerate(CAPTIONS):
            figure, axes = figures.sketch(3, 1)
            figures.draw_box(axes, number, 0, 1, 1, f"box <{number}>", hatch="//")
            yield figure, caption

    with matplotlib.rc_context():
        figures.figure_style()
        return step_through(frames(), alt='Boxes with "names".')


def test_each_frame_is_an_image_with_a_caption(boxes):
    page = Parsed(boxes._repr_html_())
    assert page.captions == [f"{n} of 3. {text}" for n, text in enumerate(CAPTIONS, 1)]
    images = page.named("img")
    assert [i["alt"] for i in images] == [f'Boxes with "names". Step {n} of 3.' for n in (1, 2, 3)]
    for number, image in enumerate(images):
        kind, _, data = image["src"].partition(",")
        assert kind == "data:image/svg+xml" and not set('<>"#') & set(data)
        svg = ElementTree.fromstring(unquote(data))
        texts = [t.text for t in svg.iter("{http://www.w3.org/2000/svg}text")]
        assert texts == [f"box <{number}>"]  # text, not outlines
        assert len(data) < 6_000


def test_captions_cannot_leave_their_frame(boxes):
    tags = [tag for tag, _ in Parsed(boxes._repr_html_()).tags]
    assert tags.count("script") == 1 and tags[-1] == "script"


def test_without_a_script_all_frames_are_read(boxes):
    """What hides frames needs a class that only the script adds; the slider, useless without it, is hidden."""
    text = boxes._repr_html_()
    page = Parsed(text)
    (bar,) = [attrs for attrs in page.named("div") if attrs.get("class") == "mt-bar"]
    assert "hidden" in bar and not any("hidden" in figure for figure in page.named("figure"))
    classes = {attrs.get("class") for _, attrs in page.tags}
    assert "mt-live" not in classes
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    hiding = [line for line in style.splitlines() if "visibility:hidden" in line]
    assert hiding and all(line.startswith(".mt-live ") for line in hiding)


def test_controls_have_names_and_keys(boxes):
    page = Parsed(boxes._repr_html_())
    (slider,) = page.named("input")
    assert slider["type"] == "range" and (slider["min"], slider["max"]) == ("1", "3")
    assert slider["aria-label"]
    assert [b["aria-label"] for b in page.named("button")] == ["previous step", "next step"]


def test_output_is_self_contained_and_repeatable(boxes):
    text = boxes._repr_html_()
    assert text == boxes._repr_html_()
    bare = re.sub(r'src="data:[^"]*"', "", text)
    assert "http" not in bare and "src=" not in bare and "@import" not in bare
    assert not re.findall(r"http(?!%3A|://www\.w3\.org/)", unquote(text))


def test_two_step_throughs_on_a_page_have_names_of_their_own(boxes):
    other = step_through(boxes.frames[:2], alt="Others.")
    ids = [re.search(r'id="(.*?)"', each._repr_html_())[1] for each in (boxes, other)]
    assert ids[0] != ids[1]
    assert f'"#{ids[1]}:not(.mt-live)"' in other._repr_html_()


def test_a_terminal_lists_the_captions(boxes):
    lines = repr(boxes).splitlines()
    assert lines == ['Boxes with "names".', *(f"{n}. {t}" for n, t in enumerate(CAPTIONS, 1))]


def test_figures_are_closed():
    """A notebook would show those that stay open once more, below the cell."""
    import matplotlib.pyplot as plt

    drawn = [figures.sketch(3, 1)[0] for _ in "ab"]
    step_through([(figure, "a") for figure in drawn], alt="Nothing.")
    assert not any(plt.fignum_exists(figure.number) for figure in drawn)


def test_svg_of_ones_own_is_a_frame():
    svg = '<svg xmlns="http://www.w3.org/2000/svg" width="120" viewBox="0 0 1 1"><g fill="#a00"/></svg>'
    made = step_through([(svg, "a"), (svg.replace(' width="120"', ""), "b")], alt="Nothing.")
    images = Parsed(made._repr_html_()).named("img")
    assert unquote(images[0]["src"].partition(",")[2]) == svg
    assert [image["style"] for image in images] == ["--w:120px", "--w:100%"]


@pytest.mark.parametrize("count, alt", [(0, "A."), (1, "A."), (2, "")])
def test_too_little_to_step_through(count, alt):
    with pytest.raises(UserError, match="two or more"):
        step_through([("<svg/>", "a")] * count, alt=alt)
