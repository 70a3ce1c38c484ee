"""The two real models against Transformers on the same dequantized weights: greedy tokens are identical.

The naive comparison is Transformers' own model class of the checkpoint's family with its own attention and cache, on
the same local directory. Ours is the engine: paged, batched, all prompts at once.

With integer weights the kernels also round activations to 15 bits. There the comparison is the PyTorch runner on the
numbers that the integers stand for, in float32, and greedy tokens are identical up to ties (`TIE`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openk3.engine import EngineConfig
from openk3.llm import LLM, load
from openk3.weights import load_model, resolve

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village,",
    "The three laws of thermodynamics state that",
    "Q: What is 17 + 25?\nA:",
    "<html>\n<head>\n<title>",
    "Water is made of hydrogen and",
    "import numpy as np\n\nx = np.",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8,",
)

# Two tokens whose log-probabilities are closer than this may change places when activations are rounded to 15 bits.
TIE = 0.02


def transformers_greedy(directory: Path, count: int) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, repetition_penalty=1.0,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        found.append(out[0, ids.shape[1] :].tolist())
    return found


def ours_greedy(llm: LLM, count: int) -> list[list[int]]:
    responses = llm.batch_generate(list(PROMPTS), batch_size=10, temperature=0.0, max_tokens=count, ignore_eos=True)
    return [response.token_ids for response in responses]


def test_default_model_200_greedy_tokens(smollm2: LLM, smollm2_dir: Path) -> None:
    assert ours_greedy(smollm2, 20) == transformers_greedy(smollm2_dir, 20)


def test_default_model_logits(smollm2_dir: Path) -> None:
    ids = torch.tensor(
        [AutoTokenizer.from_pretrained(smollm2_dir).encode("The quick brown fox 敏捷的 🦊 jumps.\n" * 8)]
    )
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()(ids).logits
        found = load_model(smollm2_dir)(ids).logits
    # The logits of this model reach 30, and float32 keeps seven digits.
    assert (found - expected).abs().max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_real_models_200_greedy_tokens_on_each_of_10_prompts(name: str) -> None:
    directory = resolve(name)
    with load(str(directory)) as llm:
        found = ours_greedy(llm, 200)
    assert found == transformers_greedy(directory, 200)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_integer_weights_give_the_tokens_of_the_float32_numbers_they_stand_for(name: str, weights: str) -> None:
    settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "logprobs": 2}
    replies = []
    for runner in ("cpu", "torch"):
        engine = EngineConfig(weights=weights, runner=runner, kv_format="float32")  # type: ignore[arg-type]
        with load(name, engine=engine) as llm:
            replies.append(llm.batch_generate(list(PROMPTS), batch_size=10, **settings))
    identical = 0
    for fast, exact in zip(*replies, strict=True):
        assert fast.logprobs is not None
        assert exact.logprobs is not None
        for ours, theirs in zip(fast.logprobs, exact.logprobs, strict=True):
            assert abs(ours.logprob - theirs.logprob) < TIE
            if ours.token_id != theirs.token_id:  # what follows answers another text
                first, second = theirs.top
                assert ours.token_id == second.token_id
                assert first.logprob - second.logprob < TIE
                break
        else:
            identical += 1
    assert identical >= 8
