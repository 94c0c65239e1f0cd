"""The status page: static, closed to foreign content; a real browser sees it update and fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.door import open_session, push
from tests.integration.server import Server, running
from tests.service.browser import CHROMIUM, Page, chromium
from tests.service.door import InProcess, refused

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
