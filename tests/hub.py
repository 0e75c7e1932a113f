"A server on this machine that answers what a model hub answers: refs, trees with LFS hashes, and files by byte ranges, at a revision."
import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit


class Hub:
    "Repositories below a folder, <owner>/<name>/<revision>/<files>; a revision is a branch, and its commit a hash of its files."
    def __init__(self, root): self.root, self.requests, self.bytes = Path(root), [], {}

    def branches(self, repo):
        folder = self.root / repo
        if not folder.is_dir(): raise LookupError("RepoNotFound")
        named = {p.name: p for p in folder.iterdir() if p.is_dir()}
        number = lambda name: [int(n) for n in re.findall(r"\d+", name)]
        return {"main": named.get("main") or named[max(named, key=number)]} | dict(sorted(named.items()))

    def commit(self, folder):
        parts = [f"{p.name}:{hashlib.sha256(p.read_bytes()).hexdigest()}" for p in sorted(folder.iterdir())]
        return hashlib.sha1("\n".join([folder.name, *parts]).encode()).hexdigest()

    def find(self, repo, revision):
        revision = unquote(revision)
        commits = {name: (self.commit(p), p) for name, p in self.branches(repo).items()}
        for name, (commit, folder) in commits.items():
            if revision in (name, f"refs/heads/{name}", commit): return commit, folder
        raise LookupError("RevisionNotFound")

    def entry(self, path):
        data = path.read_bytes()
        entry = {"type": "file", "path": path.name, "size": len(data), "oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}
        if path.suffix not in (".json", ".txt", ".md"): entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return entry

    def api(self, repo, route, revision, form):
        if route == "refs":
            return {"branches": [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": self.find(repo, n)[0]} for n in self.branches(repo)], "converts": [], "tags": []}
        commit, folder = self.find(repo, revision or "main")
        files = [self.entry(p) for p in sorted(folder.iterdir()) if p.is_file()]
        if route == "tree": return files
        if route == "paths-info": return [f for f in files if f["path"] in form["paths"]]
        return {"_id": "0", "id": repo, "modelId": repo, "sha": commit, "private": False, "tags": [], "downloads": 0, "likes": 0, "siblings": [{"rfilename": f["path"]} for f in files]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *args): pass

    def answer(self, code, body=b"", headers=()):
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **dict(headers)}.items(): self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD": self.wfile.write(body)

    def file(self, repo, revision, name):
        commit, folder = self.server.hub.find(repo, revision)
        path = folder / unquote(name)
        if not path.is_file(): raise LookupError("EntryNotFound")
        data, code = path.read_bytes(), 200
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes", "X-Linked-Size": str(len(data))}
        if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(span[1]), min(int(span[2] or len(data) - 1), len(data) - 1)
            headers["Content-Range"], data, code = f"bytes {first}-{last}/{len(data)}", data[first:last + 1], 206
        if self.command == "GET": self.server.hub.bytes[path.name] = self.server.hub.bytes.get(path.name, 0) + len(data)
        self.answer(code, data, headers | ({"Content-Length": str(len(data))}))

    def do_GET(self):
        path, body = urlsplit(self.path).path, self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self.server.hub.requests.append(f"{self.command} {path}")
        try:
            if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path): return self.file(*found.groups())
            found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(refs|tree|paths-info|revision)(?:/([^/]+))?)?/?", path)
            if not found: return self.answer(404)
            form = json.loads(body) if body.startswith("{") else parse_qs(body)
            self.answer(200, json.dumps(self.server.hub.api(*found.groups(), form)).encode(), {"Content-Type": "application/json"})
        except LookupError as error: self.answer(404, b'{"error": "not found"}', {"X-Error-Code": error.args[0], "X-Error-Message": "not found"})

    do_POST = do_HEAD = do_GET


@contextlib.contextmanager
def serve(root):
    "The address of a server over the folder `root`, and its Hub, which counts requests and bytes."
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub = Hub(root)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try: yield f"http://127.0.0.1:{server.server_port}", server.hub
    finally:
        server.shutdown()
        server.server_close()


def redirect(monkeypatch, url, cache):
    "Let huggingface_hub in this process speak to the server, with a cache of its own."
    from huggingface_hub import constants
    for name, value in {"ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}", "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(constants, name, value)
