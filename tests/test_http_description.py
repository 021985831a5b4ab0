"""The API keeps to its own description: calls made up from it never meet a 500, and every answer has a declared form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from models.toy import tiny_causal_lm
from tests.http_engine import Server, serve
from tests.real_server import Real, real_server

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    with real_server(tiny_causal_lm("llama", 259, 5, max_positions=64), settings={"request_timeout_s": 20}) as real:
        yield real


def operations(real: Real) -> list[tuple[str, str]]:
    """Method and path of everything described."""
    paths = real.client.get("/openapi.json").json()["paths"]
    return [(method, path) for path, described in paths.items() for method in described]


OPERATIONS = [
    ("post", "/v1/completions"),
    ("post", "/v1/chat/completions"),
    ("post", "/tokenize"),
    ("post", "/detokenize"),
    ("get", "/v1/models"),
    ("get", "/v1/models/{name}"),
    ("get", "/v1/schedules"),
    ("get", "/v1/experiments"),
    ("get", "/health"),
    ("get", "/metrics"),
    ("get", "/admin/experiments"),
    ("post", "/admin/experiments"),
    ("get", "/admin/experiments/{name}"),
    ("post", "/admin/experiments/{name}/stop"),
    ("post", "/admin/experiments/{name}/weights"),
    ("post", "/admin/experiments/{name}/promote"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_calls_made_up_from_the_description_are_answered_as_described(real: Real, method: str, path: str) -> None:
    """Generated clients crash on an answer of an undeclared form, and callers cannot mend a 500."""
    schema = schemathesis.openapi.from_dict(real.client.get("/openapi.json").json())
    operation = schema[path][method]
    seen: set[int] = set()

    @settings(
        max_examples=8 if method == "get" else 25 if "admin" in path else 80,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def answered(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            case.body.pop("timeout", None)  # of a moment, it is a 504 as it should be
            for limit in ("max_tokens", "max_completion_tokens"):
                if isinstance(case.body.get(limit), int):
                    case.body[limit] = min(case.body[limit], 12)
        response = case.call(base_url=real.url, timeout=60)
        seen.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    answered()
    names_something = "{name}" in path or (method, path) == ("post", "/admin/experiments")
    assert names_something or 200 in seen, "every call was refused: nothing but refusals was tried"
    assert real.client.get("/health").status_code == 200


def test_every_operation_is_tried(real: Real) -> None:
    """A path of tomorrow must be in the list above, or it is never called."""
    assert set(operations(real)) == set(OPERATIONS)


def test_every_error_that_is_sent_is_declared(real: Real) -> None:
    """One of each kind, by hand; and FastAPI's own 422, which is never sent, is not."""
    described = real.client.get("/openapi.json").json()
    assert not any("422" in operation["responses"] for path in described["paths"].values() for operation in path.values())
    assert {"HTTPValidationError", "ValidationError"}.isdisjoint(described["components"]["schemas"])
    got: list[tuple[str, Any]] = [
        ("/v1/completions", real.complete(top_p=-1)),
        ("/v1/completions", real.complete(model="another")),
        ("/v1/completions", real.client.post("/v1/completions", content=b"x" * 9_000_000)),
        ("/v1/models/{name}", real.client.get("/v1/models/another")),
        ("/tokenize", real.client.post("/tokenize", json={})),
        ("/detokenize", real.client.post("/detokenize", json={"tokens": [-1]})),
    ]
    for path, response in got:
        (operation,) = described["paths"][path].values()
        assert str(response.status_code) in operation["responses"], (path, response.status_code)
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("options", "locked"), [({}, False), ({"api_keys": ["a-key-for-this"]}, True)])
def test_the_description_tells_whether_a_key_is_needed(options: dict[str, Any], locked: bool) -> None:
    """Generated clients ask for a key only then, and the page shows where to enter it."""
    with serve(**options) as server:
        described = description(server)
        completions = described["paths"]["/v1/completions"]["post"]
        assert ("401" in completions["responses"]) == ("security" in completions) == locked
        assert ("securitySchemes" in described.get("components", {})) == locked
        assert "security" not in described["paths"]["/health"]["get"]


def description(server: Server) -> dict[str, Any]:
    """The document."""
    return dict(server.client.get("/openapi.json").json())
