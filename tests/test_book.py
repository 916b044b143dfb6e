"""The rendered book in a real browser. Marked `book`: `make book` runs it after the build."""

import functools
import http.server
import os
import re
import shutil
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
HTML = ROOT / "_build" / "html"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = pytest.mark.book


def book_config() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))


def chapters() -> list[str]:
    """The notebooks in the table of contents."""
    return re.findall(r"file: (notebooks/\S+)", (ROOT / "book" / "_toc.yml").read_text())


@pytest.fixture(scope="module")
def html() -> Path:
    """The built book's folder."""
    if not (HTML / "index.html").is_file():
        pytest.fail(
            f"no book in {HTML}: run `make book`, which builds it and then runs these tests"
        )
    return HTML


@pytest.fixture(scope="module")
def pages(html: Path) -> list[str]:
    """Addresses of all pages, relative to the book's root."""
    found = {p.relative_to(html).as_posix() for p in html.rglob("*.html")}
    found.remove("index.html")  # only leads to the first page
    return sorted(p for p in found if not p.startswith("_static/"))


@pytest.fixture(scope="module")
def server(html: Path) -> Iterator[str]:
    """The book's address on this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(html))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}/"
        running.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A running Chromium."""
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = os.environ.get("MINITEXT_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        # In CI a book that nobody looked at is a failure; at home the built book is still there to read.
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up(
            "no Chromium to open the book in: install it (`apt install chromium`) or Chrome, or "
            "name its path in MINITEXT_CHROMIUM"
        )
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield running
        running.close()


class Tab:
    """A page that records what went wrong while it was open."""

    def __init__(self, browser: Any, home: str, width: int = 1200, scheme: str = "light"):
        self.home, self.faults, self.loaded = home, [], set()
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("request", self._request)
        self.page.on("response", self._response)

    def _console(self, message: Any) -> None:
        if message.type == "error":
            self.faults.append(f"console: {message.text}")

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.home, "data:", "blob:")):
            self.faults.append(f"asks another host: {request.url}")
        self.loaded.add(urldefrag(request.url).url)

    def _response(self, response: Any) -> None:
        if response.status >= 400:
            self.faults.append(f"{response.status}: {response.url}")

    def open(self, address: str) -> Any:
        """Opens a page and waits until its mathematics is set."""
        self.page.goto(self.home + address, wait_until="load")
        self.page.evaluate("async () => { await window.MathJax?.startup?.promise }")
        return self.page


@pytest.fixture
def tab(browser: Any, server: str) -> Iterator[Any]:
    """A factory of tabs on the served book."""
    tabs = []

    def make(home: str = server, **options: Any) -> Tab:
        tabs.append(Tab(browser, home, **options))
        return tabs[-1]

    yield make
    for made in tabs:
        made.context.close()


def page_of(chapter: str) -> str:
    return chapter.replace(".ipynb", ".html")


@dataclass
class Look:
    """What there is to see on a page. Setting its mathematics takes longest, so each is opened once for all tests.

    Attributes:
      faults: errors, and requests to other hosts.
      faint: what stands out too little from its ground, for `light` and `dark`.
      alts: the alternative texts of figures.
      outputs: how many outputs cells have.
      links: where links lead.
      wide: the page's width on a phone of 390 pixels, and what sticks out of it.
      cut: code whose lines are cut off, on a screen of 1,280 pixels or on that phone.
      loaded: addresses of everything that the page loads.
    """

    faults: list[str]
    faint: dict[str, list[Any]]
    alts: list[str]
    outputs: int
    links: set[str]
    wide: tuple[int, list[str]]
    cut: list[str]
    loaded: set[str]


@pytest.fixture(scope="module")
def looks(browser: Any, server: str, pages: list[str]) -> Iterator[dict[str, Look]]:
    """Every page of the book, looked at."""
    opened = Tab(browser, server)
    yield {address: look_at(opened, address) for address in pages}
    opened.context.close()


