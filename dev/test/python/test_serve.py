"""./serve: its answers, its queue, its log, and what it refuses. The requests are made with Python's library alone. Most tests
ask serve_stub.py in place of a trainer. SERVE names another build of the server, TRAINER another trainer."""
import base64
import contextlib
import hashlib
import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import threading
import time

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
SERVE = os.environ.get("SERVE", os.path.join(ROOT, "serve"))
TRAINER = os.environ.get("TRAINER", os.path.join(ROOT, "train_llama3"))
TOKENIZER = os.path.join(ROOT, "dev", "data", "tinytales", "tokenizer.json")
STUB = os.path.join(HERE, "serve_stub.py")
JSON = {"Content-Type": "application/json"}

MEMORY = 1 << 20 if "sanitize" in SERVE else 64 << 10  # KiB

if not os.path.exists(SERVE):
    pytest.skip("libmicrohttpd is not installed", allow_module_level=True)


servers = []


@pytest.fixture(autouse=True)
def no_server_is_left():
    yield
    while servers:
        servers.pop().kill()


class Server:
    """A server of the run `out` on a free port."""

    def __init__(self, out, *flags, trainer=STUB, host="127.0.0.1", key="--no-key"):
        self.out, self.host = str(out), host
        command = [SERVE, self.out, "--port", "0", "--host", host, "--trainer", str(trainer), *filter(None, [key]), *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        servers.append(self.process)
        self.port = int(re.match(r"serve +http://\S+:(\d+)/ shows ", self.process.stdout.readline())[1])
        self.name = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def request(self, method, path, body=None, headers=None):
        """Returns the open connection and the response to a request."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        connection.request(method, path, body, headers or {})
        return connection, connection.getresponse()

    def get(self, path, **headers):
        connection, response = self.request("GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        with contextlib.closing(connection):
            return response.status, response.read().decode()

    def post(self, question, **headers):
        """Returns the status and the lines of an answer."""
        body = question if isinstance(question, (str, bytes)) else json.dumps(question)
        connection, response = self.request("POST", "/generation", body, {**JSON, **headers})
        with contextlib.closing(connection):
            self.headers = response.headers
            return response.status, [json.loads(line) for line in response.read().decode().splitlines()]

    def begin(self, question):
        """Returns a socket with an answer that has begun."""
        s = socket.create_connection((self.host, self.port), timeout=30)
        body = json.dumps(question)
        s.sendall(f"POST /generation HTTP/1.1\r\nHost: {self.name}\r\nContent-Type: application/json\r\n"
                  f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
        return s

    def notes(self):
        path = os.path.join(os.path.dirname(self.out), "notes")
        return open(path).read().splitlines() if os.path.exists(path) else []

    def memory(self):
        """Returns the memory that is resident, in KiB."""
        return int(re.search(r"VmRSS:\s+(\d+)", open(f"/proc/{self.process.pid}/status").read())[1])

    def end(self):
        assert self.process.poll() is None, self.process.stderr.read()
        self.process.terminate()
        self.process.wait()


def make_run(folder, steps=(100,), log=2):
    """Makes the folder of a run: names of checkpoints, and a log of some steps."""
    out = folder / "run"
    for number in steps:
        (out / f"step_{number:08}").mkdir(parents=True)
    (out / "log.jsonl").write_text(config() + "".join(step(i + 1) for i in range(log)))
    return out


def event(name, **fields):
    return json.dumps({"event": name, **fields}, separators=(",", ":")) + "\n"


def config():
    return event("config", version="a log of more than 64 bytes, as all logs are")


def step(i, name="step", more=0):
    return event(name, step=i, loss=None if more is None else 5 - i / 1e5 + more)


@pytest.fixture
def server(tmp_path):
    server = Server(make_run(tmp_path))
    yield server
    server.end()


def wait_for(condition, seconds=10):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "it does not come"
        time.sleep(0.01)


def text_of(lines):
    return "".join(line.get("text", "") for line in lines)


# ---------------------------------------------------------------------------------------------------------------------
# answers

@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a short run, with its data."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text").write_text("A cat saw a dog. The dog said: hello, little cat, come to my house.\n" * 200)
    tokenize = [os.path.join(ROOT, "tokenize"), "--tokenizer", TOKENIZER, "-o", folder / "a.bin", folder / "text"]
    subprocess.run(tokenize, check=True, stdout=subprocess.DEVNULL)
    train(folder, "out")
    return folder


def train(folder, out):
    flags = "--model d1 --steps 12 --lr 1e-2 --batch 2 --seq 64 --sample-tokens 0 --checkpoint-every 6".split()
    subprocess.run([TRAINER, *flags, "--tokenizer", TOKENIZER, "--train", folder / "a.bin", "--out", folder / out], check=True,
                   stdout=subprocess.DEVNULL)


def test_texts_of_every_checkpoint_are_those_of_generate(trained):
    server = Server(trained / "out", trainer=TRAINER)
    assert '"checkpoints": ["step_00000006", "step_00000012"], "chat": true}' in server.get("/runs")[1]
    for name in ("step_00000006", "step_00000012", None):
        status, lines = server.post({"prompt": "A cat", "temperature": 0, "max_tokens": 20, "checkpoint": name})
        done = subprocess.run([TRAINER, "--model", trained / "out" / (name or ""), "--generate", "A cat", "--temperature", "0",
                               "--tokens", "20"], capture_output=True, text=True, check=True)
        assert status == 200 and ("A cat" + text_of(lines)).rstrip("\n") == done.stdout.rstrip("\n")
    assert server.post({"promt": "A"}) == (200, [{"error": "question: has no prompt or messages, wanted one of them"}])
    server.end()


def test_a_checkpoint_that_cannot_be_loaded_is_an_error(tmp_path):
    server = Server(make_run(tmp_path), trainer=TRAINER)  # its checkpoint is an empty folder
    for _ in range(2):
        status, lines = server.post({"prompt": "a"})
        assert status == 200 and "step_00000100" in lines[0]["error"]
    for other in ("step_00000200", "step_00000100\0", "step_00000100/", "step_100", "../run/step_00000100", "", 100):
        assert server.post({"prompt": "a", "checkpoint": other})[0] == 404, other
    (tmp_path / "run" / "step_00000100").rmdir()
    assert server.post({"prompt": "a"}) == (200, [{"error": "the run has no checkpoint yet"}])
    server.end()


def test_the_child_has_the_checkpoint_of_the_question(server):
    def models():
        return [note.split()[1] for note in server.notes() if note.startswith("model ")]
    assert server.get("/health")[0] == 200 and models() == []
    server.post({"prompt": "a"}), server.post({"prompt": "b"})
    assert models() == ["step_00000100"]
    os.mkdir(server.out + "/step_00000200")
    time.sleep(0.5)
    assert len(models()) == 1, "a checkpoint alone starts no process"
    server.post({"prompt": "c"}), server.post({"prompt": "d", "checkpoint": "step_00000200"})
    assert models()[1:] == ["step_00000200"]
    server.post({"prompt": "e", "checkpoint": "step_00000100"})
    assert models()[2:] == ["step_00000100"]
    os.mkdir(server.out + "/new")
    os.rename(server.out + "/new", server.out + "/step_00000100")  # over the old one, as a checkpoint that is written again
    for prompt in "fg":
        server.post({"prompt": prompt, "checkpoint": "step_00000100"})
    assert models()[3:] == ["step_00000100"], "the old weights answer"
    os.utime(server.out + "/step_00000100", ns=(0, 1))  # as where a file system gives the old one's number again
    server.post({"prompt": "h", "checkpoint": "step_00000100"})
    assert models()[4:] == ["step_00000100"], "the old weights answer"


def test_a_process_that_cannot_be_started_fails_its_question_alone(server):
    def opened():
        return len(os.listdir(f"/proc/{server.process.pid}/fd"))
    kept, limit = [], resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    full = opened() + 16
    while opened() < full:
        kept.append(socket.create_connection((server.host, server.port)))
        time.sleep(0.01)
    for most in (full + 1, full + 2):  # there is room for the connection, then also for the checkpoint or one end of a socket
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (most, limit[1]))
        status, lines = server.post({"prompt": "a", "checkpoint": "step_00000100"})
        assert status == 200 and lines[0]["error"].endswith(": Too many open files")
        wait_for(lambda: opened() <= full)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limit)
    assert server.post({"prompt": "a"})[0] == 200


def test_too_few_descriptors_are_an_error_at_the_start(tmp_path):
    done = subprocess.run(["sh", "-c", f"ulimit -n 34; exec {SERVE} {make_run(tmp_path)} --port 0 --trainer {STUB}"],
                          capture_output=True, text=True, timeout=10)
    assert done.returncode == 1 and done.stderr.startswith("error: the limit of open files is 34, wanted at least 96")


def test_of_20_clients_17_get_their_own_answer_and_3_are_sent_away(server):
    results = [None] * 20

    def ask(i):
        body = json.dumps({"prompt": f"a{i} b{i} c{i}", "seed": 0 if i else 1000})
        connection, response = server.request("POST", "/generation", body, JSON)
        results[i] = response.status, response.headers.get("Retry-After"), response.read().decode()
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(20)]
    threads[0].start()  # its answer is running until all the others have asked
    wait_for(lambda: json.loads(server.get("/health")[1])["answers"])
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    away = [r for r in results if r[0] == 429]
    assert len(away) == 3 and all(int(r[1]) > 0 and "error" in json.loads(r[2]) for r in away)
    for i, (status, _, text) in enumerate(results):
        if status == 200:
            assert text_of(map(json.loads, text.splitlines())) == f" a{i} b{i} c{i}"
    assert sum(r[0] == 200 for r in results) == 17


def test_a_client_that_leaves_stops_its_answer(server):
    s = server.begin({"prompt": "word " * 1000, "seed": 50})
    waits = server.begin({"prompt": "never"})
    while b'"text"' not in s.recv(4096):
        pass
    waits.close()
    told = server.notes().count("token")
    s.close()
    assert text_of(server.post({"prompt": "next"})[1]) == " next"
    notes = server.notes()
    assert notes.count("token") - told <= 1 + 2 and notes.count("stop") == 1 and "asked never" not in notes


def test_a_killed_child_is_an_error_and_the_next_answer_works(server):
    for _ in range(2):
        connection, response = server.request("POST", "/generation", json.dumps({"prompt": "word " * 1000, "seed": 20}), JSON)
        assert "text" in json.loads(response.readline())
        os.kill(int(next(n for n in reversed(server.notes()) if n.startswith("model")).split()[2]), signal.SIGKILL)
        lines = [json.loads(line) for line in response.read().splitlines()]
        assert "text" not in lines[-1] and "Killed" in lines[-1]["error"]
        assert server.post({"prompt": "and on"}) == (200, [{"text": " and"}, {"text": " on"}, {"tokens": 2, "reason": "end"}])
    assert server.post({"prompt": "die"}) == (200, [{"error": "there is no room for it"}])
    assert server.post({"prompt": "quit"}) == (200, [{"error": "the process that answers ended: exit status 3"}])
    assert server.post({"prompt": "and on"})[0] == 200


FASTER = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
__attribute__((constructor)) static void not_in_children(void) { unsetenv("LD_PRELOAD"); }
int clock_gettime(clockid_t clock, struct timespec* t) {  // 40 seconds pass in one
    const long status = syscall(SYS_clock_gettime, clock, t);
    const long long ns = (t->tv_sec * 1000000000ll + t->tv_nsec) * 40;
    t->tv_sec = ns / 1000000000, t->tv_nsec = ns % 1000000000;
    return (int)status;
}
ssize_t send(int fd, const void* data, size_t n, int flags) {  // to a process that may have ended meanwhile
    struct sockaddr a;
    socklen_t size = sizeof a;
    if (getsockname(fd, &a, &size) == 0 && a.sa_family == AF_UNIX) { usleep(300000); }
    return syscall(SYS_sendto, fd, data, n, flags, NULL, 0);
}
"""


@pytest.mark.skipif("sanitize" in SERVE, reason="a sanitizer wants to be the first library")
def test_an_answer_has_120_seconds(tmp_path, monkeypatch):
    (tmp_path / "faster.c").write_text(FASTER)
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", tmp_path / "faster.so", tmp_path / "faster.c"],
                   check=True)
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "faster.so"))
    server = Server(make_run(tmp_path))
    other = Server(server.out, trainer=TRAINER)  # its checkpoint is an empty folder
    monkeypatch.delenv("LD_PRELOAD")
    assert "step_00000100" in other.post({"prompt": "a"})[1][0]["error"], "the cause, not only that it ended"
    begun = time.time()
    status, lines = server.post({"prompt": "word " * 60, "seed": 100})
    assert status == 200 and lines[-1] == {"error": "the answer took more than 120 seconds"}
    assert 2.9 < time.time() - begun < 10
    assert text_of(server.post({"prompt": "next"})[1]) == " next"
    server.end()


