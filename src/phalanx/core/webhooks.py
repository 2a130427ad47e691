"""URLs that messages are POSTed to, and the variables that may hold them in place of a job."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from phalanx.core.url_secrets import looks_like_random_text

VARIABLE_MARK = "$"  # begins the name of an environment variable in place of a URL
# What no token has in it.
_PATH_SEPARATORS = re.compile(r"[^A-Za-z0-9_\-.+=]+")
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
    # A token may stand beside a name, as in /bot123:TOKEN/sendMessage.
    return any(map(looks_like_random_text, _PATH_SEPARATORS.split(unquote(urlsplit(url).path))))
