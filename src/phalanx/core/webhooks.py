"""URLs that messages are POSTed to, and the variables that may hold them in place of a job."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from phalanx.core.url_secrets import looks_like_random_text

VARIABLE_MARK = "$"  # begins the name of an environment variable in place of a URL
_VARIABLE_PATTERN = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*")


def is_variable_reference(text: str) -> bool:
    """True for `$NAME`."""
    return _VARIABLE_PATTERN.fullmatch(text) is not None


def is_http_url(text: str) -> bool:
    """True for an absolute http:// or https:// URL with a host."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def has_secret_in_path(url: str) -> bool:
    """True where a part of the path looks like a token: whoever has the URL of such a webhook may
    write to it."""
    return any(looks_like_random_text(part) for part in urlsplit(url).path.split("/"))