def test_questions_may_be_long_and_written_over_lines(server):
    status, lines = server.post(json.dumps({"prompt": "word " * 40000, "checkpoint": None}, indent=2))
    assert status == 200 and lines[-1] == {"tokens": 40000, "reason": "end"}
    for wrong in ("", "x", '{"prompt": "a"', b'{"prompt": "\xff"}', '{"prompt": "a", "stop": true}',
                  '{"prompt": "a"}\n{"stop": true}'):
        status, lines = server.post(wrong)
        assert status == 400 and lines[0]["error"].startswith("question:"), wrong


# ---------------------------------------------------------------------------------------------------------------------
# what is refused

def test_only_its_own_pages_reach_it(server):
    port = server.port
    assert server.post({"prompt": "a"}, **{"Content-Type": "Application/JSON; charset=utf-8"})[0] == 200
    assert server.get("/", Host="evil.example") == (
        403, '{"error": "Host or Origin is not the address that this server printed"}\n')
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}"):
        assert server.get("/health", Host=host, Origin=f"http://{host}")[0] == 200
    for host in (f"evil.example:{port}", "127.0.0.1", "localhost", f"127.0.0.1:{port}.evil.example", f"127.0.0.2:{port}", ""):
        assert server.get("/", Host=host)[0] in (400, 403), host
    for origin in ("http://evil.example", f"https://127.0.0.1:{port}", "null", f"http://127.0.0.1:{port}/", "http://"):
        for path in ("/", "/log", "/health"):
            assert server.get(path, Origin=origin)[0] == 403
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        assert server.get("/", Sec_Fetch_Site=site)[0] == 200, "a link on a page of another site may lead here"
        assert server.get("/health", Sec_Fetch_Site=site)[0] == status
        assert server.post({"prompt": "a"}, **{"Sec-Fetch-Site": site})[0] == status
        assert server.post({"prompt": "a"}, Origin=origin)[0] == 403
    assert server.post({"prompt": "a"}, Origin=f"http://127.0.0.1:{port}")[0] == 200
    assert server.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert not [h for h in server.headers if h.lower().startswith("access-control")]
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonp", "application", ""):
        assert server.post({"prompt": "a"}, **{"Content-Type": kind})[0] == 415
    for method, path, allowed in (("GET", "/generation", "POST"), ("PUT", "/log", "GET, HEAD"), ("OPTIONS", "/", "GET, HEAD")):
        connection, response = server.request(method, path)
        assert response.status == 405 and response.headers["Allow"] == allowed, path
    connection, response = server.request("HEAD", "/")
    assert response.status == 200 and int(response.headers["Content-Length"]) > 10000 and response.read() == b""
    assert server.request("HEAD", "/log")[1].status == 200 and server.request("HEAD", "/generation")[1].status == 405
    assert server.get("/../etc/passwd")[0] == server.get("/log.jsonl")[0] == 404
    for path in ("/", "/health"):  # which need no key
        assert server.get(path + "?run=x")[0] == 200, "a stranger learns of no run"
    assert server.post({"prompt": "a" * (256 << 10)})[0] == 413


