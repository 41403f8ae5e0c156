"""Downloads over a real connection, good and bad ones."""

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from datamodules.download import cache_dir, download
from lumen.errors import DataError

CONTENT = bytes(range(256)) * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Server with the content at /good, other bytes at /tampered, half of it at /truncated, and a stalled /silent."""

    def do_GET(self):
        self.server.requests.append(self.path)
        if self.path == "/missing":
            self.send_error(404)
            return
        body = b"evil" + CONTENT[4:] if self.path == "/tampered" else CONTENT
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if self.path in ("/truncated", "/silent") else body)
        if self.path == "/silent":
            self.server.stop.wait()

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # so that closing the server waits for every answer
    server.requests, server.stop = [], threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.stop.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_valid_file_is_downloaded_into_new_directory(server, tmp_path):
    path = tmp_path / "new" / "file"
    assert download(f"{server.url}/good", path, SHA256) == path
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]


def test_a_right_file_is_not_fetched_again(server, tmp_path):
    download(f"{server.url}/good", tmp_path / "file", SHA256)
    download(f"{server.url}/good", tmp_path / "file", SHA256)
    assert server.requests == ["/good"]


def test_a_damaged_file_is_replaced(server, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(CONTENT[:-1])
    download(f"{server.url}/good", path, SHA256)
    assert path.read_bytes() == CONTENT


def test_tampered_file_is_refused_with_both_hashes(server, tmp_path):
    with pytest.raises(DataError) as error:
        download(f"{server.url}/tampered", tmp_path / "file", SHA256)
    assert SHA256 in str(error.value)
    assert hashlib.sha256(b"evil" + CONTENT[4:]).hexdigest() in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_truncated_file_is_refused_with_both_lengths(server, tmp_path):
    with pytest.raises(DataError, match=r"128,000 of 256,000 bytes"):
        download(f"{server.url}/truncated", tmp_path / "file", SHA256)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["tampered", "truncated", "missing"])
def test_a_failed_download_leaves_the_old_file_alone(server, tmp_path, kind):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(DataError):
        download(f"{server.url}/{kind}", path, SHA256)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_missing_file_error_names_target_path(server, tmp_path):
    with pytest.raises(DataError, match="404") as error:
        download(f"{server.url}/missing", tmp_path / "file", SHA256)
    assert f"{server.url}/missing" in str(error.value)
    assert str(tmp_path / "file") in str(error.value)


def test_a_silent_server_is_given_up(server, tmp_path):
    with pytest.raises(DataError, match="timed out"):
        download(f"{server.url}/silent", tmp_path / "file", SHA256, timeout_s=0.2)
    assert list(tmp_path.iterdir()) == []


def test_concurrent_downloads_of_one_file_are_safe(server, tmp_path):
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: download(f"{server.url}/good", tmp_path / "file", SHA256), range(8)))
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("LUMEN_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("LUMEN_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "lumen"
