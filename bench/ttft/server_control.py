"""Requests to a server other than generation: health, facts, and flushing its cache."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

from tutti.bench.ttft.http import Endpoint, ServerError

_CALL_S = 30.0
_FLUSH_S = 60.0
_FLUSH_PAUSE_S = 0.2
#: Parts of the names of facts that contain secrets or addresses.
_PRIVATE = ("key", "secret", "password", "host", "addr", "_ip", "nccl_port", "url")


class Control:
    """Calls to one server."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def call(self, method: str, path: str, *, timeout_s: float = _CALL_S) -> tuple[int, str]:
        """Status and text, also of an error status.  Raises ServerError without an answer."""
        url = f"{self._endpoint.url}{path}"
        headers = dict(self._endpoint.headers)
        request = urllib.request.Request(url, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        except (OSError, ValueError) as error:
            raise ServerError(
                f"no server answers at {self._endpoint.url} ({error}); start one, for instance "
                "with `tutti bench serve`, and give its --url"
            ) from error

    def is_up(self) -> bool:
        """Whether the server reports that it is healthy."""
        try:
            return self.call("GET", "/health", timeout_s=5)[0] == 200
        except ServerError:
            return False

    def facts(self) -> dict[str, Any]:
        """Reported arguments and state of the server, without secrets and addresses."""
        status, text = self.call("GET", "/server_info")
        if status != 200:
            return {}
        try:
            found = public(json.loads(text))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def model(self) -> tuple[str, int | None]:
        """The served model's name and its context in tokens (OpenAI's /v1/models)."""
        status, text = self.call("GET", "/v1/models")
        try:
            (first, *_) = json.loads(text)["data"] if status == 200 else [{}]
            name, length = str(first.get("id", "default")), first.get("max_model_len")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ServerError(
                f"the answer of /v1/models is not a list of models ({error})"
            ) from error
        return name, length if isinstance(length, int) else None

    def flush(self) -> None:
        """Empties the server's own caches, not its storage.  SGLang refuses while requests run."""
        deadline = time.monotonic() + _FLUSH_S
        status, text = 0, ""
        while time.monotonic() < deadline:
            status, text = self.call("POST", "/flush_cache")
            if status == 200:
                return
            if status in (404, 405):
                raise ServerError("the server has no /flush_cache; say --no-flush")
            if status in (401, 403):
                raise ServerError("the server wants a key for /flush_cache; give --api-key")
            time.sleep(_FLUSH_PAUSE_S)
        raise ServerError(f"the server does not flush its cache (status {status}: {text[:200]})")


def public(value: Any, name: str = "") -> Any:
    """Returns JSON data without secrets and addresses, and with only the last part of paths."""
    if isinstance(value, dict):
        kept = {k: public(v, k) for k, v in value.items() if not _is_private(k)}
        return {k: v for k, v in kept.items() if v is not None and v != [] and v != {}}
    if isinstance(value, list):
        return [public(item) for item in value]
    if not isinstance(value, str):
        return value
    if value.startswith("{"):
        try:
            return public(json.loads(value))
        except ValueError:
            return value
    return value.rstrip("/").rpartition("/")[2] if value.startswith(("/", "~", ".")) else value


def _is_private(name: str) -> bool:
    return any(part in name.lower() for part in _PRIVATE)