def test_at_port_80_a_browser_names_no_port(tmp_path):
    with socket.socket() as s:
        try:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("127.0.0.1", 80))
        except OSError:
            pytest.skip("port 80 cannot be had")
    server = Server(make_run(tmp_path), "--port", "80")
    for host in ("127.0.0.1", "localhost", "localhost:80"):
        assert server.get("/health", Host=host, Origin=f"http://{host}")[0] == 200
    assert server.get("/health", Host="evil.example")[0] == server.get("/health", Host="localhost:")[0] == 403
    server.end()


def test_the_page_allows_its_own_script_alone(server):
    connection, response = server.request("GET", "/")
    page = response.read()
    assert page == open(os.path.join(ROOT, "dev", "serve", "page.html"), "rb").read()
    policy = dict(part.strip().split(" ", 1) for part in response.headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        blocks = re.findall(f"<{tag}>(.*?)</{tag}>".encode(), page, re.S)
        sums = [f"'sha256-{base64.b64encode(hashlib.sha256(block).digest()).decode()}'" for block in blocks]
        assert [policy[tag + "-src"]] == sums


def test_elsewhere_it_wants_a_key(tmp_path):
    out, key = make_run(tmp_path), "a key of many letters"
    (tmp_path / "key").write_text(key + "\n")
    (tmp_path / "short").write_text("short\n")
    (tmp_path / "bytes").write_bytes(b"a key of many letters\0 and more\n")

    def refused(*flags):
        done = subprocess.run([SERVE, out, "--trainer", STUB, *flags], capture_output=True, text=True, timeout=10)
        return done.returncode, done.stderr
    for file in tmp_path.iterdir():
        file.chmod(0o600)
    assert refused("--host", "192.0.2.1", "--no-key") == (2, "error: --no-key: other machines reach 192.0.2.1, wanted a key\n")
    for flags in ("--host 0.0.0.0", "--host ::", "--host localhost", "--port x", "--port 65536", "--what", "--no-key --key-file x"):
        assert refused(*flags.split())[0] == 2, flags
    assert refused("--port")[1].startswith("error: --port: has no value")
    assert refused("--help") == refused("--version") == (0, "")
    assert refused("--key-file", tmp_path / "none")[0] == 1
    for file in ("short", "bytes"):
        assert "wanted a key of at least 16 printable ASCII characters" in refused("--key-file", tmp_path / file)[1]
    assert refused("--host", "192.0.2.1", "--key-file", tmp_path / "key")[0] == 1, "it is no address of this machine"
    (tmp_path / "key").chmod(0o640)
    assert "other users can read this key or change it" in refused("--key-file", tmp_path / "key")[1]
    (tmp_path / "key").chmod(0o400)
    server = Server(out, "--key-file", str(tmp_path / "key"), key=None)
    assert server.get("/")[0] == 200, "the page asks for the key"
    for value in ("", "Bearer", "Bearer ", f"Bearer {key[:-1]}", f"Bearer {key} ", f"Bearer {key}x", key, "Basic " + key):
        for path in ("/runs", "/log"):
            assert server.get(path, Authorization=value)[0] == 401, value
    assert server.post({"prompt": "a"})[0] == 401 and server.headers["WWW-Authenticate"] == "Bearer"
    assert server.post({"prompt": "a"}, Authorization=f"Bearer {key}")[0] == 200
    server.end()


def test_it_listens_at_an_ipv6_address(tmp_path):
    with socket.socket(socket.AF_INET6) as s:
        try:
            s.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    server = Server(make_run(tmp_path), host="::1")
    port = server.port
    for host in (f"[::1]:{port}", f"localhost:{port}"):
        assert server.get("/health", Host=host, Origin=f"http://{host}")[0] == 200, host
    for host in ("[::1]", "]", *(h + str(port) for h in ("::1:", "[::2]:", "[::1]:1", "[::1]x:", "127.0.0.1:", "]:"))):
        assert server.get("/health", Host=host)[0] == 403, host
    assert server.get("/health", Origin=f"http://[::2]:{port}")[0] == 403
    assert text_of(server.post({"prompt": "a b"})[1]) == " a b"
    server.end()
    longer = Server(server.out, host="0:0::0:1")
    assert longer.get("/health", Host=f"[::1]:{longer.port}")[0] == 200, "browsers shorten an address"
    longer.end()


def test_a_foreign_ipv6_address_wants_a_key(tmp_path):
    rows = [row.split() for row in open("/proc/net/if_inet6")] if os.path.exists("/proc/net/if_inet6") else []
    address = next((socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows if row[3] == "00"), None)
    if not address:
        pytest.skip("this machine has no IPv6 address that another one reaches")
    (tmp_path / "key").write_bytes(b"a key of many letters\r\n")
    (tmp_path / "key").chmod(0o600)
    server = Server(make_run(tmp_path), "--key-file", str(tmp_path / "key"), host=address, key=None)
    assert server.get("/")[0] == server.get("/health")[0] == 200 and server.get("/runs")[0] == 401
    assert server.get("/runs", Authorization="Bearer a key of many letters")[0] == 200
    assert server.get("/", Host=f"localhost:{server.port}")[0] == 403
    server.end()


def server_answers(server):
    with contextlib.suppress(OSError, http.client.HTTPException):
        return server.get("/")[0] == 200
    return False


def test_without_a_flag_it_draws_a_key(tmp_path):
    server = Server(make_run(tmp_path), key=None)
    key = re.match(rf"open +http://{server.name}/#key=([0-9a-f]{{32}})\n", server.process.stdout.readline())[1]
    for path in ("/runs", "/log"):
        assert server.get(path)[0] == server.get(path + "?key=" + key)[0] == 401
    assert server.post({"prompt": "a"})[0] == 401 and server.get("/")[0] == server.get("/health")[0] == 200
    assert server.get("/runs", Authorization="Bearer " + key)[0] == 200
    other = Server(server.out, key=None)
    assert key not in other.process.stdout.readline()
    done = subprocess.run([SERVE, "--help"], capture_output=True, text=True, timeout=10)
    assert done.returncode == 0 and all(flag in done.stdout for flag in ("usage: ./serve [OUT]", "--no-key", "--key-file FILE"))


def test_a_link_in_a_run_is_not_read(tmp_path):
    """Neither as its log, nor as a checkpoint, nor as a run; nor a file of another user."""
    out, secret = make_run(tmp_path), tmp_path / "secret"
    secret.write_text(event("API_KEY=hunter2"))
    os.remove(out / "log.jsonl")
    os.symlink("../secret", out / "log.jsonl")
    os.symlink("step_00000100", out / "step_00000200")
    os.symlink("run", tmp_path / "other")
    server, runs = Server(out), Server(tmp_path)
    for each, path in ((server, "/log"), (server, "/runs"), (runs, "/log?run=run"), (runs, "/runs")):
        assert "hunter2" not in each.get(path)[1]
    assert server.get("/log") == (403, json.dumps({
        "error": "./log.jsonl: is no regular file of the folder's owner, wanted one that is no link"}) + "\n")
    assert "is or holds a link, wanted its" in server.post({"prompt": "a", "checkpoint": "step_00000200"})[1][0]["error"]
    for name in ("other", "..", ".", "run/../run", "run/", "secret", "%2e%2e", "%00", ""):
        assert (runs.get("/log?run=" + name)[0] == 404) == (name not in ("", "%00")), name
    template = out / "step_00000100" / "chat_template.jinja"
    template.write_text("{{ messages }}")
    assert '"chat": false' in runs.get("/runs")[1], "the newest checkpoint is a link"
    os.remove(out / "step_00000200")
    assert '"chat": true' in runs.get("/runs")[1]
    template.rename(tmp_path / "form")
    template.symlink_to(tmp_path / "form")
    assert '"chat": false' in runs.get("/runs")[1], "the template is a link"
    assert "step_00000100: is or holds a link, wanted" in server.post({"prompt": "a"})[1][0]["error"]
    template.unlink()
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "log.jsonl").write_text(config())
    assert "config" in runs.get("/log?run=late")[1]
    os.rename(tmp_path / "late", tmp_path / "moved")
    os.symlink("moved", tmp_path / "late")
    assert runs.get("/log?run=late")[0] == 404, "the run became a link"
    if os.geteuid() == 0:
        template.write_text("{{ messages }}")
        os.chown(template, 65534, 65534)
        assert '"chat": false' in runs.get("/runs")[1], "the template is of another user"
        assert "holds a link, wanted its owner's files" in server.post({"prompt": "a"})[1][0]["error"]
        os.remove(out / "log.jsonl")
        os.link(secret, out / "log.jsonl")
        assert "hunter2" in server.get("/log")[1], "a run's log may have a second name"
        os.chown(secret, 65534, 65534)
        assert server.get("/log")[0] == 403
        os.chown(secret, 0, 0)


