# ruff: noqa: B905, E401, E501, I001, PLW1509, RET503, T201
# fmt: off
"""A real Ethereum node on loopback with a short, fully known history (see README.md).

    python devchain.py --manifest devchain.json      # serve until SIGINT or SIGTERM (or end of a piped input)
    python devchain.py --check                       # build, compare node and ledger, exit
    python devchain.py -- python -m pytest tests     # run a command against it

Needs the standard library and the anvil binary of the npm package @foundry-rs/anvil.
"""
import argparse, atexit, ctypes, http.client, json, os, pathlib, platform, random, shutil
import signal, socket, stat, subprocess, sys, tempfile, time

HERE = pathlib.Path(__file__).resolve().parent
GENESIS_TIME, BLOCK_TIME, CHAIN_ID = 1_700_000_000, 12, 31337
TOKENS = [("Dev Alpha", "DVA", 18, 10**27), ("Dev Beta", "DVB", 6, 10**15), ("Dev Huge", "HUGE", 0, 2**256 - 1)]


class RpcError(Exception):
    def __init__(self, error):
        super().__init__(f"{error.get('code')}: {error.get('message')}")
        self.code, self.data = error.get("code"), error.get("data")


def find_anvil():
    """$ANVIL, then node_modules of the working directory, of this file or of a parent of either, then PATH."""
    cpu = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    inside = f"node_modules/@foundry-rs/anvil-{platform.system().lower()}-{cpu}/bin/anvil"
    places = [d / inside for base in (pathlib.Path.cwd(), HERE) for d in (base, *base.parents)]
    found = os.environ.get("ANVIL") or next((str(p) for p in places if p.is_file()), None) or shutil.which("anvil")
    if not found:
        raise FileNotFoundError("anvil not found: run `npm ci` in the repository or set ANVIL")
    return found


def word(value):
    """One ABI word as hex: an int (two's complement when negative), a bool or a 0x address."""
    return f"{int(value, 16) if isinstance(value, str) else int(value) % 2**256:064x}"


