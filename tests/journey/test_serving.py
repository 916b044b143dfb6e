"""The journey's client: it asks the server of this machine, whatever the environment says of proxies."""

import http.server
import json
import threading

from minitext.journey.serving import ask_client

ANSWER = {
    "id": "1", "object": "chat.completion", "created": 0, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": " 95\n"}}],
}  # fmt: skip


class Handler(http.server.BaseHTTPRequestHandler):
    """Gives one answer to every question."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        text = json.dumps(ANSWER).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        """Prints nothing."""


def test_a_proxy_is_not_asked(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (found,) = ask_client(f"http://127.0.0.1:{server.server_port}", "m", ["What is 37+58?"])
        server.shutdown()
    assert (found["question"], found["answer"]) == ("What is 37+58?", "95")
