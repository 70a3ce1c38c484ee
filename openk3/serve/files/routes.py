"""/v1/files: upload, list, look at, read and delete files. Those of other API keys are not there (404)."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from openk3.serve.caller import caller
from openk3.serve.errors import ApiError, shown
from openk3.serve.files.store import FileStore, StoredFile
from openk3.serve.files.text import read_file
from openk3.serve.files.upload import FormReader
from openk3.serve.openapi import form_of

router = APIRouter()

PURPOSES = ("assistants", "batch", "evals", "file-extract", "fine-tune", "user_data", "vision")
# As in OpenAI's API: an hour to thirty days.
_EXPIRY_RANGE_S = (3600, 2592000)
_EXPIRY = ("expires_after[anchor]", "expires_after[seconds]")
_FORM = {
    "file": {"type": "string", "format": "binary"},
    "purpose": {"enum": list(PURPOSES)},
    _EXPIRY[0]: {"description": "created_at, where there are seconds"},
    _EXPIRY[1]: {"description": "after so many seconds, from {:,} to {:,}".format(*_EXPIRY_RANGE_S)},
}


@router.post("/v1/files", openapi_extra=form_of(_FORM, ("file", "purpose")))
async def upload_file(request: Request) -> Response:
    store = _store(request)
    with store.writer() as writer:
        form = FormReader(request.headers.get("content-type", ""), writer)
        await form.read(request.stream())
        purpose = _purpose(form)
        expires_after_s = _expires_after_s(form.fields)
        for name in form.fields:
            if name not in ("purpose", *_EXPIRY):
                raise ApiError(400, f"Unknown parameter: {shown(name)}.", param=name, code="unknown_parameter")
        assert form.filename is not None
        file = await asyncio.to_thread(
            writer.commit,
            filename=form.filename,
            purpose=purpose,
            owner=caller().owner,
            expires_after_s=expires_after_s,
        )
    return JSONResponse(file.to_json())


@router.get("/v1/files")
def list_files(
    request: Request,
    purpose: str | None = None,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    try:
        files, more = _store(request).list(caller().owner, purpose=purpose, after=after, limit=limit, order=order)
    except KeyError:
        raise ApiError(
            400, f"Invalid 'after': there is no file {shown(after)}.", param="after", code="invalid_value"
        ) from None
    return page([file.to_json() for file in files], more)


@router.get("/v1/files/{file_id}")
def get_file(request: Request, file_id: str) -> dict[str, Any]:
    return require_file(_store(request), file_id).to_json()


@router.get(
    "/v1/files/{file_id}/content",
    response_class=FileResponse,
    responses={200: {"content": {"application/octet-stream": {}}}},
)
def file_content(request: Request, file_id: str) -> Response:
    """The file's bytes; of one with the purpose "file-extract" its text, in the form of Kimi's API."""
    store = _store(request)
    file = require_file(store, file_id)
    if file.purpose == "file-extract":
        document = read_file(store, file, "file_id")
        said = {"content": document.text, "file_type": document.format, "filename": file.filename, "type": "file"}
        return JSONResponse(said | {"title": ""})
    # As a download of no particular type: a browser must not show a stranger's HTML as a page of this server.
    disposition = f"attachment; filename*=UTF-8''{quote(file.filename)}"
    headers = {"Content-Disposition": disposition, "X-Content-Type-Options": "nosniff"}
    return FileResponse(store.path(file), media_type="application/octet-stream", headers=headers)


@router.delete("/v1/files/{file_id}")
def delete_file(request: Request, file_id: str) -> dict[str, Any]:
    store = _store(request)
    require_file(store, file_id)
    store.delete(file_id, caller().owner)
    request.app.state.search.forget(file_id)
    return {"id": file_id, "object": "file", "deleted": True}


def require_file(store: FileStore, file_id: str, param: str = "file_id") -> StoredFile:
    """Return the caller's file.

    Raises:
        ApiError: 404, there is none of that id.
    """
    file = store.get(file_id, caller().owner)
    if file is None:
        raise ApiError(404, f"There is no file {shown(file_id)}.", param=param, code="file_not_found")
    return file


def page(data: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    """A page of a list, as OpenAI's API gives it."""
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}


def _store(request: Request) -> FileStore:
    store: FileStore = request.app.state.files
    return store


def _purpose(form: FormReader) -> str:
    for name, value in (("file", form.filename), ("purpose", form.fields.get("purpose"))):
        if value is None:
            raise ApiError(400, f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
    purpose = form.fields["purpose"]
    if purpose not in PURPOSES:
        raise ApiError(
            400,
            f"Invalid 'purpose': {shown(purpose)} is none of {', '.join(PURPOSES)}.",
            param="purpose",
            code="invalid_value",
        )
    return purpose


def _expires_after_s(fields: dict[str, str]) -> int | None:
    anchor, seconds = (fields.get(name) for name in _EXPIRY)
    if anchor is None and seconds is None:
        return None
    low, high = _EXPIRY_RANGE_S
    if anchor != "created_at" or seconds is None or not seconds.isascii() or not seconds.isdecimal():
        fine = False
    else:
        fine = len(seconds) < 10 and low <= int(seconds) <= high
    if not fine:
        raise ApiError(
            400,
            "Invalid 'expires_after': it has the anchor 'created_at' and from "
            f"{low:,} to {high:,} seconds, not {shown(anchor)} and {shown(seconds)}.",
            param="expires_after",
            code="invalid_value",
        )
    return int(seconds or 0)
