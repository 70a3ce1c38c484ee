"""The OpenAPI document, and requests made up from it: the server answers each as the document says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import schemathesis
from chat_support import chat_llm, tokenizer
from hypothesis import HealthCheck, given, settings
from numpy.typing import NDArray
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from serving import MODEL, live

from openk3.engine.request import SamplingParams
from openk3.engine.sampler import sample_token
from openk3.serve.app import create_app

# What a schema cannot say, such as that the results of calls fit the calls, is refused all the same.
LEFT_OUT = "positive_data_acceptance"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = create_app(lambda: chat_llm("qwen"), model_name=MODEL, web=False, owns_model=False)
    with live(app) as url:
        yield url


@pytest.fixture(scope="module")
def document(url: str) -> dict[str, Any]:
    """The server's document; made-up requests are for the model that is there."""
    document: dict[str, Any] = httpx.get(f"{url}/openapi.json").json()
    for schema in document["components"]["schemas"].values():
        if schema.get("properties", {}).get("model", {}).get("type") == "string":
            schema["properties"]["model"] = {"enum": [MODEL]}
    return document


@pytest.fixture
def terse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that ends its replies as soon as it may."""

    def sample(logits: NDArray[np.float32], params: SamplingParams, *rest: Any) -> int:
        logits = logits.copy()
        logits[list(tokenizer("qwen").eos_token_ids)] += 1000
        return sample_token(logits, replace(params, logit_bias={}, temperature=0.0), *rest)

    monkeypatch.setattr("openk3.engine.engine.sample_token", sample)


def test_every_route_is_described(document: dict[str, Any], url: str) -> None:
    assert document["openapi"].startswith("3.1")
    listed = httpx.get(f"{url}/nothing").json()["error"]["message"]
    for path, operations in document["paths"].items():
        assert path in listed
        for method, operation in operations.items():
            if method == "post" and not path.endswith("/cancel"):
                ((kind, body),) = operation["requestBody"]["content"].items()
                if kind == "application/json":
                    assert body["schema"]["$ref"].rpartition("/")[2] in document["components"]["schemas"]
                else:
                    assert (path, kind) == ("/v1/files", "multipart/form-data")
            assert {"200", "4XX", "5XX"} <= operation["responses"].keys()
    assert "ChatRequest" in document["components"]["schemas"]
    assert not [name for name in document["components"]["schemas"] if "__" in name]  # two models of one name
    assert "422" not in json.dumps(document["paths"])
    for page in ("/docs", "/redoc"):
        assert httpx.get(f"{url}{page}").status_code == 404  # they would load foreign scripts


def test_a_few_made_up_requests(document: dict[str, Any], url: str, terse: None) -> None:
    load_all_checks()
    left_out = [CHECKS.get_one(LEFT_OUT)]
    answered: dict[int, int] = {}
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = found.ok()
        # Nothing can be wrong with a request that has no body and no parameters.
        wrong = [GenerationMode.NEGATIVE] if operation.method == "post" and operation.body else []
        for mode in (GenerationMode.POSITIVE, *wrong):

            @settings(
                max_examples=2, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: Case) -> None:
                response = case.call_and_validate(base_url=url, excluded_checks=left_out, timeout=60)
                answered[response.status_code] = answered.get(response.status_code, 0) + 1

            check()
    assert answered[200] > 5 and answered[400] > 5 and not [status for status in answered if status >= 500]


@pytest.mark.slow
def test_many_made_up_requests(document: dict[str, Any], url: str, terse: None, tmp_path: Path) -> None:
    """All of Schemathesis: edge cases of every field, random requests, and sequences of them."""
    file = tmp_path / "openapi.json"
    file.write_text(json.dumps(document))
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(file), "--url", url, "--checks", "all"]
    options = ["--exclude-checks", LEFT_OUT, "--max-examples", "100", "--request-timeout", "60"]
    run = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert run.returncode == 0, run.stdout
