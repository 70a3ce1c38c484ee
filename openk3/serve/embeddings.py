"""POST /v1/embeddings: texts in, vectors out. The encoder is loaded at the first request."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from openk3.embedder import Embedder
from openk3.serve.bodies import wrong
from openk3.serve.caller import caller
from openk3.serve.errors import ApiError, shown
from openk3.serve.keys.ledger import Usage
from openk3.serve.openapi import body_of
from openk3.serve.sse import while_connected
from openk3.serve.validation import parse_body

router = APIRouter()

MAX_INPUTS = 2048


def _input(value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or len(texts) > MAX_INPUTS:
        raise wrong(f"Invalid 'input': expected a text, or an array of 1 to {MAX_INPUTS} texts.", param="input")
    if not all(isinstance(text, str) for text in texts):
        raise wrong(
            "Invalid 'input': token ids are not taken, since those of another tokenizer would give wrong vectors; send "
            "text (LangChain: check_embedding_ctx_length=False).",
            param="input",
        )
    return texts


class EmbeddingsRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    model: str
    input: Annotated[list[str], PlainValidator(_input, json_schema_input_type=str | list[str])]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1)
    user: Any = None  # has no bearing here


class Embeddings:
    """The encoder of a server: loaded once, in a thread that does all of its work.

    Args:
        name: the encoder's id in the API.
        load: returns it.
    """

    def __init__(self, name: str, load: Callable[[], Embedder]) -> None:
        self.name = name
        self._load = load
        self._embedder: Embedder | None = None
        self._thread = ThreadPoolExecutor(1, "openk3-embeddings")

    async def embedder(self) -> Embedder:
        """
        Raises:
            ApiError: 503, it cannot be loaded.
        """
        try:
            return await self._run(self._require)
        except (ValueError, OSError) as error:
            raise ApiError(503, f"The embedding model is not available: {error}.", code="model_failed") from None

    def _require(self) -> Embedder:
        if self._embedder is None:
            self._embedder = self._load()
        return self._embedder

    async def vectors(self, embedder: Embedder, tokens: list[list[int]]) -> np.ndarray[Any, Any]:
        """A group of texts at a time, so that others and a client's going away have their turn."""
        vectors = np.zeros((len(tokens), embedder.dimensions), np.float32)
        groups = embedder.groups(tokens)
        while (done := await self._run(lambda: next(groups, None))) is not None:
            vectors[done[0]] = done[1]
        return vectors

    async def _run(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


@router.post("/v1/embeddings", openapi_extra=body_of(EmbeddingsRequest))
async def embeddings(request: Request) -> Response:
    service: Embeddings = request.app.state.embeddings
    body = await parse_body(request, EmbeddingsRequest)
    if body.model != service.name:
        raise ApiError(
            404,
            f"The embedding model {shown(body.model)} does not exist here; this server has '{service.name}'.",
            param="model",
            code="model_not_found",
        )
    embedder = await service.embedder()
    if body.dimensions is not None and body.dimensions > embedder.dimensions:
        raise ApiError(
            400,
            f"Invalid 'dimensions': the vectors of this model have {embedder.dimensions}, not {body.dimensions}.",
            param="dimensions",
            code="integer_above_max_value",
        )
    try:
        tokens = await asyncio.to_thread(embedder.tokenize, body.input)
    except ValueError as error:
        place, _, why = str(error).partition(": ")
        param = place.replace("texts", "input")
        raise ApiError(400, f"Invalid '{param}': {why}.", param=param, code="invalid_value") from None
    count = sum(map(len, tokens))
    account = caller().account
    if account is not None:
        account.begin(count)
    vectors = await while_connected(request.receive, service.vectors(embedder, tokens))
    if account is not None:
        account.end(service.name, Usage(1, count))
    if body.dimensions is not None:
        vectors = vectors[:, : body.dimensions]
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    data = [
        {
            "object": "embedding",
            "index": i,
            "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode()
            if body.encoding_format == "base64"
            else vector.tolist(),
        }
        for i, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return JSONResponse({"object": "list", "data": data, "model": service.name, "usage": usage})