def test_a_folder_lists_its_newest_200_runs(tmp_path):
    for i in range(203):
        (tmp_path / f"r{i}").mkdir()
        (tmp_path / f"r{i}" / "log.jsonl").write_text(config())
        os.utime(tmp_path / f"r{i}" / "log.jsonl", (1, 10**9 - i))
    server = Server(tmp_path)
    assert [r["name"] for r in json.loads(server.get("/runs")[1])["runs"]] == [f"r{i}" for i in range(200)]
    long = '"' + "x" * 9999 + '"'
    hostile = {"step": ("NaN", "-Infinity", "1e999", long, "[1]", "1." + "0" * 9999), "end": (long,)}
    for name, member in (("step", "loss"), ("end", "reason")):
        for value in hostile[name]:
            (tmp_path / "r0" / "log.jsonl").write_text(f'{{"event":"{name}","{member}":{value}}}\n')
            text = server.get("/runs")[1]
            assert json.loads(text, parse_constant=pytest.fail)["runs"][0][member] is None and len(text) < 40000, value[:9]
    (tmp_path / "r1" / "step_00000001").mkdir()
    for size, chats in ((9, True), (2 << 20, False)):
        (tmp_path / "r1" / "step_00000001" / "tokenizer_config.json").write_text('{"chat_template": "a"}'.ljust(size))
        assert f'["step_00000001"], "chat": {json.dumps(chats)}' in server.get("/runs")[1], size
    server.end()