def look_at(opened: Tab, address: str) -> Look:
    opened.faults.clear()
    opened.loaded.clear()
    page = opened.open(address)
    if page.locator("mjx-merror").count():
        opened.faults.append("MathJax could not set a formula")
    faint = {}
    for scheme in ("dark", "light"):
        page.evaluate("scheme => { document.documentElement.dataset.theme = scheme }", scheme)
        faint[scheme] = page.evaluate(FAINT)
    figures, links = page.locator(".bd-article img"), page.locator("a[href]")
    alts = figures.evaluate_all("all => all.map(e => e.alt)")
    # Of a link in an inline SVG `href` is an object.
    absolute = "all => all.map(e => new URL(e.getAttribute('href'), document.baseURI).href)"
    links = set(links.evaluate_all(absolute))
    outputs = page.locator(".cell_output").count()
    page.set_viewport_size({"width": 1280, "height": 900})
    cut = page.evaluate(CUT)
    page.set_viewport_size({"width": 390, "height": 900})
    wide = page.evaluate("document.documentElement.scrollWidth"), page.evaluate(CLIPPED)
    cut += page.evaluate(CUT)
    page.set_viewport_size({"width": 1200, "height": 900})
    return Look(list(opened.faults), faint, alts, outputs, links, wide, cut, set(opened.loaded))


CUT = """() => [...document.querySelectorAll('.cell_input pre, .highlight-python pre')]
  .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.slice(0, 80))"""


# What sticks out of the screen without an ancestor that scrolls or hides: the theme clips the page,
# so its own width would not tell.
CLIPPED = """() => [...document.querySelectorAll('.bd-article *, .bd-header-article *, footer *')]
  .filter(e => {
    const box = e.getBoundingClientRect();
    if (!box.width || box.right <= innerWidth + 1) return false;
    for (let up = e; up && !up.matches('.bd-main, body'); up = up.parentElement) {
      const style = getComputedStyle(up);
      if (style.overflowX !== 'visible' || style.position === 'absolute') return false;
    }
    return true;
  }).slice(0, 3).map(e => e.outerHTML.slice(0, 120))"""


FAINT = """() => {
  const parse = c => {
    const [r, g, b, a] = c.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a ?? 1];
  };
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = e => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c[3] > 0.9) return c;
    }
    return [255, 255, 255, 1];
  };
  const texts = [...document.querySelectorAll('.bd-article *, .bd-sidebar-primary *, .bd-toc *')]
    .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
    .filter(e => e.checkVisibility({opacityProperty: true, visibilityProperty: true}))
    .filter(e => !e.closest('mjx-assistive-mml, .headerlink, button'));
  const faint = new Map();
  for (const e of texts) {
    const pair = [light(parse(getComputedStyle(e).color)), light(ground(e))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    const what = ratio.toFixed(2) + ' ' + e.textContent.slice(0, 40);
    if (ratio < 4.5) faint.set(`${e.tagName}.${e.className} ${getComputedStyle(e).color}`, what);
  }
  return [...faint].slice(0, 8);
}"""


def test_every_page_opens_without_error_or_foreign_request(looks):
    assert len(looks) > 10
    assert not {address: look.faults for address, look in looks.items() if look.faults}


def test_nothing_scrolls_sideways_on_a_phone(looks):
    wide = {address: look.wide for address, look in looks.items()}
    assert not {address: w for address, w in wide.items() if w[0] > 390 or w[1]}


def test_no_line_of_code_is_cut_off(looks):
    assert not {address: look.cut for address, look in looks.items() if look.cut}


def test_pages_are_light(looks, html):
    """In MB, without MathJax, which a browser keeps: as stored, and as a host sends it, compressed."""
    for chapter in chapters():
        paths = {
            urlsplit(url).path for url in looks[page_of(chapter)].loaded if "mathjax" not in url
        }
        files = [html / unquote(path).lstrip("/") for path in paths]
        contents = [file.read_bytes() for file in files if file.is_file()]
        sizes = sum(map(len, contents)), sum(len(zlib.compress(each)) for each in contents)
        assert 0.5e6 < sizes[0] < 2.5e6 and sizes[1] < 1e6, (chapter, sizes)


