"""Object store of the tests: a real server that speaks S3."""

import subprocess
import sys
from contextlib import contextmanager

SERVER = """
import logging
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").disabled = True
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(*server.get_host_and_port(), flush=True)
input()
"""


@contextmanager
def serve_objects():
    """Start a server; yield its URL."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=-1, stdout=-1, stderr=-3, text=True)
    yield "http://{}:{}".format(*process.stdout.readline().split())
    process.communicate("")


def make_environment(url):
    """Return the environment variables that a process needs to use a server."""
    return {
        "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "2",
    }  # fmt: skip