def test_32_clients_that_stay_do_not_starve_the_33rd(server):
    """Neither those that ask nothing, nor those that do not read what they asked for; nor do questions that wait."""
    os.truncate(server.out + "/log.jsonl", 1 << 24)
    for request in (b"", f"GET /log HTTP/1.1\r\nHost: {server.name}\r\n\r\n".encode()):
        kept = [socket.create_connection((server.host, server.port)) for _ in range(32)]
        for s in kept:
            s.sendall(request)
        began = time.time()
        assert server.get("/health")[0] == 200 and time.time() - began < 4
        for s in kept:
            s.close()
    kept = [server.begin({"prompt": f"a b c{i}", "seed": 700}) for i in range(2)]
    time.sleep(0.2)
    kept += [socket.create_connection((server.host, server.port)) for _ in range(30)]
    assert server.get("/health")[0] == 200
    for i, s in enumerate(kept[:2]):
        assert s.makefile().read().count(f"c{i}") == 1, "a question that waits stays"


def test_nobody_keeps_a_place_by_requests_without_a_key(tmp_path):
    server = Server(make_run(tmp_path), key=None)
    for path in ("/", "/health", "/log", "/nothing"):
        kept = [socket.create_connection((server.host, server.port), timeout=9) for _ in range(32)]
        for s in kept:
            s.sendall(f"GET {path} HTTP/1.1\r\nHost: {server.name}\r\n\r\n".encode())
        began = time.time()
        wait_for(lambda: server_answers(server), 5)
        assert all(b"\r\nConnection: close\r\n" in s.recv(2000) for s in kept) and time.time() - began < 5, path
        for s in kept:
            s.close()
    server.end()


