"""A short load by clients of every kind on a real server: nothing fails, and nothing is left behind."""

from __future__ import annotations

from serving import debug_llm

from bench.load import run


def test_a_short_load() -> None:
    result = run(str(debug_llm().model_dir), 12, 3.0)
    assert set(result["statuses"]) <= {"200", "400", "499", "503"}, result
    assert result["statuses"]["200"] > 0
    assert result["idle"]
    assert result["pages_used_when_idle"] == 0
    assert result["after"]["handles"] <= result["warm"]["handles"] + 4
