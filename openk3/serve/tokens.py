"""POST /tokenize and /detokenize: text or chats to token ids and back, in the form that vLLM gave them.

A chat has the tokens that chat completions would read.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Self

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, model_validator

from openk3.serve.bodies import Body, unsupported, wrong
from openk3.serve.errors import ApiError
from openk3.serve.loading import ModelSlot
from openk3.serve.openai_types import ChatRequest, Messages, Tools
from openk3.serve.openapi import body_of
from openk3.serve.prompts import chat_turn, text_ids
from openk3.serve.validation import parse_body

router = APIRouter()

# More than any context; a larger list would only be work.
_MAX_TOKENS = 4_000_000


class TokenizeRequest(Body):
    """The body of POST /tokenize. `add_special_tokens` is for prompts; chats have what their template writes."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    add_generation_prompt: Annotated[None, unsupported(True)] = None
    chat_template: Annotated[None, unsupported()] = None
    chat_template_kwargs: Annotated[None, unsupported({})] = None
    continue_final_message: Annotated[None, unsupported(False)] = None

    @model_validator(mode="after")
    def _one_kind_of_text(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("Give either 'prompt' or 'messages'.", param="prompt", code="invalid_parameter_combination")
        return self


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]] = Field(max_length=_MAX_TOKENS)


@router.post("/tokenize", openapi_extra=body_of(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """The token ids of a text or a chat, and how many there are."""
    slot: ModelSlot = request.app.state.slot
    slot.require()
    body = await parse_body(request, TokenizeRequest)
    llm = slot.require(body.model)
    if body.messages is not None:
        chat = ChatRequest(model=slot.name, messages=body.messages, tools=body.tools)
        ids = (await chat_turn(llm, chat)).prompt_ids
    else:
        ids = await text_ids(llm, body.prompt or "", "prompt", body.add_special_tokens is not False)
    strings = [llm.tokenizer.backend.id_to_token(token) for token in ids] if body.return_token_strs else None
    return JSONResponse({"count": len(ids), "max_model_len": llm.max_model_len, "tokens": ids, "token_strs": strings})


@router.post("/detokenize", openapi_extra=body_of(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """The text of token ids, control tokens spelled out."""
    slot: ModelSlot = request.app.state.slot
    slot.require()
    body = await parse_body(request, DetokenizeRequest)
    llm = slot.require(body.model)
    for i, token in enumerate(body.tokens):
        if token >= llm.config.vocab_size:
            raise ApiError(
                400,
                f"Invalid 'tokens[{i}]': {token} is not a token id; they go from 0 to {llm.config.vocab_size - 1}.",
                param=f"tokens[{i}]",
                code="invalid_value",
            )

    def text() -> dict[str, Any]:
        return {"prompt": llm.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    return JSONResponse(await asyncio.to_thread(text))
