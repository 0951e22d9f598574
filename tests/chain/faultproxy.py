# ruff: noqa: B905, E401, E501, I001, SIM105, T201
# fmt: off
"""A JSON-RPC proxy on loopback that misbehaves on purpose, for tests of our node client.

    python faultproxy.py --upstream http://127.0.0.1:8545 --fault shuffle --fault http429:3

    with FaultProxy(chain.url, ["one_error:2"]) as proxy:
        ...                      # point the system at proxy.url
        proxy.posts              # one entry per HTTP request: the list of methods in it

A fault is NAME or NAME:NUMBER. `first N` faults act on the first N requests only (1 when no number is given).

  whole answers, first N   http429, http500, html (200 with a page), cut (half a body), reset (no answer), empty (200, no body)
  whole answers, always    gzip (compressed, asked for or not), delay:MS
  batches                  shuffle (answers reversed), drop:I, one_error:I (member I), object (one error object for the whole
                           batch), limit:N (more than N members: one error object, id null), geth_limit:N (array with an error
                           for the first member only), string_ids, extra (an answer nobody asked for)
  members, first N         rpc429 (error -32005, HTTP 200), header (error "header not found"), null_block
  members, always          trie:B (state at height <= B is gone), big:BYTES (longer results become an error),
                           bad_utf8 (error text with bytes that are no UTF-8)
"""
import argparse, collections, gzip, http.client, http.server, json, signal, threading, time, urllib.parse

STATE = {"eth_getBalance": 1, "eth_getCode": 1, "eth_call": 1, "eth_getTransactionCount": 1, "eth_getStorageAt": 2}
BLOCKS = {"eth_getBlockByNumber", "eth_getBlockByHash"}


def error(id_, code, message, **more):
    return {"jsonrpc": "2.0", "id": id_, "error": {"code": code, "message": message, **more}}


class FaultProxy:
    def __init__(self, upstream, faults=(), port=0):
        self.host = urllib.parse.urlsplit(upstream).netloc
        self.faults = {n: int(v) if v else None for n, _, v in (f.partition(":") for f in faults)}
        self.left = collections.Counter({n: 1 if v is None else v for n, v in self.faults.items()})
        self.posts, self.lock = [], threading.Lock()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                proxy.serve(self, self.rfile.read(int(self.headers.get("content-length", 0))))

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def take(self, name):
        """Whether a `first N` fault still acts; uses one up."""
        with self.lock:
            if name in self.faults and self.left[name] > 0:
                self.left[name] -= 1
                return True
        return False

    def forward(self, body):
        up = http.client.HTTPConnection(self.host, timeout=60)
        try:
            up.request("POST", "/", body, {"content-type": "application/json"})
            return up.getresponse().read()
        finally:
            up.close()

    def member(self, request, answer):
        method, params, id_ = request.get("method"), request.get("params") or [], request.get("id")
        if self.take("rpc429"):
            return error(id_, -32005, "rate limit exceeded")
        if method in STATE and self.take("header"):
            return error(id_, -32000, "header not found")
        if method in BLOCKS and self.take("null_block"):
            return {"jsonrpc": "2.0", "id": id_, "result": None}
        if "trie" in self.faults and method in STATE:
            at = params[STATE[method]] if len(params) > STATE[method] else "latest"
            if isinstance(at, str) and at.startswith("0x") and len(at) < 20 and int(at, 16) <= (self.faults["trie"] or 0):
                return error(id_, -32000, f"missing trie node {'ab' * 32} (path )")
        if "big" in self.faults and len(json.dumps(answer.get("result"))) > (self.faults["big"] or 0):
            return error(id_, -32008, "Response is too big", data=f"Exceeded max limit of {self.faults['big']}")
        if "bad_utf8" in self.faults:
            return error(id_, -32000, "broken \udcff\udcfe text")
        return answer

    def batch(self, requests, answers):
        f = self.faults
        if "limit" in f and len(requests) > f["limit"]:
            return error(None, -32000, f"batch limit {f['limit']} exceeded: {len(requests)} requests given")
        if "geth_limit" in f and len(requests) > f["geth_limit"]:
            return [error(requests[0].get("id"), -32600, "batch too large")]
        if "object" in f:
            return error(requests[0].get("id"), -32603, "handle request error")
        if "one_error" in f and (f["one_error"] or 0) < len(answers):
            answers[f["one_error"] or 0] = error(requests[f["one_error"] or 0].get("id"), -32000, "one of them failed")
        if "drop" in f and (f["drop"] or 0) < len(answers):
            del answers[f["drop"] or 0]
        if "extra" in f:
            answers.append({"jsonrpc": "2.0", "id": 987654321, "result": "0xdead"})
        if "string_ids" in f:
            answers = [{**a, "id": str(a["id"])} for a in answers]
        return answers[::-1] if "shuffle" in f else answers

    def serve(self, handler, body):
        request = json.loads(body)
        many = isinstance(request, list)
        members = request if many else [request]
        self.posts.append([m.get("method") for m in members])
        if "delay" in self.faults:
            time.sleep((self.faults["delay"] or 0) / 1000)
        status, kind = 200, "application/json"
        if self.take("reset"):
            handler.close_connection = True
            return
        if self.take("http429"):
            status, kind, out = 429, "text/html", b"<html><h1>429 Too Many Requests</h1></html>"
        elif self.take("http500"):
            status, kind, out = 500, "text/plain", b"upstream unavailable"
        elif self.take("html"):
            kind, out = "text/html", b"<!doctype html><title>Just a moment</title>"
        elif self.take("empty"):
            out = b""
        else:
            answer = json.loads(self.forward(body))
            answers = [self.member(q, a) for q, a in zip(members, answer if many else [answer])]
            answer = self.batch(members, answers) if many else answers[0]
            out = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogateescape")
        handler.send_response(status)
        handler.send_header("content-type", kind)
        if "gzip" in self.faults:
            out = gzip.compress(out)
            handler.send_header("content-encoding", "gzip")
        handler.send_header("content-length", str(len(out)))
        handler.end_headers()
        if self.take("cut"):
            out, handler.close_connection = out[:len(out) // 2], True
        handler.wfile.write(out)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--upstream", required=True)
    ap.add_argument("--fault", action="append", default=[])
    ap.add_argument("--port", type=int, default=0)
    opt = ap.parse_args()
    with FaultProxy(opt.upstream, opt.fault, opt.port) as served:
        print(json.dumps({"url": served.url}), flush=True)
        try:
            signal.pause()  # until SIGINT or SIGTERM
        except KeyboardInterrupt:
            pass
