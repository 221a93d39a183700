"""dev/serve/page.html in a real browser, served by ./serve beside a real run: Debian's chromium-headless-shell, driven through a
pipe by the DevTools protocol (https://chromedevtools.github.io/devtools-protocol). SERVE and TRAINER name other programs. Shows
that the page follows a run, asks its checkpoints, and neither runs nor loads anything that is not its own."""
import base64
import contextlib
import fcntl
import json
import os
import re
import select
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "dev/serve/page.html"
SERVE = os.environ.get("SERVE", ROOT / "serve")
TRAINER = os.environ.get("TRAINER", ROOT / "train_llama3")
BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium"))), None)
PROMPT = "Once upon a time"

if not BROWSER:
    pytest.skip("chromium-headless-shell is not installed", allow_module_level=True)
if not os.path.exists(SERVE):
    pytest.skip("libmicrohttpd is not installed", allow_module_level=True)


class Browser:
    """One page of a headless browser. Its pipe carries JSON messages, each ended by a NUL."""

    def __init__(self, profile):
        (take, self.out), (self.into, give) = os.pipe(), os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (take, give)]  # so that becoming 3 does not close the other
        for fd in (take, give):
            os.close(fd)
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
                 f"--user-data-dir={profile}"]
        self.pid = os.posix_spawn(BROWSER, [BROWSER, *flags], os.environ, file_actions=[
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0), *((os.POSIX_SPAWN_DUP2, fd, n) for n, fd in enumerate(high, 3)),
            *((os.POSIX_SPAWN_CLOSE, fd) for fd in high)])
        for fd in high:
            os.close(fd)
        self.sent, self.got, self.complaints, self.session = 0, b"", [], {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(domain + ".enable")

    def message(self):
        while b"\0" not in self.got:
            assert select.select([self.into], [], [], 30)[0], "the browser is silent for 30 s"
            part = os.read(self.into, 1 << 16)
            assert part, "the browser has died"
            self.got += part
        message, self.got = self.got.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **params):
        self.sent += 1
        os.write(self.out, json.dumps({"id": self.sent, "method": method, "params": params, **self.session}).encode() + b"\0")
        while (m := self.message()).get("id") != self.sent:
            if m["method"] in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                self.complaints.append(json.dumps(m["params"]))
        assert "error" not in m, (method, m["error"])
        return m["result"]

    def js(self, code):
        """The value of an expression; $ is the page's getElementById."""
        got = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in got, (code, got["exceptionDetails"])
        return got["result"].get("value")

    def text(self, name):
        return self.js(f"$('{name}').textContent")

    def wait(self, code, seconds=20):
        end = time.monotonic() + seconds
        while not (value := self.js(code)):
            assert time.monotonic() < end, f"not within {seconds} s: {code}"
            time.sleep(0.03)
        return value

    def wait_for_complaints(self, *words, seconds=20):
        """Waits until the browser has complained of each word."""
        end = time.monotonic() + seconds
        while not all(any(word in c for c in self.complaints) for word in words):
            assert time.monotonic() < end, (words, self.complaints)
            self.js("0")
            time.sleep(0.03)

    def open(self, url, **size):
        size = {"width": 1200, "height": 900, "deviceScaleFactor": 1, "mobile": False, **size}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && typeof pull === 'function'")
        self.complaints.clear()

    def press(self, key, **more):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **(more if kind == "keyDown" else {}))

    def mouse(self, *moves):
        for kind, x, y in moves:
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def ask(self, temperature=0, tokens=24):
        self.js(f"$('prompt').value = {json.dumps(PROMPT)}, $('temperature').value = {temperature},"
                f"$('max_tokens').value = {tokens}, $('write').click()")

    def cards(self):
        """What the cards show: head, prompt, text, foot."""
        return self.js("[...$('texts').children].map(c => [c.children[0].textContent, ...[...c.querySelectorAll('span')]"
                       ".map(s => s.textContent), c.lastChild.textContent])")

    def close(self):
        self.call("Browser.close")
        os.waitpid(self.pid, 0)


