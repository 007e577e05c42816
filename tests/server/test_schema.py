"""Requests made from the server's own OpenAPI schema never get a 5xx."""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings

from tests.server.conftest import serving

TWINS = 4
"""Part of the examples that an operation gets whose body another has read already: the same code
reads it again."""
NIGHTLY = pytest.param(300, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])
"""Examples of each operation; to make one takes longer than to answer it."""


@pytest.fixture(scope="module")
def schema(folder):
    """Of a server whose answers are short, so that the requests that are right take no time."""
    import schemathesis  # half a second in every process that collects tests

    with serving(folder, "--max-model-len", "96", "--max-waiting", "8") as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        assert server.process.poll() is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("num_examples", [20, NIGHTLY])
def test_no_server_error(schema, num_examples, mode):
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error

    mode = GenerationMode(mode)
    checks = list(HealthCheck)
    labels, bodies = [], set()
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # nothing in it can be wrong
        labels.append(operation.label)
        body = json.dumps(operation.definition.raw.get("requestBody", {}))
        models = set(re.findall(r"#/components/schemas/(\w+)", body))
        count = num_examples // TWINS if models and models <= bodies else num_examples
        bodies |= models
        drawn = settings(max_examples=count, suppress_health_check=checks)

        @drawn
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case):
            response = case.call()
            case.validate_response(response, checks=[not_a_server_error])

        check()
    assert "POST /v1/chat/completions" in labels
    assert len(labels) >= 4
    assert {"ChatRequest", "CompletionRequest", "MessagesRequest", "ResponsesRequest"} <= bodies
