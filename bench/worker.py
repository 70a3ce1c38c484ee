"""One contender in a process of its own: token ids in on stdin, times out on stdout, one JSON object a line.

A process each keeps their thread pools and settings apart: what one library tells MKL or OpenMP must not slow another.
A worker that waits for its next line uses no CPU. Only the standard library is imported here, so that a contender may
live in any Python environment.

    {"prompts": [[1, 2, 3]], "new_tokens": 4, "flash_attention": false}
    {"first_s": 0.1, "total_s": 0.2, "tokens": [[5, 6, 7, 8]]}
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Request:
    """What to do: all prompts at once and that many new tokens for each, greedily, whatever token ends a text.

    Attributes:
        prompts: token ids, equally many in each.
        flash_attention: for a contender that leaves the choice.
    """

    prompts: list[list[int]]
    new_tokens: int
    flash_attention: bool = False


@dataclass(frozen=True)
class Run:
    """What one request took.

    Attributes:
        first_s: seconds until every prompt had its first token.
        total_s: seconds until every prompt had its last.
        tokens: the new tokens of each prompt.
    """

    first_s: float
    total_s: float
    tokens: list[list[int]]


Contender = Callable[[Request], Run]


def serve(make: Callable[[], Contender]) -> None:
    """Make the contender, say so, and answer requests until stdin ends.

    Everything else that libraries print to stdout goes to stderr.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    contender = make()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(asdict(contender(Request(**json.loads(line))))), file=answers, flush=True)