# ---------------------------------------------------------------------------------------------------------------------
# the log

def write(server, *lines):
    with open(server.out + "/log.jsonl", "a") as f:
        f.write("".join(lines))


def test_the_log_comes_by_its_bytes(server):
    log = server.out + "/log.jsonl"
    text = open(log).read()
    assert server.get("/log") == server.get("/log?from=x") == (200, text)
    for first, last in ((0, 9), (7, 20), (20, 7), (9, 9), (9, 10**17), (len(text), len(text) + 9), (2**64, 2**65)):
        assert server.get(f"/log?from={first}&to={last}") == (200, text[first:last]), (first, last)
    write(server, step(3), step(4)[:20])
    assert server.get(f"/log?from={len(text)}") == (200, step(3) + step(4)[:20])
    os.truncate(log, 1 << 39)
    assert server.get(f"/log?from={1 << 38}") == (200, "\0" * (8 << 20)) and server.memory() < MEMORY
    os.remove(log)
    assert server.get("/log") == (200, "") and '"empty"' in server.get("/runs")[1]
    os.mkfifo(log)
    assert server.get("/log")[0] == 403 and server.get("/health")[0] == 200


# ---------------------------------------------------------------------------------------------------------------------
# a long life

def test_a_run_has_the_same_bits_while_it_is_watched(trained):
    (trained / "watched").mkdir()
    server = Server(trained / "watched", trainer=TRAINER)
    watched = []

    def watch():
        while '"end"' not in "".join(watched):
            watched.append(server.get(f"/log?from={sum(map(len, watched))}")[1])
    watching = threading.Thread(target=watch)
    watching.start()
    train(trained, "watched")
    watching.join()
    assert "".join(watched) == (trained / "watched" / "log.jsonl").read_text()
    for name in ("model.safetensors", "state_rank00000.safetensors"):
        a, b = (open(trained / out / "step_00000012" / name, "rb").read() for out in ("out", "watched"))
        assert a == b, name
    before = {p: p.stat().st_mtime_ns for p in (trained / "watched").rglob("*")}
    assert server.post({"prompt": "A cat", "max_tokens": 3})[0] == 200
    assert before == {p: p.stat().st_mtime_ns for p in (trained / "watched").rglob("*")}, "the server writes nothing"
    server.end()