@contextlib.contextmanager
def served(browser, out, *flags):
    """Runs ./serve, and opens its page."""
    server = subprocess.Popen([SERVE, out, "--port", "0", "--trainer", TRAINER, *flags], stdout=subprocess.PIPE, text=True)
    try:
        url = re.match(r"serve +(\S+) shows ", server.stdout.readline())[1]
        if "--key-file" not in flags:
            url = re.match(r"open +(\S+#key=[0-9a-f]{32})\n", server.stdout.readline())[1]
        browser.open(url)
        yield url
    finally:  # first the page, which complains of a server that is gone
        browser.call("Page.navigate", url="about:blank")
        server.terminate()
        server.communicate(timeout=10)


def quickstart(out):
    """The command of a quickstart of 30 steps, which keeps three checkpoints."""
    make = ["make", "-s", "-o", "train_llama3", "-o", "tokenize", "HAS_GPU=", "STEPS=30", f"QUICKSTART_OUT={out}"]
    subprocess.run([*make, "dev/data/tinytales/tinytales_train.bin"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    shown = subprocess.run([*make, "-n", "quickstart"], cwd=ROOT, check=True, text=True, capture_output=True).stdout
    flags = shlex.split(shown.splitlines()[-2])[1:]
    return [TRAINER, *flags, *"--checkpoint-every 10 --val-every 10 --sample-every 10 --sample-tokens 20 --val-batches 2".split()]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    b = Browser(tmp_path_factory.mktemp("profile"))
    yield b
    b.close()


@pytest.fixture(autouse=True)
def quiet(browser):
    """No test lets the browser complain: of an exception, a blocked source or a failed request."""
    browser.complaints.clear()
    yield
    browser.js("0")
    assert browser.complaints == []


class Run:
    """A quickstart that the page watches from before its first line."""

    def __init__(self, url, out, browser):
        self.url, self.out, self.delays, self.losses = url, out, {}, {}
        written = {}  # step: its loss, and when its line was seen here
        trainer = subprocess.Popen(quickstart(out), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ended = late = False
        while not late and not (ended and len(written) == len(self.delays)):
            ended = trainer.poll() is not None
            for e in self.log():
                if e["event"] == "step":
                    written.setdefault(e["step"], (e["loss"], time.monotonic()))
            step, loss = browser.js("[+$('step').textContent || 0, $('loss').textContent]")
            now = time.monotonic()
            for n, (_, seen) in written.items():
                late |= now - seen > 10 and n not in self.delays
                if n <= step:
                    self.delays.setdefault(n, now - seen)
            if step in written:
                self.losses[step] = (loss, f"{written[step][0]:.4f}")
        trainer.wait()

    def log(self):
        path = self.out / "log.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]


@pytest.fixture(scope="module")
def run(browser, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    with served(browser, out) as url:
        yield Run(url, out, browser)


def greedy(checkpoint, tokens=24):
    return subprocess.run([TRAINER, "--model", checkpoint, "--generate", PROMPT, "--tokens", str(tokens), "--temperature", "0"],
                          check=True, capture_output=True, encoding="utf-8").stdout.rstrip("\n")


# --- the run

def test_a_running_quickstart_is_shown_within_two_seconds_of_each_log_line(run):
    assert len(run.delays) == 30 and max(run.delays.values()) < 2, run.delays
    assert len(run.losses) >= 3 and all(shown == logged for shown, logged in run.losses.values()), run.losses


def test_its_validation_samples_checkpoints_and_end_are_shown(run, browser):
    browser.open(run.url)
    browser.wait("$('status').textContent === 'finished' && $('checkpoint').length === 5")
    log = run.log()
    assert re.match(r"0\.\d\d GiB", browser.text("memory")) and browser.text("gnorm") != "–"
    assert browser.text("val") == f"{[e['loss'] for e in log if e['event'] == 'val'][-1]:.4f}"
    assert browser.text("of") == "step of 30" and browser.text("about").startswith("d3 · ")
    samples = browser.js("[...$('samples').children].map(a => [...a.children].map(c => c.textContent))")
    assert samples == [[f"step {e['step']}", e["text"]] for e in log[::-1] if e["event"] == "sample"] and len(samples) == 3
    assert browser.js("[...$('checkpoint')].map(o => o.value)") == ["", "all", "step_00000030", "step_00000020", "step_00000010"]


def line(event, **fields):
    return json.dumps({"event": event, **fields}, separators=(",", ":")) + "\n"


def step(n, loss, **fields):
    return line("step", step=n, loss=loss, **{"lr": 1e-3, "ms": 5, "tok_s": 100, "seconds": n, **fields})


def config(began):
    """The first line of a run that began at a time, in seconds since 1970."""
    return line("config", time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)), options={"model": "d1", "steps": 9},
                model={"parameters": 1}, precision="FP32", machine="m")


def test_a_long_history_is_shown_within_two_seconds(browser, tmp_path):
    (tmp_path / "log.jsonl").write_text("".join(step(n, 9 - n / 1000) for n in range(1, 7001)))
    with served(browser, tmp_path):
        browser.wait("$('step').textContent === '7,000' && $('loss').textContent === '2.0000'", 2)
        assert browser.js("run.steps.length") == 7000 and "red: " not in browser.text("legend")
        far = [n * 1e17 for n in range(1, 99999) if n * 1e17 * (1000 / (n * 1e17 + 1)) == 1000][:9500]  # no step of a run
        with (tmp_path / "log.jsonl").open("a") as f:
            f.writelines(step(n, 2) for n in far)
        browser.wait(f"run.steps.at(-1)?.step === {far[-1]}")
        assert browser.js("run.steps.length") <= 9000, "steps beyond those that a double counts are thinned, too"


def test_a_run_that_was_set_back_loses_its_later_steps(browser, tmp_path):
    log, kept = tmp_path / "log.jsonl", config(time.time()) + step(1, 8) + step(2, 7)
    later = [line("val", step=5, loss=4.5), line("sample", step=5, text="x"), line("end", step=5, reason="done", seconds=5)]
    log.write_text(kept + step(5, 4) + "".join(later))
    with served(browser, tmp_path):
        browser.wait("$('loss').textContent === '4.0000' && $('samples').textContent && $('status').textContent === 'finished'")
        with log.open("r+") as f:
            f.truncate(len(kept))
        with log.open("a") as f:
            f.write(step(3, 6.5))
        browser.wait("$('loss').textContent === '6.5000'")
        browser.wait("$('status').textContent === 'training'")
        assert browser.js("run.steps.map(p => p.loss)") == [8, 7, 6.5]
        assert browser.text("val") == "–" and browser.text("samples") == ""


def test_a_line_that_is_no_event_of_a_run_is_skipped(browser, tmp_path):
    """More bad lines than the connections that a browser has for one server."""
    bad = ["{\"event\":\n" * 8, "null\n", line("toString"), line("config"), step("x", 1), line("step", loss=5)]
    odd = [step(2, 7, lr=None), step(3, "low"), line("val", step=3, loss="low")]
    (tmp_path / "log.jsonl").write_text("".join([step(1, 8), *bad, *odd, step(4, 6)]))
    with served(browser, tmp_path):
        browser.wait("$('loss').textContent === '6.0000' && $('val').textContent === '–'", 5)
        assert browser.js("run.steps.map(p => p.loss)") == [8, 7, None, 6]
        browser.js("at = 2, draw()")
        assert "rate –" in browser.text("readout")


def test_a_line_that_is_no_event_does_not_stop_the_page(browser, tmp_path):
    odd, options = {"toString": 1, "valueOf": 1}, {"model": "d1", "steps": 9}
    deep = line("config", options={**options, "deep": 0}).replace('"deep":0', '"deep":' + "[" * 9000 + "]" * 9000)
    bad = [line("config", options={**options, "model": odd}), line("config", options=options, argv=[odd]), deep,
           line("config", options=options, model={"parameters": odd}), line("plan", steps=odd),
           line("plan", steps=0).replace("0}", "1e-320}"), line("end", reason=odd, seconds=odd),
           line("sample", step=odd, text=odd), step(-5, 1), step(2, 7, lr=True, gnorm=True, tok_s=True)]
    for each in bad:
        (tmp_path / "log.jsonl").write_text(config(time.time()) + step(1, 8) + each + step(4, 6))
        with served(browser, tmp_path):
            browser.wait("$('loss').textContent === '6.0000' && $('flags').querySelectorAll('tr').length > 1")
            browser.js("at = 3, numbers(), samples(), draw()")
            assert not browser.complaints, each[:200]


def test_a_response_that_is_left_gives_its_connection_back(browser, tmp_path):
    (tmp_path / "log.jsonl").write_text(step(1, 8))
    with served(browser, tmp_path):
        browser.js("void (async () => { for (window.got = 0; got < 8; got++)"
                   " for await (const line of lines(await request('/log'))) break; })()")
        browser.wait("got === 8", 5)


def test_a_dead_run_is_known_by_its_lock(browser, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(config(0) + step(1, 8))
    with open(tmp_path / ".lock", "w") as lock, served(browser, tmp_path):
        browser.wait("$('loss').textContent === '8.0000' && $('status').textContent === 'killed: --resume continues'")
        fcntl.flock(lock, fcntl.LOCK_EX)
        browser.wait("$('status').textContent === 'training'")
        os.utime(log, (1, 1))
        browser.wait("/^quiet for [0-9]{6}:/.test($('status').textContent)")
        with log.open("a") as f:
            f.write(step(2, 7) + line("end", step=2, reason="signal", seconds=5))
        lock.close()
        browser.wait("$('loss').textContent === '7.0000' && $('status').textContent === 'stopped: signal'")


def test_a_page_that_stays_open_for_very_many_validations_is_shown_them_thinned(browser, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(step(1, 8))
    with served(browser, tmp_path):
        browser.wait("$('loss').textContent === '8.0000'")
        with log.open("a") as f:
            f.writelines(line("val", step=n, loss=9 - n / 1e5 if n % 70000 else 99) for n in range(1, 150001))
            f.write(step(150001, 7))
        browser.wait("$('loss').textContent === '7.0000' && $('val').textContent === '7.5000'")
        browser.wait("$('chart').querySelector('.val').getAttribute('d').length > 1000", 5)
        steps = browser.js("run.vals.map(p => p.step)")
        assert len(steps) <= 9000 and max(b - a for a, b in zip([0, *steps], steps)) <= 2 * 150000 / 1000
        assert browser.js("run.vals.filter(p => p.loss === 99).map(p => p.step)") == [70000, 140000]
        assert browser.js("document.querySelectorAll('circle').length") == 0, "many validations are no chain of beads"


# --- questions

def test_a_greedy_answer_equals_generate(run, browser):
    browser.open(run.url)
    browser.wait("$('checkpoint').length === 5")
    browser.js("$('checkpoint').value = 'step_00000020'")
    browser.ask(tokens=8)
    browser.wait("$('texts').textContent && $('stop').disabled")
    [[head, prompt, text, foot]] = browser.cards()
    assert head.startswith("step 20 ") and foot == "8 tokens, as many as asked for"
    assert (prompt + text).rstrip("\n") == greedy(run.out / "step_00000020", 8)


def test_replay_shows_the_text_of_each_checkpoint(run, browser):
    browser.open(run.url)
    browser.wait("$('checkpoint').length === 5")
    browser.js("$('checkpoint').value = 'all'")
    browser.ask()
    browser.wait("$('texts').childElementCount === 3 && $('stop').disabled", 40)
    cards = browser.cards()
    assert [head.split(" validation")[0] for head, *_ in cards] == ["step 10", "step 20", "step 30"]
    assert [(p + t).rstrip("\n") for _, p, t, _ in cards] == [greedy(run.out / f"step_000000{n}") for n in (10, 20, 30)]
    assert len({t for _, _, t, _ in cards}) == 3  # the checkpoints differ


def test_a_chosen_checkpoint_that_the_run_removes_is_not_replaced(run, browser, tmp_path):
    for n in (10, 20, 30):
        shutil.copytree(run.out / f"step_000000{n}", tmp_path / f"step_000000{n}", copy_function=os.link)
    with served(browser, tmp_path):
        browser.wait("$('checkpoint').length === 5")
        browser.js("$('checkpoint').value = 'step_00000010'")
        shutil.rmtree(tmp_path / "step_00000010")
        for _ in range(2):
            browser.ask()
            browser.wait("$('stop').disabled && $('texts').textContent")
            assert browser.text("texts") == "The run has removed this checkpoint."
            assert browser.js("[...$('checkpoint')].map(o => o.text)") == ["newest", "every one", "step 30", "step 20", "step 10, removed"]
        browser.js("$('checkpoint').value = ''")
        browser.ask(tokens=1)
        browser.wait("$('stop').disabled && $('texts').textContent.startsWith('step 30 ')")
        assert browser.js("$('checkpoint').length") == 4


@pytest.mark.parametrize("how", ["button", "Escape", "another question"])
def test_stop_stops(run, browser, how):
    browser.open(run.url)
    browser.wait("$('checkpoint').length === 5")
    browser.js("$('checkpoint').value = 'all'")
    browser.ask(tokens=8000)
    browser.wait("$('texts').querySelector('span:last-child')?.textContent.length > 20")
    if how == "another question":
        browser.js("$('checkpoint').value = ''")
        browser.ask()
        browser.wait("$('stop').disabled")
        [[_, prompt, text, _]] = browser.cards()
        assert (prompt + text).rstrip("\n") == greedy(run.out / "step_00000030")
        return
    browser.press("Escape") if how == "Escape" else browser.js("$('stop').click()")
    browser.wait("$('stop').disabled", 2)
    [[_, _, text, foot]] = browser.cards()  # a stopped replay asks no further checkpoint
    time.sleep(0.5)
    assert browser.cards()[0][2:] == [text, "stopped"] and foot == "stopped"
    assert browser.js("document.querySelector('.writing')") is None


def test_an_error_of_the_server_is_shown(run, browser):
    browser.open(run.url)
    browser.ask(tokens=10**12)
    browser.wait("$('stop').disabled")
    assert browser.cards()[0][-1].startswith("error: ")
    assert all("Failed to load resource" in c for c in browser.complaints)
    browser.complaints.clear()


# --- chart, keyboard, narrow screens

def test_the_chart_zooms_and_changes_its_scale(run, browser):
    browser.open(run.url)
    browser.wait("$('status').textContent === 'finished'")
    line = "$('chart').querySelector('.raw').getAttribute('d')"
    labels = "[...$('chart').querySelectorAll('text')].map(t => t.textContent)"
    before, (x, y, width) = browser.js(line), browser.js("(r => [r.x, r.y, r.width])($('chart').getBoundingClientRect())")
    assert before.count("L") == 29
    browser.press("l", text="l")
    linear = browser.js(line)
    assert linear != before
    browser.js("$('logstep').click()")
    assert browser.js(line) not in (before, linear)
    browser.js("$('logstep').click()")
    left, right = x + width / 4, x + width / 2
    browser.mouse(("mousePressed", left, y + 90), ("mouseMoved", right, y + 90), ("mouseReleased", right, y + 90))
    near = browser.js(line).count("L")
    assert 5 <= near <= 9 and "8" in browser.js(labels) and "25" not in browser.js(labels)
    assert re.match(r"step 1\d · loss \d", browser.text("readout"))
    browser.js("$('chart').focus()")
    browser.press("+")
    assert browser.js(line).count("L") < near
    browser.press("0")
    assert browser.js(line) == linear and browser.js("$('whole').disabled")


def test_the_steps_under_a_narrow_chart_are_whole_and_apart(browser, tmp_path):
    for last in (1200, 120000):
        (tmp_path / "log.jsonl").write_text("".join(step(i, 9 - i / last) for i in range(last // 100, last + 1, last // 100)))
        with served(browser, tmp_path):
            browser.call("Emulation.setDeviceMetricsOverride", width=390, height=900, deviceScaleFactor=1, mobile=True)
            browser.wait(f"run.steps.at(-1)?.step === {last} && $('chart').clientWidth < 390")
            browser.js("draw()")
            sides = browser.js("[...$('chart').querySelectorAll('text')].filter(t => t.getAttribute('y') === '542')"
                               ".map(t => (b => [b.left, b.right])(t.getBoundingClientRect()))")
            edge = browser.js("$('chart').getBoundingClientRect().right")
            assert len(sides) >= 2 and sides[-1][1] <= edge, (last, sides)
            assert all(a[1] + 4 < b[0] for a, b in zip(sides, sides[1:])), (last, sides)


def test_the_chart_takes_the_mouse_before_the_first_step(browser, tmp_path):
    with served(browser, tmp_path):
        browser.js("$('chart').onpointermove({offsetX: 90})")
        assert browser.text("readout") == ""


def test_the_page_is_used_by_keyboard_and_on_a_narrow_screen(run, browser):
    browser.open(run.url, width=340, mobile=True)
    browser.press("/")
    assert browser.js("document.activeElement.id") == "prompt"
    browser.js("$('prompt').value = 'd', $('max_tokens').value = 3")
    browser.press("d")  # is text here
    assert browser.js("document.documentElement.style.colorScheme") == ""
    browser.press("Enter", modifiers=2)
    browser.wait("$('texts').textContent && $('stop').disabled")
    assert browser.cards()[0][3] == "3 tokens, as many as asked for"
    assert browser.js("document.documentElement.scrollWidth") == 340
    color = "getComputedStyle(document.body).backgroundColor"
    light = browser.js(color)
    browser.js("document.activeElement.blur()")
    browser.press("d")
    assert browser.js(color) != light


# --- several runs, and a chat

@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    """A folder of three runs: the quickstart, a link's worth of it that was killed, and a long one with a spike of two steps."""
    out = tmp_path_factory.mktemp("runs")
    shutil.copytree(run.out, out / "first")
    shutil.copytree(run.out, out / "killed")
    log = re.sub('"lr":[0-9.e-]+', '"lr":0.5', (out / "killed/log.jsonl").read_text(), count=1).splitlines(True)
    (out / "killed/log.jsonl").write_text("".join(log[:-1]))
    odd = {30000: 9.5, 30001: 9.7, 20000: None}
    (out / "long").mkdir()
    (out / "long/log.jsonl").write_text(config(0) + "".join(step(n, odd.get(n, 2.3 + n % 9 / 99)) for n in range(1, 50001)))
    os.utime(out / "long/log.jsonl", (1, 1))
    return out


def picture(browser, name, height=1500, **size):
    """Takes a picture of a state, which PICTURES=FOLDER keeps. Nothing lies beside the screen."""
    size = {"width": 1200, "height": height, "deviceScaleFactor": 1, "mobile": "width" in size, **size}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    browser.js("draw(), new Promise(resolve => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
    assert browser.js("document.documentElement.scrollWidth <= innerWidth"), name
    data = base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"])
    assert len(data) > 20000, name
    if "PICTURES" in os.environ:
        Path(os.environ["PICTURES"], name + ".png").write_bytes(data)


def test_a_folder_lists_its_runs_and_lays_them_over_each_other(browser, folder):
    with served(browser, folder):
        browser.wait("$('list').rows.length === 4")
        rows = browser.js("Object.fromEntries([...$('list').rows].map(r => [...r.cells].map(c => c.textContent)).map(t => [t[1], t]))")
        assert rows["first"][2:4] == ["finished", "30"] and rows["killed"][2] == rows["long"][2] == "killed"
        assert browser.js("$('main').hidden") and browser.text("status") == "choose a run"
        picture(browser, "list")
        for name in ("first", "killed"):
            browser.js(f"[...$('list').querySelectorAll('input')].find(i => i.ariaLabel === 'compare {name}').click()")
        browser.wait("runs.length === 2 && runs.every(r => r.steps.length === 30) && $('checkpoint').length === 5")
        assert browser.js("document.querySelectorAll('#chart .c0 .raw, #chart .c1 .raw').length") == 8
        assert browser.text("legend").startswith("first killed ")
        browser.wait("$('flags').open && $('flags').querySelectorAll('tr').length === 2")
        log = (folder / "first/log.jsonl").read_text().splitlines()[0]
        table = browser.js("[...$('flags').querySelectorAll('tr')].map(r => [...r.cells].map(c => c.textContent))")
        assert table == [["", "first", "killed"], ["lr", str(json.loads(log)["options"]["lr"]), "0.5"]]
        browser.ask(tokens=5)
        browser.wait("$('texts').childElementCount === 2 && $('stop').disabled")
        assert [c[0].split(" · ")[0] for c in browser.cards()] == ["step 30 first", "step 30 killed"]
        assert browser.js("location.hash").endswith("&run=first&run=killed")
        picture(browser, "overlay"), picture(browser, "overlay-narrow", 2600, width=390)
        os.mkdir(folder / "endless")
        with (folder / "endless/log.jsonl").open("w") as f:
            f.truncate(1 << 43)
        browser.js("choose(['endless'])")
        browser.wait("run.at > 2 ** 24")
        browser.js("choose(['first'])")
        browser.wait("run.steps.length === 30", 5)
        shutil.rmtree(folder / "endless")


def test_a_spike_of_two_steps_in_50000_is_seen(browser, folder):
    with served(browser, folder / "long"):
        browser.wait("run.steps.at(-1)?.step === 50000 && $('status').textContent === 'killed: --resume continues'")
        assert browser.js("run.steps.filter(p => p.loss > 9).map(p => p.step)") == [30001], "the greatest"
        browser.wait("document.querySelectorAll('#chart .bad').length === 1 && $('legend').textContent.includes('red: ')")
        assert browser.js("run.steps.length") <= 9000
        browser.js("show(19900, 20100)")
        browser.wait("points(run, 'steps').filter(p => p.step >= 19900 && p.step <= 20100).length === 201")
        picture(browser, "spike")


def test_a_chat_has_turns_and_stops_and_answers_again(run, browser):
    browser.open(run.url)
    browser.wait("$('checkpoint').length === 5 && !$('talks').hidden && $('prompts').childElementCount > 0")
    start = browser.js("$('prompts').firstChild.click(), $('prompt').value")
    assert start and any(e.get("text", "").strip().startswith(start.split()[0]) for e in run.log())
    browser.js("$('chat').click(), $('checkpoint').value = 'step_00000020'")
    for n, text in enumerate(("Who are you?", "And I?")):
        browser.js(f"$('prompt').value = '{text}', $('temperature').value = 1, $('max_tokens').value = 8, $('write').click()")
        browser.wait(f"$('texts').childElementCount === {2 * n + 2} && $('stop').disabled")
    roles = "talk.map(t => t.role).join(' ')"
    assert browser.js(roles) == "user assistant user assistant" and browser.text("write") == "Send"
    assert browser.js("$('texts').children[3].children[0].textContent").startswith("step 20 ")
    browser.js("$('again').click()")
    browser.wait("$('seed').value === '43' && $('stop').disabled")
    assert browser.js(roles) == "user assistant user assistant" and browser.js("$('texts').childElementCount") == 4
    picture(browser, "chat"), browser.js("$('theme').click()"), picture(browser, "chat-dark-narrow", 2600, width=390)
    browser.js("$('prompt').value = 'Once more', $('max_tokens').value = 8000, $('write').click()")
    browser.wait("$('texts').childElementCount === 6 && $('texts').lastChild.querySelector('span')?.textContent.length > 5")
    browser.press("Escape")
    browser.wait("$('stop').disabled && $('texts').lastChild.lastChild.textContent === 'stopped'")
    browser.js("$('anew').click()")
    assert browser.text("texts") == "" and browser.js("talk.length") == 0


# --- safety

def test_the_page_asks_for_the_key(run, browser, tmp_path):
    (tmp_path / "key").write_text("a-long-and-secret-key-0123456789\n")
    (tmp_path / "key").chmod(0o600)
    with served(browser, run.out, "--host", "127.0.0.1", "--key-file", tmp_path / "key"):
        for key in ("wrong", "ключ", "a-long-and-secret-key-0123456789"):  # a header cannot carry the second
            browser.wait("!$('lock').hidden && $('status').textContent === 'locked'")
            browser.js(f"$('key').value = '{key}', $('lock').requestSubmit()")
        browser.wait("$('status').textContent === 'finished' && $('lock').hidden && $('checkpoint').length === 5")
        browser.ask()
        browser.wait("$('texts').textContent && $('stop').disabled")
        assert "tokens, " in browser.cards()[0][-1]
    assert all("401" in c or "ERR_" in c for c in browser.complaints), browser.complaints
    browser.complaints.clear()


def test_a_late_refusal_of_an_older_key_does_not_ask_again(browser, tmp_path):
    (tmp_path / "key").write_text("a-long-and-secret-key-0123456789\n")
    (tmp_path / "key").chmod(0o600)
    with served(browser, tmp_path, "--host", "127.0.0.1", "--key-file", tmp_path / "key"):
        browser.wait("!$('lock').hidden && $('status').textContent === 'locked'")
        browser.js("window.late = new Promise(resolve => window.refuse = resolve), window.real = fetch")
        browser.js("window.fetch = async (...what) => { const r = await real(...what); await late; return r; }")
        browser.js("void request('/health').then(r => window.got = r.ok), window.fetch = real, 0")
        browser.js("$('key').value = 'a-long-and-secret-key-0123456789', $('lock').requestSubmit()")
        browser.wait("$('status').textContent === 'no run here yet'")
        browser.js("refuse()")
        browser.wait("window.got", 5)
        assert browser.js("$('lock').hidden")
    assert all("401" in c or "ERR_" in c for c in browser.complaints), browser.complaints
    browser.complaints.clear()


def test_the_browser_refuses_all_that_is_not_the_pages_own(run, browser):
    browser.open(run.url)
    browser.js("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.foreign = 1'}))")
    browser.js("document.body.insertAdjacentHTML('beforeend', '<img src=/x onerror=\"foreign = 1\"><p style=\"color: red\">')")
    browser.js("fetch('http://127.0.0.2:1/').catch(() => 0)")
    browser.wait_for_complaints("inline script", "event handler", "img-src", "style-src", "connect-src", "Fetch API")
    assert browser.js("window.foreign") is None
    browser.complaints.clear()


def test_a_text_of_the_run_is_no_markup(browser, tmp_path):
    text = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    (tmp_path / "log.jsonl").write_text(json.dumps({"event": "sample", "step": 1, "text": text}) + "\n")
    with served(browser, tmp_path):
        browser.wait("$('samples').childElementCount === 1")
        assert browser.js("$('samples').querySelector('div').textContent") == text
        assert browser.js("document.querySelectorAll('img, #samples script').length") == 0


def test_a_text_may_have_any_line_separator(browser, tmp_path):
    text = "a\u2028b\u2029c\u0085d\re"
    (tmp_path / "log.jsonl").write_text(json.dumps({"event": "sample", "step": 1, "text": text}, ensure_ascii=False) + "\n",
                                        encoding="utf-8")
    with served(browser, tmp_path):
        browser.wait("$('samples').childElementCount === 1")
        assert browser.js("run.samples[0].text") == text


def test_the_source_keeps_to_what_its_policy_can_name():
    source = PAGE.read_text(encoding="utf-8")
    assert source.count("<style>") == source.count("</style>") == source.count("<script>") == source.count("</script>") == 1
    body = re.sub(r"<(script|style)>.*?</\1>", "", source, flags=re.S)
    assert not re.search(r"<[^>]*\s(on\w+|style|src|href)\s*=", body)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", source)
    assert set(re.findall(r"https?://[^']*", source)) == {"http://www.w3.org/2000/svg"}
    assert source.count("\n") <= 440
