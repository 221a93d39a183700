"""--chat: its answers over several turns against transformers, and a person at a terminal: editing, Ctrl-C, several lines.
text_stub.c is a chat whose model repeats each message, built with and without libedit (skipped where it is not installed).
TRAINER names the trainer that the last tests run."""
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time

import forks
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
TRAINER = os.environ.get("TRAINER", os.path.join(ROOT, "train_llama3"))
CC = os.environ.get("CC") or shutil.which("cc") or "gcc"
SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
            "<|im_start|>", "<|im_end|>"]

# in the style of published templates: the form of Llama 3.1, ChatML with a system message by default and without BOS, a form
# that hides earlier thoughts, and one that gives the system message to the first question
LLAMA31 = ("{{- bos_token }}{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
           "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}"
           "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
           "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}{{- 'Cutting Knowledge Date: December 2023\n' }}"
           "{{- 'Today Date: ' + date_string + '\n\n' }}{{- system }}{{- '<|eot_id|>' }}"
           "{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
           " + message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
           "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}")
CHATML = ("{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
          "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
THOUGHTS = ("{% for m in messages %}{% set text = m.content %}{% if m.role == 'assistant' and not loop.last %}"
            "{% set text = text[2:] | trim %}{% endif %}"
            "{{ '<|im_start|>' ~ m.role ~ '\n' ~ text ~ '<|im_end|>\n' }}{% endfor %}"
            "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
INST = ("{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content ~ '\n\n' %}{% set rest = messages[1:] %}"
        "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if m.role == 'user' %}{{ '[INST] ' ~ (system if loop.first else '') ~ m.content ~ ' [/INST]' }}"
        "{% else %}{{ ' ' ~ m.content | trim ~ eos_token }}{% endif %}{% endfor %}")
TALKS = {"llama31": (LLAMA31, SPECIALS[0], SPECIALS[1], "<|eot_id|>"), "chatml": (CHATML, "<|im_start|>", "<|im_end|>", "<|im_end|>"),
         "thoughts": (THOUGHTS, None, SPECIALS[1], "<|im_end|>"), "inst": (INST, SPECIALS[0], SPECIALS[1], SPECIALS[1])}


# ---------------------------------------------------------------------------------------------------------------------
# programs

@pytest.fixture(scope="session")
def plain():
    return str(forks.built("text_stub"))


@pytest.fixture(scope="session")
def edited(tmp_path_factory):
    source = b"#include <histedit.h>\nint main(void){return 0;}"
    check = subprocess.run([CC, "-x", "c", "-", "-ledit", "-o", "/dev/null"], input=source, stderr=subprocess.DEVNULL)
    if check.returncode != 0:
        pytest.skip("libedit is not installed (libedit-dev)")
    program = str(tmp_path_factory.mktemp("edited") / "text_stub")
    source = os.path.join(ROOT, "dev", "test", "python", "text_stub.c")
    subprocess.run([CC, "-std=c11", "-O1", "-Wno-unknown-pragmas", "-I", ROOT, source, "-o", program, "-DLLMC_LIBEDIT", "-ledit", "-lm",
                    "-lpthread"], check=True)
    return program


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
    assert "chat by the template of Llama 3; /help" in greeting
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
    assert t.status() == 0 and t.text.endswith("\r\n"), "the shell's prompt has a line of its own"


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
    t.send("/nope at all\n")
    assert "warning: /nope" in t.prompt()
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
# models

def saved(folder, kind, template, bos=SPECIALS[0], eos=SPECIALS[1]):
    """A folder with a tokenizer and a template."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from test_tokenizer import KINDS, train
    folder.mkdir()
    tok = train(KINDS[kind](), False, SPECIALS)
    tok.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder, {name: tok.token_to_id(name) for name in SPECIALS}


def random_model(folder, ids, bos, eos):
    """A small random model that writes no special token but the last two."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    shape = dict(vocab_size=800, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4)
    shape["initializer_range"] = 0.3  # so that each token matters
    config = transformers.LlamaConfig(num_key_value_heads=2, max_position_embeddings=8192, bos_token_id=ids.get(bos),
                                      eos_token_id=ids[eos], **shape)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name in SPECIALS:
            model.lm_head.weight[ids[name]] = 0
    model.save_pretrained(str(folder))
    return model.eval()


@pytest.mark.parametrize("name", TALKS)
def test_answers_over_three_turns_are_those_of_transformers(tmp_path, name):
    if not os.path.exists(TRAINER):
        pytest.skip(f"{TRAINER} is not built (make train_llama3)")
    template, bos, eos, end = TALKS[name]
    folder, ids = saved(tmp_path / "m", "smollm" if name == "chatml" else "llama3", template, bos, eos)
    model = random_model(folder, ids, bos, eos)
    torch, transformers = (pytest.importorskip(m) for m in ("torch", "transformers"))
    fast = transformers.AutoTokenizer.from_pretrained(str(folder))
    for system in ([], [{"role": "system", "content": "Be brief, it's 2024."}]):
        messages, want = list(system), []
        for text in ("The cat sat there.", "And then?", " 42 "):
            messages.append({"role": "user", "content": text})
            asked = torch.tensor([fast.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)])
            made = model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=12, do_sample=False,
                                  eos_token_id=[ids[eos], ids[end]], pad_token_id=0)[0, asked.shape[1]:]
            want.append(fast.decode(made, skip_special_tokens=True))
            messages.append({"role": "assistant", "content": want[-1]})
        talk = "The cat sat there.\nAnd then?\n 42 \n"
        flags = ["--system", system[0]["content"]] if system else []
        done = run(folder, "--chat", "--tokens", "12", "--temperature", "0", *flags, input=talk)
        assert done.stdout == "".join(text + "\n" for text in want), done.stderr
        question = json.dumps({"messages": messages[:-1], "temperature": 0, "max_tokens": 12}) + "\n"
        asked = subprocess.Popen([TRAINER, "--model", str(folder), "--answer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        asked.stdin.write(question)
        asked.stdin.flush()
        lines = [json.loads(asked.stdout.readline())]
        while "text" in lines[-1]:
            lines.append(json.loads(asked.stdout.readline()))
        asked.communicate()
        assert "".join(line["text"] for line in lines[:-1]) == want[-1]


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
    folder, ids = saved(tmp_path_factory.mktemp("model") / "m", "llama3", LLAMA31)
    random_model(folder, ids, SPECIALS[0], SPECIALS[1])
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
    file.write_text('{"do_sample": true, "temperature": null, "top_p": null}')
    assert run(other, "--generate", "the cat", "--tokens", "30").stdout != greedy, "null is absent"
    for member, wanted in (('"top_p": 2', "top_p is 2, wanted a number from 0 to 1"),
                           ('"top_k": 1.5', "top_k is 1.5, wanted an integer from 0 to 2147483647"),
                           ('"min_p": 0.1, "do_sample": true, "num_beams": 2, "typical_p": 1.0', "min_p, num_beams\n")):
        file.write_text("{" + member + "}")
        done = run(other, "--generate", "x")
        assert done.returncode == 0 and f"warning: {file}: " in done.stderr and wanted in done.stderr, done.stderr


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


def test_the_trainer_chats_by_the_folders_template(model, tmp_path):
    t = Terminal(TRAINER, "--model", str(model), "--chat", "--date", "1 May 2030", "--tokens", "8")
    assert f"chat by the template of {model}/chat_template.jinja, dated 1 May 2030; /help lists the commands" in t.prompt()
    t.send("/quit\n")
    assert t.status() == 0

    def answer(folder, *flags):
        return run(folder, "--chat", "--tokens", "8", "--temperature", "0", *flags, input="hi\n")
    done = answer(model)
    assert done.returncode == 0 and done.stdout.strip() and "chat by" not in done.stdout
    assert answer(model, "--date", "26 Jul 2024").stdout == done.stdout, "the template's own date"
    assert answer(model, "--date", "1 May 2030").stdout != done.stdout
    other = tmp_path / "other"
    shutil.copytree(model, other)
    file = other / "chat_template.jinja"
    for text, error in (("{{ raise_exception('not today') }}", "not today"), ("{% for %}", f"{file}:1:8: ")):
        file.write_text(text)
        done = answer(other)
        assert done.returncode == 1 and done.stderr.startswith(f"error: {file}:1:") and error in done.stderr, done.stderr
    file.unlink()
    config = {"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}"}]}
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    assert answer(other).returncode == 0
    (other / "tokenizer_config.json").write_text("{}")
    assert answer(other).returncode == 0, "Llama 3's, since the tokenizer has its tokens"


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
