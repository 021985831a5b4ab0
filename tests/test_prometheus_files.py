"""What Prometheus is given: the metrics page, its configuration, recording rules and alerts, judged by its own tools."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from app.metrics import Metrics
from engine.request import FinishReason, RequestStats, StepStats
from tests.http_engine import ScriptedEngine
from tests.required_tools import MUST_HAVE, required_tool

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "prometheus"


def promtool(*arguments: str, given: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run promtool beside the rules."""
    command = [required_tool("promtool", "prometheus"), *arguments]
    return subprocess.run(command, input=given, capture_output=True, cwd=FOLDER, timeout=30)


def filled_page() -> bytes:
    """A metrics page on which every kind of series has been used."""
    metrics = Metrics()
    metrics.attach(ScriptedEngine())
    metrics.on_step([StepStats("graft", num_steps=1, halts=(("small", "rows"),), token_gaps=[(0.1, 2)], depths=[1])])
    metrics.on_finish(RequestStats("graft", 1, num_output_tokens=2, first_token_s=1.0, admitted_s=0.5), FinishReason.STOP)
    metrics.on_fallback("graft", "ar", "breaker")
    metrics.count_error(400)
    return metrics.text()


def test_promtool_finds_nothing_to_complain_about_on_the_page() -> None:
    """Names without units, counters without _total and families without help are what boards trip over later."""
    done = promtool("check", "metrics", given=filled_page())
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize(("name", "to"), [(b"verify_seconds_total", b"verify_time"), (b"# HELP", b"# NOTHING")])
def test_promtool_does_complain_about_a_page_with_a_fault(name: bytes, to: bytes) -> None:
    """Negative control: a tool that accepts anything would prove nothing."""
    assert promtool("check", "metrics", given=filled_page().replace(name, to)).returncode != 0


def test_configuration_and_rules_are_valid() -> None:
    """Prometheus does not start on a file that it cannot read."""
    done = promtool("check", "config", "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert b"rules found" in done.stdout


def test_rules_do_what_their_tests_say() -> None:
    """An alert that cannot fire is worse than none."""
    done = promtool("test", "rules", "rules_test.yml")
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def test_a_wrong_expectation_fails(tmp_path: Path) -> None:
    """Negative control of the rules' tests."""
    (tmp_path / "rules.yml").write_text((FOLDER / "rules.yml").read_text().replace("[2m]) > 0", "[2m]) > 1e9"))
    (tmp_path / "rules_test.yml").write_text((FOLDER / "rules_test.yml").read_text())
    command = [required_tool("promtool", "prometheus"), "test", "rules", str(tmp_path / "rules_test.yml")]
    done = subprocess.run(command, capture_output=True, timeout=30)
    assert done.returncode != 0 and b"GraftserveNoProgress" in done.stdout + done.stderr


def test_every_rule_has_a_test() -> None:
    """A rule that nobody has seen at work is a guess."""
    rules = [rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]]
    tests = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    fired = {entry["alertname"] for test in tests for entry in test.get("alert_rule_test", []) if entry.get("exp_alerts")}
    silent = {entry["alertname"] for test in tests for entry in test.get("alert_rule_test", []) if not entry.get("exp_alerts")}
    asked = " ".join(entry["expr"] for test in tests for entry in test.get("promql_expr_test", []))
    alerts = {rule["alert"] for rule in rules if "alert" in rule}
    assert fired == alerts and silent == alerts
    assert not [rule["record"] for rule in rules if "record" in rule and rule["record"] not in asked]


def test_rules_speak_of_metrics_that_exist() -> None:
    """A rule about a renamed counter is silent for ever."""
    page = filled_page().decode()
    exported = set(re.findall(r"^(graftserve_\w+)[ {]", page, re.M))
    used = set(re.findall(r"graftserve_\w+", (FOLDER / "rules.yml").read_text()))
    assert used and not used - exported


def test_a_missing_tool_skips_or_fails_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """In continuous integration a skipped test is a test that nobody misses."""
    monkeypatch.delenv(MUST_HAVE, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-tool is not installed; on Debian: apt-get"):
        required_tool("no-such-tool", "package")
    monkeypatch.setenv(MUST_HAVE, "1")
    with pytest.raises(pytest.fail.Exception, match="apt-get install"):
        required_tool("no-such-tool", "package")
