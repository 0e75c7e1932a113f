"A stand-in for the hub on this machine: enough of its interface to list a repository and serve pieces of its files."
import contextlib
import http.server
import json
import re
import threading
from pathlib import Path
from urllib.parse import unquote

COMMITS = {"main": "a" * 40, "step1": "b" * 40}


@contextlib.contextmanager
def hub(root, commits=COMMITS):
    "Serve root/<owner>/<name>/<commit>/ as repositories; yields (address, list of (method, path, bytes sent))."
    log = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self): self.answer(False)
        def do_GET(self): self.answer(True)
        def log_message(self, *args): pass

        def answer(self, body):
            path = unquote(self.path.split("?")[0])
            info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path)
            tree = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?(.*)", path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            match = info or tree or file
            commit = commits.get(match[2] or "main", match[2]) if match else None
            folder = Path(root, match[1], commit) if match else None
            if not match or not folder.is_dir(): return self.send(404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
            if info: return self.send(200, json.dumps({"id": match[1], "modelId": match[1], "sha": commit, "siblings": [{"rfilename": p.name} for p in folder.iterdir()]}).encode(), body)
            if tree: return self.send(200, json.dumps([{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0" * 40} for p in sorted(folder.iterdir())]).encode(), body)
            path = folder / match[3]
            if not path.is_file(): return self.send(404, b"", body, {"X-Error-Code": "EntryNotFound"})
            data, more = path.read_bytes(), {"ETag": '"0"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            if span := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                a, b = int(span[1]), min(int(span[2]), len(data) - 1)
                return self.send(206, data[a:b + 1], body, {**more, "Content-Range": f"bytes {a}-{b}/{len(data)}"})
            self.send(200, data, body, more)

        def send(self, code, data, body, more=None):
            log.append((self.command, self.path, len(data) if body else 0))
            self.send_response(code)
            for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **(more or {})}.items(): self.send_header(name, value)
            self.end_headers()
            if body: self.wfile.write(data)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try: yield f"http://127.0.0.1:{server.server_port}", log
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
