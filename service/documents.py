"""The documents written from the operations: `python -m service.documents [--check]`.

The service serves neither; `openapi/openapi.json` and `docs/api.md` are
files that a test compares with this.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from service.api_page import render_page
from service.app import create_app
from service.settings import Settings

_ROOT = Path(__file__).parent.parent
PATH = _ROOT / "openapi" / "openapi.json"
PAGE_PATH = _ROOT / "docs" / "api.md"


def render() -> str:
    """Return the OpenAPI document as its file has it."""
    return json.dumps(create_app(Settings()).openapi(), indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    """Write the document and its page, or with --check say which of them is not current."""
    texts = {PATH: render(), PAGE_PATH: render_page()}
    if "--check" not in sys.argv[1:]:
        for path, text in texts.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")
        return 0
    stale = [p for p, text in texts.items() if not p.exists() or p.read_text("utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(_ROOT)} is not current: run `make openapi`", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
