"""The lines of the table of routes that are about files and batches."""

from __future__ import annotations

from jitney.engine.api.batches import forms, handlers
from jitney.engine.api.routing import HttpRoute

_GET = ("GET",)
_POST = ("POST",)
_DELETE = ("DELETE",)

BATCH_ROUTES = (
    HttpRoute(
        "/v1/files",
        _POST,
        handlers.upload_file,
        "upload a file of requests",
        uploads=True,
        body=forms.FileForm,
        answer=forms.FileAnswer,
    ),
    HttpRoute(
        "/v1/files",
        _GET,
        handlers.list_files,
        "your files",
        query=forms.FileQuery,
        answer=forms.FileList,
    ),
    HttpRoute(
        "/v1/files/{file_id}",
        _GET,
        handlers.show_file,
        "what is known of a file",
        answer=forms.FileAnswer,
    ),
    HttpRoute(
        "/v1/files/{file_id}",
        _DELETE,
        handlers.delete_file,
        "delete a file",
        answer=forms.FileDeleted,
    ),
    HttpRoute(
        "/v1/files/{file_id}/content",
        _GET,
        handlers.file_content,
        "the bytes of a file",
        media_type="application/octet-stream",
    ),
    HttpRoute(
        "/v1/batches",
        _POST,
        handlers.create_batch,
        "answer a file of requests in the background",
        body=forms.BatchBody,
        answer=forms.BatchAnswer,
    ),
    HttpRoute(
        "/v1/batches",
        _GET,
        handlers.list_batches,
        "your batches",
        query=forms.BatchQuery,
        answer=forms.BatchList,
    ),
    HttpRoute(
        "/v1/batches/{batch_id}",
        _GET,
        handlers.show_batch,
        "how far a batch is",
        answer=forms.BatchAnswer,
    ),
    HttpRoute(
        "/v1/batches/{batch_id}/cancel",
        _POST,
        handlers.cancel_batch,
        "cancel a batch",
        answer=forms.BatchAnswer,
    ),
)
