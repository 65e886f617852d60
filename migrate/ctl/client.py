"""Asks a running application over HTTP, with the standard library alone."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

Json = dict[str, Any]


class RefusedError(Exception):
    """The application has understood, and will not: the message is its own."""


class BadRequestError(Exception):
    """What was asked for makes no sense to the application: the message is its own."""


class UnreachableError(Exception):
    """There is no answer to be had: no application, a wrong key, nothing that moves, or not yet."""


class NotYetError(UnreachableError):
    """The application is there and has no answer now: its controller starts, or waits for its workers."""


class Client:
    """One application.

    Raises:
        BadRequestError: a URL that is none.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadRequestError(f"the URL is {url!r}; give one such as http://127.0.0.1:8000")
        self._url = url.rstrip("/")
        self._api_key = api_key
        self._timeout_s = timeout_s

    def get(self, path: str) -> Json:
        """Raises as `post`."""
        return self._send(urllib.request.Request(self._url + path))

    def post(self, path: str, body: Json) -> Json:
        """Raises RefusedError, BadRequestError or UnreachableError."""
        data = json.dumps(body).encode()
        return self._send(urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}))

    def _send(self, request: urllib.request.Request) -> Json:
        if self._api_key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self._api_key}")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                content = json.load(answer)
        except urllib.error.HTTPError as error:
            message = _message_of(error)
            if error.code == HTTPStatus.CONFLICT:
                raise RefusedError(message) from error
            if error.code in (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
                raise BadRequestError(message) from error
            unanswered = NotYetError if error.code == HTTPStatus.SERVICE_UNAVAILABLE else UnreachableError
            raise unanswered(f"{self._url} answers {error.code}: {message}") from error
        except (OSError, ValueError) as error:  # no connection, no answer in time; no JSON
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise UnreachableError(f"{self._url} does not answer as it should: {reason}") from error
        if not isinstance(content, dict):
            raise UnreachableError(f"{self._url} answers something else than a server of this project")
        return content


def _message_of(error: urllib.error.HTTPError) -> str:
    """The application's own words, where it has any."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return str(error.reason)
