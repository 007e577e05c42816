"""Dashboards and alerts name only metrics and labels that a server exports, in valid PromQL."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import promql_parser
import pytest
import yaml

from tests.server.conftest import serving
from tests.server.test_disaggregation import CONFIG as TRANSFERS
from tests.server.test_metrics import scraped
from tests.server.test_speculation import CONFIG as DRAFTS
from tests.server.test_speculation import usage_of

ROOT = Path(__file__).parents[2]
DASHBOARDS = ("grafana.json", "grafana-cache.json")
VARIABLES = re.compile(r"\$(?:__rate_interval|__interval)")
FREE = frozenset({"status", "handler", "instance", "model_name", "job"})
"""Labels whose values depend on requests and on Prometheus."""
PROMETHEUS = frozenset({"instance", "job"})
"""Labels that Prometheus adds."""


@pytest.fixture(scope="module")
def exported(folder, tmp_path_factory):
    """Name -> label -> values, of a server with tiers, speculation and other engines."""
    kept = tmp_path_factory.mktemp("kept")
    flags = ("--cache-host-gib", "0.05", "--cache-dir", str(kept))
    flags += (f"--speculative-config={json.dumps(DRAFTS)}",)
    flags += (f"--kv-transfer-config={json.dumps(TRANSFERS)}",)
    with serving(folder, *flags) as server, server.http() as http:
        usage_of(http, "/v1/completions")
        http.get("/nowhere")
        found: dict[str, dict[str, set[str]]] = {"up": {}}
        for name, labels in scraped(http):
            own = found.setdefault(name, {})
            for label, value in labels:
                own.setdefault(label, set()).add(value)
        return found


def panels(file):
    found = json.loads((ROOT / "docs" / file).read_text(encoding="utf-8"))["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def rules():
    text = (ROOT / "docs" / "alerts.yml").read_text(encoding="utf-8")
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def expressions():
    for file in DASHBOARDS:
        for panel in panels(file):
            for target in panel["targets"]:
                yield f"{file}: {panel['title']}", VARIABLES.sub("5m", target["expr"])
    for rule in rules():
        yield f"alerts.yml: {rule['alert']}", rule["expr"]


def nodes(expression):
    """Every node of a parsed expression."""
    found = []
    promql_parser.walk(expression, found.append)
    return found


@pytest.mark.parametrize(("where", "text"), list(expressions()))
def test_queries_are_valid_and_name_what_is_exported(exported, where, text):
    selectors = []
    for node in nodes(promql_parser.parse(text)):
        if isinstance(node, promql_parser.VectorSelector):
            selectors.append(node)
        if isinstance(node, promql_parser.MatrixSelector):
            selectors.append(node.vector_selector)
    assert selectors
    for selector in selectors:
        assert selector.name in exported, where
        labels = exported[selector.name]
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels.keys() | PROMETHEUS, (where, matcher.name)
            is_exact = matcher.op == promql_parser.MatchOp.Equal and matcher.name not in FREE
            assert not is_exact or matcher.value in labels[matcher.name], (where, matcher)


@pytest.mark.parametrize(("where", "text"), list(expressions()))
def test_queries_group_by_labels_that_are_exported(exported, where, text):
    for labels in re.findall(r"\bby \(([^)]*)\)", text):
        names = re.findall(r"(?:milepost|process|http)[:\w]+", text)
        known = {label for name in names for label in exported.get(name, ())} | PROMETHEUS
        assert {label.strip() for label in labels.split(",")} <= known, where


@pytest.mark.parametrize("file", DASHBOARDS)
def test_dashboards_are_written_by_their_tool(tmp_path, file):
    tool = ROOT / "tools" / "dashboards"
    subprocess.run([sys.executable, str(tool), str(tmp_path)], check=True)
    assert (tmp_path / file).read_text() == (ROOT / "docs" / file).read_text()


@pytest.mark.parametrize("file", DASHBOARDS)
def test_every_query_keeps_to_the_chosen_instances(file):
    for panel in panels(file):
        for target in panel["targets"]:
            selectors = re.findall(r"\{[^}]*\}", target["expr"])
            names = re.findall(r"(?:milepost|process|http)[:\w]+", target["expr"])
            assert len(selectors) == len(names)
            assert all('instance=~"$instance"' in selector for selector in selectors)
            ours = [name for name in names if name.startswith("milepost:")]
            assert len(ours) == sum('model_name=~"$model"' in selector for selector in selectors)


def test_every_alert_says_what_it_means_and_what_to_do():
    assert len({rule["alert"] for rule in rules()}) == len(rules()) > 20
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert all(rule["annotations"].values())
        assert "$labels.instance" in rule["annotations"]["summary"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_alerts_fire_as_promtool_sees_it(tmp_path):
    file = ROOT / "docs" / "alerts.yml"
    cases = (Path(__file__).parent / "alerts.yml").read_text(encoding="utf-8")
    (tmp_path / "alerts.yml").write_text(cases.replace("RULES", str(file)))
    for words in (["check", "rules", str(file)], ["test", "rules", str(tmp_path / "alerts.yml")]):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
