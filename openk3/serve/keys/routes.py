"""GET /v1/usage: what the key that asks has used, and what its limits are."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from openk3.serve.caller import caller

router = APIRouter()

MAX_DAYS = 3660


@router.get("/v1/usage")
def usage(request: Request, days: Annotated[int, Query(ge=1, le=MAX_DAYS)] = 30) -> dict[str, Any]:
    who = caller()
    rows = request.app.state.ledger.rows(days=days, owner=who.owner)
    return {
        "object": "list",
        "key": None if who.key is None else who.key.to_json(),
        "tokens_today": request.app.state.ledger.tokens_today(who.owner),
        "data": [row.to_json() for row in rows],
    }