def abi(*values):
    """ABI arguments without 0x; text that does not start with 0x is encoded as `string`."""
    head, tail = "", ""
    for v in values:
        if isinstance(v, str) and not v.startswith("0x"):
            raw = v.encode()
            head += word(32 * len(values) + len(tail) // 2)
            tail += word(len(raw)) + raw.hex() + "00" * (-len(raw) % 32)
        else:
            head += word(v)
    return head + tail


def at(changes, block, default="0"):
    """The value in force after `block` in a list of [block, value] changes."""
    return next((c[1] for c in reversed(changes) if c[0] <= block), default)


def die_with_parent():
    if sys.platform == "linux":  # the kernel ends anvil when the thread that started it ends, even by SIGKILL
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


class DevChain:
    def __init__(self, port=0, extra=(), anvil=None):
        self.port, self.extra, self.anvil, self.ids = port, list(extra), anvil, 0
        self.process = self.folder = self.conn = None
        self.contracts = json.loads((HERE / "contracts" / "devchain.json").read_text())

    def start(self):
        binary = self.anvil or find_anvil()
        with socket.create_server(("127.0.0.1", self.port)) as s:  # a taken port fails here
            port = self.port = s.getsockname()[1]
        self.folder = tempfile.mkdtemp(prefix="devchain-")  # anvil never removes its own state cache
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [binary, "--host", "127.0.0.1", "--port", str(port), "--quiet", "--no-mining", "--order", "fifo",
             "--chain-id", str(CHAIN_ID), "--timestamp", str(GENESIS_TIME), "--hardfork", "shanghai",
             "--base-fee", "0", "--gas-price", "0", "--auto-impersonate", "--cache-path", self.folder, *self.extra],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=die_with_parent)
        atexit.register(self.stop)
        end = time.monotonic() + 10
        while self.process.poll() is None and time.monotonic() < end:
            try:
                self.accounts = self.rpc("eth_accounts")
                self.rpc("anvil_setBlockTimestampInterval", BLOCK_TIME)
                return self
            except (OSError, http.client.HTTPException):
                time.sleep(0.02)
        raise RuntimeError(f"anvil did not start on port {port}: {self.stop()}")

    def stop(self):
        """Idempotent. Nothing there is worth a slow end, so KILL; the state cache is removed too."""
        atexit.unregister(self.stop)
        if self.conn:
            self.conn.close()
        if self.process:
            self.process.kill()
            why = self.process.communicate()[1].decode(errors="replace").strip()
            shutil.rmtree(self.folder, ignore_errors=True)
            self.process = self.conn = None
            return why

    __enter__ = start

    def __exit__(self, *_):
        self.stop()

    def post(self, body):
        self.conn = self.conn or http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            self.conn.request("POST", "/", json.dumps(body), {"content-type": "application/json"})
            return json.loads(self.conn.getresponse().read())
        except BaseException:
            self.conn.close()
            self.conn = None
            raise

    def rpc(self, method, *params):
        self.ids += 1
        answer = self.post({"jsonrpc": "2.0", "id": self.ids, "method": method, "params": list(params)})
        if "error" in answer:
            raise RpcError(answer["error"])
        return answer["result"]

    def batch(self, calls):
        """Reads only: anvil runs the members of a batch side by side, so order means nothing inside one."""
        body = [{"jsonrpc": "2.0", "id": i, "method": m, "params": list(p)} for i, (m, p) in enumerate(calls)]
        by_id = {a["id"]: a for a in self.post(body)} if body else {}
        return [by_id[i].get("result", by_id[i].get("error")) for i in range(len(body))]

    def mine(self, blocks=1):
        self.rpc("anvil_mine", hex(blocks))

    def reorg(self, depth):
        """Replace the last `depth` blocks by empty ones: same heights, other hashes, transfers gone."""
        self.rpc("anvil_reorg", depth, [])

    def send(self, sender, to=None, data="0x", value=0, gas=3_000_000):
        tx = {"from": sender, "data": data, "value": hex(value), "gas": hex(gas), "gasPrice": "0x0"}
        return self.rpc("eth_sendTransaction", {**tx, "to": to} if to else tx)

    def deploy(self, name, *args):
        tx = self.send(self.accounts[0], data=self.contracts[name]["bytecode"] + abi(*args))
        self.mine()
        return self.rpc("eth_getTransactionReceipt", tx)["contractAddress"]

    def data(self, contract, signature, *args):
        return "0x" + self.contracts[contract]["methods"][signature] + abi(*args)

    def populate(self, blocks=200, holders=40, seed=7):
        """Deploy and trade. The facts returned come from a ledger kept here, they are not read back."""
        rnd, boss = random.Random(seed), self.accounts[0]
        people = ["0x" + rnd.randbytes(20).hex() for _ in range(holders)]
        tokens = [{"address": self.deploy("DevToken", *t), "name": t[0], "symbol": t[1], "decimals": t[2],
                   "total_supply": str(t[3]), "deployed_at": i} for i, t in enumerate(TOKENS, 1)]
        (a, b), x, y = [t["address"] for t in tokens[:2]], 5 * 10**24, 10**13
        pool, odd, height = self.deploy("DevPool", a, b, x, y), self.deploy("DevOdd"), 5
        money = {t["address"]: {boss: int(t["total_supply"])} for t in tokens}
        history = {t["address"]: {boss: [[t["deployed_at"], t["total_supply"]]]} for t in tokens}
        wei, eth = dict.fromkeys(people, 0), {p: [] for p in people}
        done, failed, reserves = [], [], [[4, str(x), str(y)]]
        while height < blocks:
            height += 1
            touched = set()
            for _ in range(60 if height % 50 == 0 else rnd.choice([0, 1, 1, 2, 2, 3, 4])):
                token, kind = rnd.choice(tokens)["address"], rnd.random()
                purse = money[token]
                source = boss if rnd.random() < 0.4 else rnd.choice([h for h, v in purse.items() if v])
                target = source if rnd.random() < 0.03 else rnd.choice(people)  # some pay themselves
                have = purse.get(source, 0)  # 5 % ask for too much and revert, some move nothing, some move all
                value = have + 1 if kind < 0.05 and have < 2**256 - 1 else 0 if kind < 0.08 else have if kind < 0.12 \
                    else have // rnd.randint(2, 1000)
                tx = self.send(source, token, self.data("DevToken", "transfer(address,uint256)", target, value), gas=200_000)
                (done if value <= have else failed).append(
                    {"block": height, "token": token, "from": source, "to": target, "value": str(value), "tx": tx})
                if value <= have:
                    purse[source] = have - value
                    purse[target] = purse.get(target, 0) + value
                    touched |= {(token, source), (token, target)}
            if rnd.random() < 0.3:  # native coin
                who, value = rnd.choice(people), rnd.randint(1, 10**18)
                self.send(self.accounts[1 + height % 9], who, value=value, gas=21_000)
                wei[who] += value
                eth[who].append([height, str(wei[who])])
            if rnd.random() < 0.5:  # a swap moves the reserves
                zero = rnd.random() < 0.5
                fed = rnd.randint(1, 10**22) if zero else rnd.randint(1, 10**10)
                self.send(boss, pool, self.data("DevPool", "swap(bool,uint256)", zero, fed), gas=200_000)
                x, y = (x + fed, y - fed * 997 * y // (x * 1000 + fed * 997)) if zero else \
                    (x - fed * 997 * x // (y * 1000 + fed * 997), y + fed)
                reserves.append([height, str(x), str(y)])
            self.mine()
            for token, who in sorted(touched):
                history[token].setdefault(who, []).append([height, str(money[token][who])])
        headers = self.batch([("eth_getBlockByNumber", (hex(n), False)) for n in range(height + 1)])
        return {"url": self.url, "chain_id": CHAIN_ID, "genesis_time": GENESIS_TIME, "block_time": BLOCK_TIME,
                "last_block": height, "block_hashes": [h["hash"] for h in headers], "accounts": self.accounts,
                "holders": people, "tokens": tokens, "odd": {"address": odd, "deployed_at": 5},
                "pool": {"address": pool, "token0": a, "token1": b, "deployed_at": 4}, "reserves": reserves,
                "transfers": done, "failed_transfers": failed, "balances": history, "eth_balances": eth}


def check(chain, facts, step=5):
    """Node against ledger at every `step`-th block and every receipt; returns how many values were compared."""
    pairs = []
    for block in range(0, facts["last_block"] + 1, step):
        for token in facts["tokens"]:
            for who, changes in facts["balances"][token["address"]].items():
                ask = {"to": token["address"], "data": chain.data("DevToken", "balanceOf(address)", who)}
                want = "0x" + word(int(at(changes, block))) if block >= token["deployed_at"] else "0x"
                pairs.append((("eth_call", (ask, hex(block))), want))
        for who, changes in facts["eth_balances"].items():
            pairs.append((("eth_getBalance", (who, hex(block))), hex(int(at(changes, block)))))
    for block, x, y in facts["reserves"]:
        ask = {"to": facts["pool"]["address"], "data": chain.data("DevPool", "getReserves()")}
        stamp = facts["genesis_time"] + block * facts["block_time"]
        pairs.append((("eth_call", (ask, hex(block))), "0x" + abi(int(x), int(y), stamp)))
    for status, group in (("0x1", facts["transfers"]), ("0x0", facts["failed_transfers"])):
        pairs += [(("eth_getTransactionReceipt", (t["tx"],)), status) for t in group]
    for i in range(0, len(pairs), 500):
        for (call, want), got in zip(pairs[i:i + 500], chain.batch([p[0] for p in pairs[i:i + 500]])):
            assert (got["status"] if isinstance(got, dict) else got) == want, (call, got, want)
    return len(pairs)


def main():
    ap = argparse.ArgumentParser(description="Loopback Ethereum node with a known history.")
    for name, default in (("port", 0), ("blocks", 200), ("holders", 40), ("seed", 7)):
        ap.add_argument(f"--{name}", type=int, default=default)
    ap.add_argument("--manifest", help="write what is on the chain to this JSON file")
    ap.add_argument("--check", action="store_true", help="compare the node with the ledger, then exit")
    ap.add_argument("command", nargs="*", help="after --: run it with DEVCHAIN_URL and DEVCHAIN_MANIFEST set")
    opt = ap.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    with DevChain(opt.port) as chain:
        facts = chain.populate(opt.blocks, opt.holders, opt.seed)
        path = opt.manifest or os.path.join(chain.folder, "manifest.json")
        pathlib.Path(path).write_text(json.dumps(facts))
        if opt.check:
            print(f"{check(chain, facts)} values agree, last block {facts['last_block']} {facts['block_hashes'][-1]}")
        elif opt.command:
            return subprocess.call(opt.command, env={**os.environ, "DEVCHAIN_URL": chain.url, "DEVCHAIN_MANIFEST": path})
        else:
            print(json.dumps({"url": chain.url, "manifest": path, "pid": chain.process.pid}), flush=True)
            sys.stdin.read() if stat.S_ISFIFO(os.fstat(0).st_mode) else signal.pause()


if __name__ == "__main__":
    sys.exit(main())
