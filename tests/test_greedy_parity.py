"""The two real models against Transformers on the same dequantized weights: greedy tokens are identical.

The naive comparison is Transformers' own model class of the checkpoint's family with its own attention and cache, on
the same local directory. Ours is the engine: paged, batched, all prompts at once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

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
