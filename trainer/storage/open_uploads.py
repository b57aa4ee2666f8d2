"""Abort multipart uploads that a dead writer has left open in S3: they cost as much as objects.

obstore can't list them, so these two requests are signed here, by the secret key in the environment
(https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html). With credentials of
a machine's role, and in the other stores, a rule of the bucket or the store itself removes them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from trainer.storage.object_store import S3_ENDPOINTS

KEPT = timedelta(days=1)
"""Younger uploads may be those of a living writer."""
_UPLOAD = re.compile(r"<Upload>.*?</Upload>", re.DOTALL)
_TIMEOUT_S = 30.0


def abort_open_uploads(url: str, now: datetime | None = None) -> int:
    """Abort the uploads below an `s3://` URL that are older than `KEPT`. Returns how many; 0 in
    other stores and without a key in the environment. Raises OSError if a request fails."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "s3" or "AWS_SECRET_ACCESS_KEY" not in os.environ:
        return 0
    prefix = parts.path.strip("/") + "/"
    answer = _request("GET", f"/{parts.netloc}", {"prefix": prefix.lstrip("/"), "uploads": ""})
    aborted = 0
    for upload in _UPLOAD.findall(answer):
        begun = datetime.fromisoformat(_text(upload, "Initiated"))
        if (now or datetime.now(UTC)) - begun > KEPT:
            _request("DELETE", f"/{parts.netloc}/{_text(upload, 'Key')}",
                     {"uploadId": _text(upload, "UploadId")})
            aborted += 1
    return aborted


def _text(xml: str, tag: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", xml, re.DOTALL)
    return "" if found is None else found[1]


def _request(method: str, path: str, query: Mapping[str, str]) -> str:
    """A signed request to the S3 endpoint of the environment; returns the body."""
    env = os.environ
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or "us-east-1"
    endpoint = next(filter(None, map(env.get, S3_ENDPOINTS)),
                    f"https://s3.{region}.amazonaws.com").rstrip("/")
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": urllib.parse.urlsplit(endpoint).netloc, "x-amz-date": moment,
               "x-amz-content-sha256": hashlib.sha256(b"").hexdigest()}
    if token := env.get("AWS_SESSION_TOKEN"):
        headers["x-amz-security-token"] = token
    path, scope = urllib.parse.quote(path), f"{moment[:8]}/{region}/s3/aws4_request"
    arguments = "&".join(f"{key}={urllib.parse.quote(value, safe='')}"
                         for key, value in sorted(query.items()))
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    canonical = "\n".join([method, path, arguments, lines, names, headers["x-amz-content-sha256"]])
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    key = f"AWS4{env['AWS_SECRET_ACCESS_KEY']}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.new(key, f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{digest}".encode(), "sha256")
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={env.get('AWS_ACCESS_KEY_ID', '')}/{scope}, "
        f"SignedHeaders={names}, Signature={signature.hexdigest()}")
    request = urllib.request.Request(f"{endpoint}{path}?{arguments}", headers=headers,
                                     method=method)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        return str(answer.read().decode())
