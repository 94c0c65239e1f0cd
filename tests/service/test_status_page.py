"""The status page: static, closed to foreign content; a real browser sees it update and fail."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from service.metrics import BATCH_STAGES, REQUEST_STAGES
from tests.integration.door import open_session, push, wait_until
from tests.integration.server import Server, running
from tests.service.browser import CHROMIUM, Page, chromium
from tests.service.door import InProcess, refused
from tests.service.life import life

FILES = {"/": "text/html", "/status_page.js": "text/javascript", "/status_page.css": "text/css"}

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed")


@pytest.mark.parametrize("path", FILES)
def test_files_are_sent_with_a_policy_that_lets_nothing_else_run(
    door: InProcess, path: str
) -> None:
    answer = door.get(path)
    assert answer.headers["content-type"].startswith(FILES[path])
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", FILES)
def test_files_name_no_other_origin_and_hold_no_inline_code(door: InProcess, path: str) -> None:
    text = door.get(path).text.replace("http://www.w3.org/2000/svg", "")
    assert "//" not in text.replace("// ", "").replace("//\n", "")
    assert "innerHTML" not in text
    assert " style=" not in text
    assert " onclick=" not in text


@pytest.mark.parametrize("path", FILES)
def test_foreign_host_gets_no_page(door: InProcess, path: str) -> None:
    assert refused(door.get(path, host="evil.example:8321")) == (421, "misdirected")


def test_with_keys_the_shell_is_public_and_the_facts_are_not(
    make_door: Callable[..., InProcess], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("root admin " + "0" * 64 + "\n")
    door = make_door(keys_file=keys)
    assert door.get("/").status_code == 200
    assert refused(door.get("/v1/info")) == (401, "unauthenticated")


# ---- in a browser

REACHABLE = """[...document.querySelectorAll("button, input, a, [tabindex]")]
    .filter((each) => each.offsetParent && each.tabIndex >= 0).length"""

FAINT_TEXTS = """(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = parse(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !element.offsetParent) continue;
    const a = light(parse(getComputedStyle(element).color)), b = light(ground(element));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) faint.push(`${element.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return faint;
})()"""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as made:
        made.use_size(1160, 1100)
        yield made


def text_of(page: Page, selector: str) -> str:
    return str(page.evaluate(f"document.querySelector({selector!r}).innerText"))


def count_of(selector: str) -> str:
    """The number at the start of an element's text, as an expression."""
    return f"parseInt(document.querySelector({selector!r}).innerText.replace(/,/g, ''))"


@needs_chromium
def test_page_updates_and_shows_an_error(page: Page, small_gguf: Path) -> None:
    with running(small_gguf) as server, server.client() as client:
        page.open(f"{server.url}/")
        page.wait_until("document.body.dataset.state === 'ready'")
        assert "1, 14" in text_of(page, "#geometry")
        assert "kv store" in text_of(page, "#ledger")
        work(client)
        page.wait_until(f"{count_of('#tile-tokens .more')} === 8")
        page.wait_until("document.querySelector('#stages tbody').innerText.includes('read_kv')")
        client.get("/v1/sessions/77")
        page.wait_until("document.querySelector('#errors').innerText.includes('unknown_session')")
        assert page.evaluate("document.querySelectorAll('svg.plot[aria-label]').length") >= 5
    page.wait_until("document.body.dataset.state === 'down'")
    assert "no answer since" in text_of(page, "#state")
    assert not page.errors


@needs_chromium
def test_page_is_read_from_a_keyboard_in_both_schemes(page: Page, server: Server) -> None:
    page.open(f"{server.url}/")
    page.wait_until("document.body.dataset.state === 'ready'")
    grounds = set()
    for scheme in ("dark", "light"):
        page.use_scheme(scheme)
        grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2
    page.press("Tab")
    assert page.evaluate("document.activeElement.id") == "pause"
    page.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"


@needs_chromium
def test_page_tells_loading_draining_and_the_end(page: Page, small_gguf: Path) -> None:
    with life(small_gguf) as made, made.client() as client:
        made.report("layer 1 table", 3, 10)
        page.open(f"{made.url}/")
        page.wait_until("document.body.dataset.state === 'loading'")
        assert text_of(page, "#state") == "loading: layer 1 table, 30 %"
        assert page.evaluate("document.getElementById('facts').hidden"), "there are none yet"
        made.finish_loading()
        page.wait_until("document.body.dataset.state === 'ready'")
        made.server.lasts = True
        made.signal()
        page.wait_until("document.body.dataset.state === 'draining'")
        assert "about to stop" in text_of(page, "#state")
        wait_until(client, "engram_ready", lambda ready: ready == 0)
        made.server.lasts = False
        page.wait_until("document.body.dataset.state === 'down'")
        assert made.end() == 0
    assert not page.errors


@needs_chromium
def test_page_tells_a_failed_engine(page: Page, small_gguf: Path) -> None:
    with life(small_gguf) as made:
        made.finish_loading()
        page.open(f"{made.url}/")
        page.wait_until("document.body.dataset.state === 'ready'")
        made.fail("the device is gone")
        page.wait_until("document.body.dataset.state === 'failed'")
        assert "the device has failed" in text_of(page, "#state")
        colour = "getComputedStyle(document.getElementById('state')).color"
        assert page.evaluate(colour) != page.evaluate("getComputedStyle(document.body).color")


@needs_chromium
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_text_stands_out_from_its_ground(page: Page, server: Server, scheme: str) -> None:
    """WCAG 2.2, 1.4.3: 4.5 to 1 for every text that is shown."""
    page.use_scheme(scheme)
    page.open(f"{server.url}/")
    page.wait_until("document.body.dataset.state === 'ready'")
    assert page.evaluate(FAINT_TEXTS) == []


@needs_chromium
def test_every_part_that_scrolls_or_acts_is_reached_by_tab(page: Page, server: Server) -> None:
    page.open(f"{server.url}/")
    page.wait_until("document.body.dataset.state === 'ready'")
    wanted = page.evaluate(REACHABLE)
    seen = set()
    for _ in range(wanted + 2):
        page.press("Tab")
        seen.add(page.evaluate("document.activeElement.outerHTML.slice(0, 60)"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        body = page.evaluate("document.activeElement === document.body")
        assert body or outline != "none", "what has the focus shows it"
    assert len(seen) >= wanted


def test_page_orders_the_stages_of_the_service(door: InProcess) -> None:
    script = door.get("/status_page.js").text
    listed = re.search(r"STAGES = \[([^\]]*)\]", script)
    assert listed is not None
    assert set(re.findall(r"\w+", listed[1])) == {*REQUEST_STAGES, *BATCH_STAGES}


@needs_chromium
def test_page_asks_for_a_key_where_keys_are_used(page: Page, keyed_server: Server) -> None:
    page.open(f"{keyed_server.url}/")
    page.wait_until("!document.getElementById('key-form').hidden")
    assert page.evaluate("document.getElementById('facts').hidden")
    enter_key(page, "wrong")
    page.wait_until("document.getElementById('key-refusal').innerText.includes('not known')")
    enter_key(page, "root-key")
    page.wait_until("document.body.dataset.state === 'ready'")
    assert not page.evaluate("document.getElementById('facts').hidden")


def work(client: httpx.Client) -> None:
    """A session of eight tokens, and a read of its kv."""
    name = open_session(client)["session_id"]
    push(client, name, 0, [3, 4, 5, 6, 7, 3, 4, 5])
    client.get(f"/v1/sessions/{name}/layers/1/kv?position=0&count=8").raise_for_status()


def enter_key(page: Page, key: str) -> None:
    page.evaluate("document.getElementById('key').focus()")
    page.type(key)
    page.press("Enter")
