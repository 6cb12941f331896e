"""The refusals of Ray Serve's proxy: in the API's form, naming the value, the limit and the setting."""

from services.api_errors import ApiError, over_limit
from services.proxy_limits import VARIABLE, ProxyLimits


def url_too_long(size: int, limits: ProxyLimits) -> ApiError:
    return _over(414, "URL", f"{size} bytes", limits.max_url_bytes, "max_url_bytes")


def too_many_headers(count: int, limits: ProxyLimits) -> ApiError:
    return _over(431, "headers", f"{count} fields", limits.max_headers, "max_headers")


def headers_too_long(size: int, limits: ProxyLimits) -> ApiError:
    return _over(431, "headers", f"{size} bytes", limits.max_header_bytes, "max_header_bytes")


def body_too_large(size: int, limits: ProxyLimits) -> ApiError:
    knobs = f"gateway.limits.max_body_bytes; on a cluster max_body_bytes of {VARIABLE} too"
    return over_limit(413, "body", f"{size} bytes or more", limits.max_body_bytes, knobs)


def too_much_held(size: int, limits: ProxyLimits) -> ApiError:
    error = _over(503, "bodies", f"{size} bytes of all requests in hand", limits.max_held_bytes, "max_held_bytes")
    error.headers["Retry-After"] = "1"
    return error


def _over(status: int, field: str, value: str, limit: int, setting: str) -> ApiError:
    return over_limit(status, field, value, limit, f"{setting} of {VARIABLE}")