def test_text_is_there_within_a_second(tab, html):
    opened = tab(home=f"{html.as_uri()}/")
    first = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    tries = [opened.open(page_of(chapters()[3])).evaluate(first) for _ in range(3)]  # the longest
    assert min(tries) < 1000  # ms


def test_a_line_shows_how_far_a_page_is_read(tab):
    page = tab().open(page_of(chapters()[0]))
    width = "new DOMMatrix(getComputedStyle(document.querySelector('.bd-main'), '::before').transform).a"
    shares = []
    for share in (0, 0.5, 1):
        page.evaluate(
            "s => scrollTo(0, s * (document.documentElement.scrollHeight - innerHeight))", share
        )
        page.wait_for_timeout(100)
        shares.append(page.evaluate(width))
    assert shares == pytest.approx([0, 0.5, 1], abs=0.02)


def test_chapters_are_readable_on_paper(tab):
    opened = tab(width=720)
    opened.page.emulate_media(media="print")
    for chapter in chapters()[::5]:
        page = opened.open(page_of(chapter))
        assert not page.evaluate(CUT) and not page.evaluate(CLIPPED)
        for useless in ("details.hide > summary", "button.copybtn", ".bd-sidebar-primary"):
            assert not page.locator(f"{useless}:visible").count(), useless


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(looks, scheme):
    """WCAG 2 AA: 4.5 to 1 for text, and what is not for reading (hidden, disabled) is left out."""
    faint = {address: look.faint[scheme] for address, look in looks.items()}
    assert not {address: found for address, found in faint.items() if found}


def test_figures_have_alternative_text(looks):
    """A figure's text comes from its cell's metadata: `mystnb: {image: {alt: ...}}`."""
    alts = {chapter: looks[page_of(chapter)].alts for chapter in chapters()}
    bad = {
        c: [a for a in found if not a or re.search(r"\.(svg|png)$", a)] for c, found in alts.items()
    }
    assert not {chapter: found for chapter, found in bad.items() if found}
    assert sum(map(len, alts.values())) > len(alts)


def test_chapters_have_outputs_and_a_colab_button(looks):
    url = book_config()["repository"]["url"].removeprefix("https://github.com/")
    for chapter in chapters():
        look = looks[page_of(chapter)]
        assert look.outputs > 0
        assert f"https://colab.research.google.com/github/{url}/blob/main/{chapter}" in look.links


def test_the_gallery_has_the_chapters_own_pictures(tab, html, looks):
    opened = tab()
    page = opened.open("book/gallery.html")
    for image in page.locator(".mt-hero img").all():
        image.scroll_into_view_if_needed()  # they are loaded when they come near
        image.evaluate("image => image.decode()")
    shown = page.locator(".mt-hero").evaluate_all(
        """all => all.map(hero => [hero.querySelector('a').href, hero.querySelector('img').src,
          hero.querySelector('img').alt, hero.querySelector('.mt-hero-title a').textContent])"""
    )
    assert len(shown) == len(chapters())
    for chapter, (link, source, alt, title) in zip(chapters(), shown, strict=True):
        number = int(chapter.removeprefix("notebooks/")[:2])
        assert link.endswith(page_of(chapter)) and title.startswith(f"{number}. ")
        assert alt in looks[page_of(chapter)].alts
        assert source.rpartition("/")[2] in (html / page_of(chapter)).read_text(encoding="utf-8")
    assert not opened.faults


STEPPED = ("01", "03", "10", "13", "17", "18")


def stepped() -> list[str]:
    """The chapters with a step-through."""
    return [c for c in chapters() if c.removeprefix("notebooks/")[:2] in STEPPED]


@pytest.mark.parametrize("chapter", stepped())
def test_a_step_through_is_moved_with_mouse_and_keys(tab, chapter):
    opened = tab()
    page = opened.open(page_of(chapter))
    box = page.locator(".mt-steps")
    slider, shown = box.locator("input"), box.locator("figure:visible")
    count, height = box.locator("figure").count(), box.bounding_box()["height"]

    def is_at(number: int) -> bool:
        return shown.count() == 1 and shown.inner_text().startswith(f"{number} of {count}.")

    assert count > 4 and is_at(1)
    box.get_by_label("next step").click()
    assert is_at(2)
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert is_at(3)
    assert slider.get_attribute("aria-valuetext").startswith(f"3 of {count}.")
    page.keyboard.press("End")
    assert is_at(count)
    box.get_by_label("next step").press("Enter")
    assert is_at(count)
    box.get_by_label("previous step").press(" ")
    assert is_at(count - 1)
    slider.fill("1")
    assert is_at(1)
    assert box.bounding_box()["height"] == height  # the page doesn't jump
    page.emulate_media(media="print")
    assert shown.count() == count and not slider.is_visible()
    assert not opened.faults


