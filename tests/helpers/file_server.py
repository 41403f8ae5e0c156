"""A web server of files."""

import http.server
import threading
from contextlib import contextmanager
from functools import partial


@contextmanager
def serve_folder(folder):
    """Serve a directory; return its address and the list of requests."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *values):
            asked.append(str(values[1]))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()
