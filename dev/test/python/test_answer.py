"""--answer: its texts are those of --generate and --chat, byte for byte; a program talks to it line by line. TRAINER names the
trainer."""
import json
import os
import subprocess

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
TRAINER = os.environ.get("TRAINER", os.path.join(ROOT, "train_llama3"))
TOKENIZE = os.path.join(ROOT, "tokenize")
TOKENIZER = os.path.join(ROOT, "dev", "data", "tinytales", "tokenizer.json")


def run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def trained(folder, text, *flags):
    """A model of eight steps: with less, it would write the same token again and again."""
    (folder / "text").write_text(text * 200)
    run(TOKENIZE, "--tokenizer", TOKENIZER, *flags, "-o", folder / "a.bin", folder / "text")
    run(TRAINER, "--model", "d1", "--tokenizer", TOKENIZER, "--train", folder / "a.bin", "--steps", 8, "--lr", "1e-2",
        "--batch", 2, "--seq", 64, "--sample-tokens", 0, "--out", folder / "out")
    return folder / "out"


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("model"),
                   "A cat saw a dog. The dog said: hello, little cat, come to my house \U0001f431.\n")


class Asked:
    """The program, which waits for questions."""

    def __init__(self, model, *flags):
        self.process = subprocess.Popen([TRAINER, "--model", str(model), "--answer", *flags], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE)

    def send(self, **question):
        self.process.stdin.write(json.dumps(question).encode() + b"\n")
        self.process.stdin.flush()

    def line(self):
        return json.loads(self.process.stdout.readline())

    def answer(self):
        """Returns the text of an answer and its last line."""
        text, line = "", self.line()
        while "text" in line:
            text, line = text + line["text"], self.line()
        return text, line

    def ask(self, **question):
        self.send(**question)
        return self.answer()

    def end(self):
        self.process.stdin.close()
        return self.process.stdout.read(), self.process.wait()


def test_texts_are_those_of_generate_and_chat(model):
    asked = Asked(model, "--tokens", "30")
    for prompt in ("A cat", "", "the \U0001f431"):
        for flags in ({"temperature": 0}, {"temperature": 1.5, "seed": 7}, {"top_k": 3, "max_tokens": 5}, {"top_p": 0.5}):
            words = [w for name, value in flags.items() for w in ("--" + name.replace("_", "-"), value)]
            text, last = asked.ask(prompt=prompt, **flags)
            want = run(TRAINER, "--model", model, "--generate", prompt, "--tokens", 30, *words).decode()
            assert (prompt + text).rstrip("\n") == want.rstrip("\n"), flags
            assert last["reason"] == ("end" if last["tokens"] < flags.get("max_tokens", 30) else "length")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text, last = asked.ask(messages=messages, temperature=0)
    chat = run(TRAINER, "--model", model, "--chat", "--system", "Be brief.", "--tokens", 30, "--temperature", 0, input=b"Hi\n")
    assert text.rstrip("\n") == chat.decode().rstrip("\n")
    assert asked.end() == (b"", 0)


def test_the_end_of_a_turn_ends_an_answer_to_messages_alone(tmp_path):
    """The model has learnt to end its turns, but its config.json does not name their end, as in Llama 3's base models."""
    messages = [{"role": "user", "content": "Hi"}]
    answer = {"role": "assistant", "content": "A cat saw a dog."}
    checkpoint = trained(tmp_path, json.dumps({"messages": [*messages, answer]}) + "\n", "--chat") / "step_00000008"
    for name in ("config.json", "generation_config.json"):
        text = (checkpoint / name).read_text()
        changed = text.replace('"eos_token_id": [2041, 2046]', '"eos_token_id": 2041')
        assert changed != text
        (checkpoint / name).write_text(changed)
    asked = Asked(checkpoint, "--temperature", "0", "--tokens", "30")
    for _ in range(2):
        text, last = asked.ask(messages=messages)
        assert last["reason"] == "end" and "<|eot_id|>" not in text
        text, last = asked.ask(prompt="A cat")
        assert last["reason"] == "length" and "<|eot_id|>" in text
    assert asked.end() == (b"", 0)


def test_a_program_stops_an_answer_and_asks_on(model):
    asked = Asked(model)
    text, last = asked.ask(prompt="A cat", seed=3, temperature=2, max_tokens=20)
    for _ in range(5):
        asked.send(prompt="A cat", seed=3, temperature=100, top_p=1, max_tokens=1000000)
        assert "text" in asked.line()
        asked.send(stop=True)
        assert asked.answer()[1]["reason"] in ("stop", "end")
        assert asked.ask(prompt="A cat", seed=3, temperature=2, max_tokens=20) == (text, last)
    asked.process.stdin.write(b"no question\n")
    assert "question:1: found 'n'" in asked.ask(stop=False)[1]["error"]
    assert "has no prompt" in asked.line()["error"]
    reasons = []
    for _ in range(5):  # an answer may end by itself, but not each time
        asked.send(prompt="A cat", temperature=100, top_p=1, max_tokens=1000000)
        rest, status = asked.end()
        reasons.append(json.loads(rest.splitlines()[-1])["reason"])
        assert status == 0
        asked = Asked(model)
    assert set(reasons) <= {"stop", "end"} and "stop" in reasons
    asked.end()
