"""--chat: its ids against transformers' apply_chat_template, and a person at a terminal: editing, Ctrl-C, several lines.
Compiles chat_stub.c, a chat whose model repeats each message, with and without libedit (skipped where it is not installed).
TRAINER names the trainer that the last tests run."""
import fcntl
import json
import os
import pty
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
TRAINER = os.environ.get("TRAINER", os.path.join(ROOT, "train_llama3"))
CC = os.environ.get("CC") or shutil.which("cc") or "gcc"
SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"

# after the published description of the formats
LLAMA30 = ("{% set loop_messages = messages %}{% for message in loop_messages %}"
           "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim"
           " + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
           "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}")
LLAMA31 = ("{{- bos_token }}{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
           "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}"
           "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
           "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}{{- 'Cutting Knowledge Date: December 2023\n' }}"
           "{{- 'Today Date: ' + date_string + '\n\n' }}{{- system }}{{- '<|eot_id|>' }}"
           "{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
           " + message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
           "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}")


# ---------------------------------------------------------------------------------------------------------------------
# programs

def compile_stub(folder, *flags):
    program = folder / "chat_stub"
    source = os.path.join(ROOT, "dev", "test", "python", "chat_stub.c")
    command = [CC, "-std=c11", "-O1", "-Wno-unknown-pragmas", "-I", ROOT, source, "-o", program, *flags, "-lm", "-lpthread"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    return str(program)


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    return compile_stub(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def edited(tmp_path_factory):
    source = b"#include <histedit.h>\nint main(void){return 0;}"
    check = subprocess.run([CC, "-x", "c", "-", "-ledit", "-o", "/dev/null"], input=source, stderr=subprocess.DEVNULL)
    if check.returncode != 0:
        pytest.skip("libedit is not installed (libedit-dev)")
    return compile_stub(tmp_path_factory.mktemp("edited"), "-DLLMC_LIBEDIT", "-ledit")


@pytest.fixture(params=["plain", "edited"])
def either(request):
    return request.getfixturevalue(request.param)


class Terminal:
    """A program at a terminal of its own."""

    def __init__(self, *command, **environment):
        self.fd, other = pty.openpty()
        self.text, self.before = "", termios.tcgetattr(other)
        self.edits = "edited" in str(command[0]) and environment.get("TERM") != "dumb"  # the program reads lines by libedit
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            fcntl.ioctl(other, termios.TIOCSCTTY, 0)
            for fd in range(3):
                os.dup2(other, fd)
            os.environ.update({"TERM": "xterm", "LC_ALL": "C", **environment})
            os.execv(command[0], list(command))
        self.other = other  # kept open: the state of the terminal outlives the program

    def expect(self, wanted, seconds=60):
        """Reads up to the pattern; returns what stands before it."""
        end = time.time() + seconds
        while not re.search(wanted, self.text):
            ready, _, _ = select.select([self.fd], [], [], max(0.0, end - time.time()))
            more = os.read(self.fd, 65536).decode(errors="replace") if ready else ""
            assert more, f"no {wanted!r} in {self.text!r}"
            self.text += more
        found = re.search(wanted, self.text)
        before, self.text = self.text[:found.start()], self.text[found.end():]
        return before

    def prompt(self):
        """Reads up to the prompt. libedit takes the terminal over only with the prompt; keys typed before may be lost."""
        before = self.expect(r"(?<!\w)> (\x1b\[K)?$|> $")
        self.wait_until_edited()
        return before

    def more(self):
        """Reads up to the prompt of a message's next line, as prompt()."""
        self.expect(r"\.\.\. ")
        self.wait_until_edited()

    def wait_until_edited(self):
        end = time.time() + 30
        while self.edits and self.usual() and time.time() < end:
            time.sleep(0.01)

    def send(self, text):
        os.write(self.fd, text.encode())

    def status(self):
        """Waits for the end of the program; returns its exit status, negative for a signal."""
        end = time.time() + 60
        while time.time() < end:
            if select.select([self.fd], [], [], 0.02)[0]:
                self.text += os.read(self.fd, 65536).decode(errors="replace")
                continue
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                assert self.usual(), "the terminal is not as it was"
                os.close(self.fd)
                os.close(self.other)
                return os.waitstatus_to_exitcode(status)
        raise AssertionError("the program does not end")

    def usual(self):
        """Whether the terminal is in the state that it had when the program started."""
        now = termios.tcgetattr(self.other)
        return now[:4] == self.before[:4] and now[6][termios.VINTR] == self.before[6][termios.VINTR]


def talk(program, mode="talk", **environment):
    terminal = Terminal(program, mode, **environment)
    greeting = terminal.prompt()
    assert "chat in the form of Llama 3.1, dated 26 Jul 2024" in greeting
    assert ("this program was built without libedit" in greeting) != ("edited" in program)
    return terminal


# ---------------------------------------------------------------------------------------------------------------------
# at a terminal

def test_a_message_is_answered_and_quit_ends_the_chat(either):
    t = talk(either)
    t.send("hello\n")
    assert "[hello]" in t.prompt()
    t.send("/quit\n")
    assert t.status() == 0


def test_ctrl_c_ends_the_answer_and_the_chat_goes_on(either):
    t = talk(either)
    t.send("count\n")
    t.expect("xxxxxxxx")
    t.send("\x03")
    assert "saves" not in t.prompt(), "a chat saves no step"
    t.send("and you\n")
    assert "[and you]" in t.prompt()
    t.send("\x03")  # at an empty line
    assert t.status() == 0 and "saves" not in t.text


def test_the_terminal_is_in_its_usual_state_during_an_answer_and_after_the_chat(either):
    t = talk(either)
    t.send("count\n")
    t.expect("xxxx")
    assert t.usual()
    t.send("\x03")
    t.prompt()
    t.send("\x04")  # Ctrl-D
    assert t.status() == 0


def test_several_lines_between_triple_quotes_are_one_message(either):
    t = talk(either)
    for line in ('"""', "one", "/quit", '"""'):
        t.send(line + "\n")
        if line != '"""' or "one" in t.text:
            t.more()
    assert "[one|/quit]" in t.expect(r"\]") + "]"
    t.prompt()
    t.send('"""one\n')
    t.more()
    t.send('two"""\n')
    assert "[one|two]" in t.expect(r"\]") + "]"
    t.prompt()
    t.send('"""\n')
    t.more()
    t.send("\x03")  # takes the message back
    t.prompt()
    t.send("three\n")
    assert "[three]" in t.expect(r"\]") + "]"
    t.send("/quit\n")
    assert t.status() == 0


def test_ctrl_c_just_after_the_prompt_is_not_lost(plain):
    t = talk(plain, "slow")
    for _ in range(10):
        t.send('"""\n')
        t.expect(r"\.\.\. ")
        t.send("\x03")
        t.expect(r"(?<!\.)> $", seconds=10)
    t.send("/quit\n")
    assert t.status() == 0


def test_commands_are_told_and_unknown_ones_refused(either):
    t = talk(either)
    t.send("/help\n")
    shown = t.prompt()
    assert all(word in shown for word in ("/help", "/clear", "/quit", '"""', "Ctrl-C"))
    t.send("/nope\n")
    assert "warning: /nope is no command, wanted /help, /clear or /quit" in t.prompt()
    t.send("/usr/bin is what?\n")
    assert "[/usr/bin is what?]" in t.prompt()
    t.send("/quit\n")
    assert t.status() == 0


def test_a_signal_that_ends_the_program_leaves_a_usual_terminal(edited):
    t = talk(edited)
    assert not t.usual(), "libedit reads keys, not lines"
    os.kill(t.pid, signal.SIGTERM)
    assert t.status() == -signal.SIGTERM


def test_lines_are_edited_and_come_back(edited):
    t = talk(edited)
    t.send("abd\x1b[Dc\n")
    assert "[abcd]" in t.prompt()
    t.send("h\u00e4\u4f60x\x7f\n")
    assert "[h\u00e4\u4f60]" in t.prompt()
    t.send("\x1b[A\x1b[A!\n")
    assert "[abcd!]" in t.prompt()
    t.send("junk")
    t.expect("junk")
    t.send("\x03")  # Ctrl-C clears the line
    t.prompt()
    t.send("fine\n")
    assert "[fine]" in t.prompt()
    t.send("\x12h\u00e4\n\n")  # Ctrl-R
    assert "[h\u00e4\u4f60]" in t.expect(r"\]") + "]"
    t.send("/quit\n")
    assert t.status() == 0


def test_pasted_lines_are_one_message(edited):
    t = talk(edited)
    t.send("say: \x1b[200~one\r\n/quit\x07\n\tthree\x1b[201~ end\n")
    assert "[say: one||/quit|\tthree end]" in t.expect(r"\]") + "]"
    t.prompt()
    t.send("/quit\n")
    assert t.status() == 0


def test_long_lines_are_not_cut(edited):
    t = talk(edited)
    text = "".join(chr(97 + i % 26) for i in range(6000))
    for i in range(0, 6000, 500):  # a terminal's own buffer holds 4 KiB
        t.send(text[i:i + 500])
        time.sleep(0.02)
    t.send("\n")
    assert t.expect(r"\]\r\n").endswith("[" + text)
    t.send("/quit\n")
    assert t.status() == 0


def test_lines_that_the_terminal_cuts_are_refused(plain):
    t = talk(plain)
    for _ in range(12):
        t.send("a" * 500)
        time.sleep(0.02)
    t.send("\n")
    assert "warning: the terminal cuts lines at 4095 bytes" in t.prompt()
    t.send("b" * 4000 + "\n")
    assert "[" + "b" * 4000 + "]" in t.expect(r"\]\r\n") + "]"
    t.send("/quit\n")
    assert t.status() == 0


def test_a_dumb_terminal_is_read_plainly(edited):
    t = talk(edited, TERM="dumb")
    assert t.usual()
    t.send("hello\n")
    assert "[hello]" in t.prompt()
    t.send("\x04")
    assert t.status() == 0


def test_from_a_pipe_come_bare_answers(either):
    long = "c" * 10000
    typed = f'hello\n\n/nope\n"""a\nb\n"""\n{long}\nlast'
    done = subprocess.run([either, "talk"], input=typed, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"[hello]\n[a|b]\n[{long}]\n[last]\n"
    assert done.stderr == "warning: /nope is no command, wanted /help, /clear or /quit\n"


# ---------------------------------------------------------------------------------------------------------------------
# the format

def saved(folder, kind, template, where):
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from test_tokenizer import KINDS, train
    folder.mkdir()
    tok = train(KINDS[kind](), False, SPECIALS)
    tok.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIALS[0], "eos_token": SPECIALS[1]}
    if where == "jinja":
        (folder / "chat_template.jinja").write_text(template)
        config["chat_template"] = "never this one"
    elif where == "list":
        config["chat_template"] = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
    elif where == "text":
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def ids_of(program, folder, date="26 Jul 2024", system="", user="hi"):
    done = subprocess.run([program, "ids", str(folder), date, system, user], capture_output=True, text=True)
    return (done.stdout.split()[0], [int(i) for i in done.stdout.split()[1:]]) if done.returncode == 0 else done.stderr


@pytest.mark.parametrize("kind", ["llama3", "gpt2"])
@pytest.mark.parametrize("form,where", [("plain", "text"), ("dated", "jinja"), ("dated", "text")])
def test_ids_are_those_of_transformers(plain, tmp_path, kind, form, where):
    transformers = pytest.importorskip("transformers")
    folder = saved(tmp_path / "t", kind, LLAMA31 if form == "dated" else LLAMA30, where)
    fast = transformers.AutoTokenizer.from_pretrained(str(folder))
    rng = random.Random(4)
    pieces = ["a", " the cat", "\n", "\r\n", " ", "\t", "\u00e9", "\u00a0", "\u3000", "\x1f", "\u200b", "\x85", "3.5", "!?",
              "it's", "\U0001f600", "\u2028"]
    for _ in range(60):
        user, system = ("".join(rng.choice(pieces) for _ in range(rng.randrange(8))) for _ in range(2))
        system = rng.choice(["", system]) if form == "dated" else system
        date = rng.choice(["26 Jul 2024", "1 January 2031"])
        messages = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": user}]
        want = fast.apply_chat_template(messages, add_generation_prompt=True, date_string=date, return_dict=False)
        assert ids_of(plain, folder, date, system, user) == (form, want), (system, user)


def test_the_dated_form_is_written_out(plain, tmp_path):
    """An oracle besides the template above: the text of the published format."""
    folder = saved(tmp_path / "t", "llama3", LLAMA31, "jinja")
    tok = __import__("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = ("<|begin_of_text|>" + HEAD.format("system") +
            "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n<|eot_id|>" + HEAD.format("user") +
            "Hi<|eot_id|>" + HEAD.format("assistant"))
    assert ids_of(plain, folder, user=" Hi ") == ("dated", tok.encode(text, add_special_tokens=False).ids)


def test_a_list_of_templates_has_a_default_and_none_is_llama_3s(plain, tmp_path):
    assert ids_of(plain, saved(tmp_path / "a", "llama3", LLAMA31, "list"))[0] == "dated"
    assert ids_of(plain, saved(tmp_path / "b", "llama3", "", "none"))[0] == "plain"


@pytest.mark.parametrize("where,file", [("jinja", "chat_template.jinja"), ("text", "tokenizer_config.json")])
def test_another_template_is_refused_by_name(plain, tmp_path, where, file):
    folder = saved(tmp_path / "a", "llama3", "{{ '<|im_start|>user' }}", where)
    wanted = "the chat template has no <|start_header_id|>, wanted Llama 3's or Llama 3.1's template"
    assert ids_of(plain, folder) == f"error: {folder}/{file}: {wanted}\n"
    folder = saved(tmp_path / "b", "llama3", LLAMA31.replace("December 2023", "May 2025"), where)
    assert "writes other dates" in ids_of(plain, folder)


# ---------------------------------------------------------------------------------------------------------------------
# the trainer

def test_the_makefile_builds_with_and_without_libedit():
    def flags(*words):
        return subprocess.run(["make", "-Bn", "train_llama3", *words], cwd=ROOT, capture_output=True, text=True).stdout
    assert "-ledit" not in flags("LIBEDIT=0") and "LLMC_LIBEDIT" not in flags("LIBEDIT=0")
    assert "-DLLMC_LIBEDIT" in flags("LIBEDIT=1") and "-ledit" in flags("LIBEDIT=1")


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A small random model with Llama 3.1's template and sampling of its own."""
    if not os.path.exists(TRAINER):
        pytest.skip(f"{TRAINER} is not built (make train_llama3)")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = saved(tmp_path_factory.mktemp("model") / "m", "llama3", LLAMA31, "jinja")
    torch.manual_seed(1)
    shape = dict(vocab_size=800, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4)
    shape["initializer_range"] = 0.3  # so that each token matters
    config = transformers.LlamaConfig(num_key_value_heads=2, max_position_embeddings=8192, bos_token_id=0, eos_token_id=1,
                                      **shape)
    transformers.LlamaForCausalLM(config).save_pretrained(str(folder))
    sampling = {"bos_token_id": 0, "eos_token_id": 1, "temperature": 0.05, "top_k": 1, "top_p": 0.9, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(sampling))
    return folder


def run(model, *flags, **more):
    return subprocess.run([TRAINER, "--model", str(model), *flags], capture_output=True, text=True, **more)


def test_sampling_comes_from_the_folder_unless_given(model, tmp_path):
    def text(*flags):
        return run(model, "--generate", "the cat", "--tokens", "30", *flags).stdout
    greedy = text("--temperature", "0")
    assert greedy and text() == greedy, "top_k of the folder is 1"
    assert text("--top-k", "0", "--temperature", "2") != greedy
    other = tmp_path / "other"
    shutil.copytree(model, other)
    file = other / "generation_config.json"
    file.write_text('{"temperature": null, "top_p": null}')
    assert run(other, "--generate", "the cat", "--tokens", "30").stdout != greedy, "null is absent"
    file.write_text('{"top_p": 2}')
    done = run(other, "--generate", "x")
    assert done.returncode == 1 and done.stderr == f"error: {file}: top_p is 2, wanted a number from 1e-06 to 1\n", done.stderr
    assert run(other, "--generate", "x", "--top-p", "1").returncode == 0
    file.write_text('{"top_k": 1.5}')
    done = run(other, "--generate", "x")
    assert done.returncode == 1 and f"{file}: top_k is 1.5, wanted an integer" in done.stderr


def test_texts_come_from_files(model, tmp_path):
    file = tmp_path / "prompt"
    file.write_text("the cat\nsat\r\n")
    greedy = ["--tokens", "8", "--temperature", "0"]
    want = run(model, "--generate", "the cat\nsat", *greedy).stdout
    assert run(model, "--generate", f"@{file}", *greedy).stdout == want and want.startswith("the cat\nsat")
    assert run(model, "--generate", "@@home", *greedy).stdout.startswith("@home")
    systems = (f"@{file}", "the cat\nsat", "other words")
    answers = [run(model, "--chat", "--system", system, *greedy, input="hi\n").stdout for system in systems]
    assert answers[0] == answers[1] != answers[2]
    wrong = (("@", '--generate: is "@", wanted @FILE'), ("@nowhere", "nowhere: cannot open"), (f"@{tmp_path}", str(tmp_path)))
    for text, wanted in wrong:
        done = run(model, "--generate", text)
        assert done.returncode == 1 and wanted in done.stderr, done.stderr
    file.write_bytes(b"a\0b")
    done = run(model, "--generate", f"@{file}")
    assert done.returncode == 1 and done.stderr == f"error: {file}: byte 1 is 0, wanted text\n"


def test_the_trainer_chats_in_the_folders_form(model, tmp_path):
    t = Terminal(TRAINER, "--model", str(model), "--chat", "--date", "1 May 2030", "--tokens", "8")
    assert "chat in the form of Llama 3.1, dated 1 May 2030; /help lists the commands" in t.prompt()
    t.send("/quit\n")
    assert t.status() == 0
    done = run(model, "--chat", "--tokens", "8", "--temperature", "0", input="hi\n")
    assert done.returncode == 0 and done.stdout.strip() and "chat in" not in done.stdout
    dated = run(model, "--chat", "--tokens", "8", "--temperature", "0", "--date", "26 Jul 2024", input="hi\n")
    assert dated.stdout == done.stdout, "the default date"
    dated = run(model, "--chat", "--tokens", "8", "--temperature", "0", "--date", "1 May 2030", input="hi\n")
    assert dated.stdout != done.stdout
    other = tmp_path / "other"
    shutil.copytree(model, other)
    (other / "chat_template.jinja").write_text("{{ '[INST]' }}")
    done = run(other, "--chat", input="hi\n")
    assert done.returncode == 1 and done.stderr.startswith(f"error: {other}/chat_template.jinja: the chat template has no")


def test_a_terminal_obeys_no_name(tmp_path):
    """File names on the lines of a run are escaped at a terminal, and unchanged in a pipe."""
    tokenize, evil = os.path.join(ROOT, "tokenize"), "no\x1b[2J\u009b31m"
    if not os.path.exists(TRAINER) or not os.path.exists(tokenize):
        pytest.skip("the programs are not built (make train_llama3 tokenize)")
    text, data, out = (str(tmp_path / (evil + end)) for end in (".txt", "/data.bin", "_out"))
    with open(text, "w", encoding="utf-8") as f:
        f.write("the cat sat on the mat\n" * 50)
    shape = ["--threads", "1", "--batch", "2", "--seq", "32", "--sample-tokens", "0"]
    new = ["--model", "d1", "--train", data, "--val", data, "--steps", "2", "--checkpoint-every", "1", *shape]
    commands = ([tokenize, "-o", data, text], [TRAINER, *new, "--dry-run"], [TRAINER, *new, "--out", out],
                [TRAINER, "--resume", out + "/step_00000001", "--out", out, *shape], [TRAINER, "--verify", out],
                [TRAINER, "--eval", "--model", out, "--val", data, *shape], [TRAINER, "--model", out, "--export", out + ".gguf"])
    for command in commands:
        t = Terminal(*command)
        assert t.status() == 0, t.text
        assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", t.text.replace("\r", "")), (command, t.text)
        assert "no\\x1b[2J\\xc2\\x9b31m" in t.text, (command, t.text)
    done = subprocess.run([TRAINER, "--verify", out], capture_output=True)
    assert done.stdout.count(evil.encode()) == 2