def test_slow_clients_half_requests_and_ten_thousand_connections(server):
    head = f"GET /health HTTP/1.1\r\nHost: {server.name}\r\n".encode()
    address = (server.host, server.port)
    slow = [socket.create_connection(address) for _ in range(12)]
    closed = []

    def drip():
        for i in range(28):
            time.sleep(0.5)
            for s in set(slow) - set(closed):
                try:
                    s.sendall(head[i:i + 1])
                except OSError:
                    closed.append(s)
    dripping = threading.Thread(target=drip)
    dripping.start()
    for i in range(11000):
        if i == 1000:
            warm = server.memory()
        if i % 50 == 0:  # those who watch, ask and leave
            server.get("/runs"), server.get("/log"), server.begin({"prompt": "word " * 9}).close()
        with socket.create_connection(address, timeout=20) as s:
            if i % 4 == 0:
                s.sendall(head[:i % len(head)])
            elif i % 8 == 1:
                s.sendall(b"\0\xff" * 50 + b"\r\n\r\n")
            elif i % 4 == 2:
                s.sendall(head + b"\r\n")
                assert b" 200 " in s.recv(100)
    grown = server.memory() - warm
    assert server.memory() < MEMORY and server.get("/health")[0] == 200
    assert grown < 512 or "sanitize" in SERVE, f"{grown} KiB more after 10,000 connections"
    dripping.join()
    assert len(closed) == len(slow), "a request that takes more than ten seconds is cut off"
    assert text_of(server.post({"prompt": "alive"})[1]) == " alive"