def test_a_step_through_reads_without_scripts(browser, server):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(server + page_of(stepped()[0]))
    box = page.locator(".mt-steps")
    assert box.locator("figure:visible").count() == box.locator("figure").count() > 4
    assert not box.locator("input").is_visible()
    context.close()


def test_no_page_is_heavy(html, pages):
    """1.5 MB for a page with its pictures, without MathJax, which all pages share."""
    heavy = {}
    for address in pages:
        text = (html / address).read_text(encoding="utf-8")
        images = {(html / address).parent / unquote(src) for src in IMAGES.findall(text)}
        size = len(text.encode()) + sum(p.stat().st_size for p in images if p.is_file())
        if size > 1_500_000:
            heavy[address] = size
    assert not heavy


IMAGES = re.compile(r'<img[^>]*? src="(?!data:|http)([^"]+)"')


def test_the_sites_address_leads_to_the_first_page(tab, server):
    opened = tab()
    opened.page.goto(server)
    opened.page.wait_for_url("**/book/index.html")
    assert not opened.faults


def test_book_opens_from_the_file_system(tab, html):
    opened = tab(home=f"{html.as_uri()}/")
    for address in ("book/index.html", "book/letters.html", page_of(chapters()[0])):
        page = opened.open(address)
        assert page.locator(".bd-article h1").is_visible()
    assert not opened.faults


def test_mathematics_is_set(tab):
    page = tab().open("book/letters.html")
    assert page.locator("mjx-container").count() > 10
    assert "$" not in page.locator("article").inner_text()


def test_search_finds_segment_ids(tab, server):
    opened = tab()
    page = opened.open("search.html?q=segment_ids")
    # Results are listed one after the other, and a page is shown before all of it is there: wait for both.
    page.locator("#search-results li a[href*='notebooks/']").first.wait_for()
    page.locator("#search-results li a").first.click()
    page.wait_for_url(lambda url: "search.html" not in url, wait_until="load")
    assert "segment_ids" in page.locator("article").inner_text()
    assert not opened.faults


def test_dark_mode_follows_the_system_and_the_button(tab):
    grounds = {}
    for scheme in ("light", "dark"):
        page = tab(scheme=scheme).open("book/index.html")
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        grounds[scheme] = page.evaluate(GROUND)
    assert grounds["light"] > 0.9 and grounds["dark"] < 0.1
    seen = set()
    for _ in range(3):  # the button goes round light, dark and what the system says
        page.locator(".theme-switch-button:visible").first.click()
        seen.add(page.evaluate("document.documentElement.dataset.theme"))
    assert seen == {"light", "dark"}


GROUND = """() => {
  const [r, g, b] = getComputedStyle(document.body).backgroundColor.match(/[\\d.]+/g).map(Number);
  return (r + g + b) / 765;
}"""


class Links(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collects `id`, and the addresses in `href` and `src`."""
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            elif name in ("href", "src") and value:
                self.targets.append(value)


def test_internal_links_lead_somewhere(html, pages):
    parsed = {html / p: Links((html / p).read_text(encoding="utf-8")) for p in pages}
    dead = []
    for path, links in parsed.items():
        for target in links.targets:
            if urlsplit(target).scheme or target.startswith("//"):
                continue
            address, fragment = urldefrag(unquote(target).split("?")[0])
            goal = (path.parent / address).resolve() if address else path
            known = goal.is_file() and (
                not fragment or goal not in parsed or fragment in parsed[goal].anchors
            )
            if not known:
                dead.append(f"{path.relative_to(html)} -> {target}")
    assert not dead
