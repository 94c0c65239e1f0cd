"""The metrics of a server that has played the demo: few series, sound names, buckets that fit."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engram_client import EngramClient
from service.demo_judge import Answer
from service.demo_story import Story
from service.metrics import BATCH_STAGES, REQUEST_STAGES
from tests.integration.server import ROOT, Server
from tests.service.door import InProcess, i32, i64

MAX_SERIES = 400
NO_DEVICE = {"h2d", "d2h"}


class Indifferent:
    """A judge that keeps what each stage was about; `make demo` has the real one."""

    def __init__(self) -> None:
        self.alive: dict[str, list[int]] = {}

    def keep(self, answer: Answer) -> None:
        self.alive[answer.reading.stage] = [i for i in answer.reading.held if i != -1]

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@pytest.fixture(scope="module")
def text(demo_server: Server) -> str:
    """What /metrics tells after the demo's story, and after one refusal."""
    token_ids = random.Random(1).choices(range(200, 400), k=900)
    url = demo_server.url
    with EngramClient(url) as client, EngramClient(url) as second:
        judge = Indifferent()
        Story(client, second, judge, token_ids).play()  # type: ignore[arg-type]
    assert judge.alive["second client"] == token_ids, "the demo streams its text to the end"
    with demo_server.client() as plain:
        plain.get("/v1/sessions/77")
        return plain.get("/metrics").text


def test_a_demo_run_makes_few_series(text: str) -> None:
    series = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert 100 < len(series) <= MAX_SERIES


def test_counters_have_no_series_of_their_creation(text: str) -> None:
    assert "_created" not in text


def test_every_stage_of_the_demo_is_told(text: str) -> None:
    families = {family.name: family for family in text_string_to_metric_families(text)}
    stages = {sample.labels["stage"] for sample in families["engram_stage_seconds"].samples}
    assert stages == {*REQUEST_STAGES, *BATCH_STAGES} - NO_DEVICE


def documented_stages() -> list[str]:
    text = (ROOT / "docs/operating.md").read_text("utf-8").split("| stage |")[1].split("\n\n")[0]
    names = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", text, re.MULTILINE)
    return [name for group in names for name in re.findall(r"\w+", group)]


def test_every_stage_is_documented_and_in_the_help(text: str) -> None:
    assert set(documented_stages()) == {*REQUEST_STAGES, *BATCH_STAGES}
    told = re.search(r"# HELP engram_stage_seconds (.*)", text)
    assert told is not None
    assert all(stage in told[1] for stage in documented_stages())
    assert "h2d and d2h exist on CUDA alone" in told[1]


def test_a_device_with_all_stages_makes_few_series_too(text: str) -> None:
    series = [line for line in text.splitlines() if line and not line.startswith("#")]
    of_one_stage = [line for line in series if 'stage="gate"' in line]
    assert len(series) + len(NO_DEVICE) * len(of_one_stage) <= MAX_SERIES


def test_ledger_build_loading_and_refusals_are_told(text: str) -> None:
    told = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for purpose in ("kv store", "wkv", "in flight", "reserve"):
        assert told["engram_ledger_bytes", "host", purpose] > 0
    assert any(name == "engram_build_info" and len(labels) > 1 for name, *labels in told)
    assert 0 <= told["engram_load_stage_ratio",] <= 1
    refused = [
        key for key in told if key[0] == "engram_requests_total" and "unknown_session" in key
    ]
    assert sum(told[key] for key in refused) >= 1


def test_a_demo_run_moves_what_it_should(text: str) -> None:
    """Tokens, rows, batches, the store, sessions, cuts, bytes; nothing was evicted or expired."""
    total: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            total[sample.name] = total.get(sample.name, 0.0) + sample.value
    for name in (
        *("tokens_pushed", "rows_gathered", "batches", "batch_tokens", "ahead_tokens"),
        *("store_hits", "store_misses", "store_duplicates", "sessions_opened", "sessions_closed"),
        *("truncating_pushes", "rewinds", "positions_cut", "received_bytes", "sent_bytes"),
    ):
        assert total[f"engram_{name}_total"] > 0, name
    for name in ("store_evictions", "sessions_expired", "ahead_dropped"):
        assert total[f"engram_{name}_total"] == 0, name
    assert total["engram_largest_batch_tokens"] > 1
    assert total["engram_store_entries"] > 0
    assert total["engram_ready"] == 1
    assert total["engram_body_bytes_count"] > 0
    assert total["engram_request_seconds_count"] > 0


def test_only_counters_carry_operation_and_code(text: str) -> None:
    for family in text_string_to_metric_families(text):
        labels = {label for sample in family.samples for label in sample.labels}
        assert family.type == "counter" or not labels & {"operation", "code"}, family.name
        assert family.documentation, family.name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_metrics_of_a_demo_run(text: str) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, text=True, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("output", "stage"), [("kv", "read_kv"), ("rows", "rows"), ("hash_ids", "hash_ids")]
)
def test_tensor_answers_carry_their_timing(door: InProcess, output: str, stage: str) -> None:
    session = door.open()["session_id"]
    door.push(session, 0, [3, 4, 5])
    read = door.get(f"/v1/sessions/{session}/layers/1/{output}?position=0&count=3")
    step = door.step(
        {"output": output, "layers": "1"},
        session_id=i64(int(session)), position=i64(0), count=i32(3),
    )  # fmt: skip
    for answer in (read, step):
        timing = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
        assert stage in timing
        assert all(float(ms) >= 0 for ms in timing.values())
    assert "server-timing" not in door.get("/livez").headers
