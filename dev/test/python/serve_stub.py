#!/usr/bin/env python3
"""serve_stub.py --model CHECKPOINT --answer -- a trainer for test_serve.py that writes a prompt's words as its answer, each
`seed` milliseconds after the one before. It notes in CHECKPOINT/../../notes what it is asked and told. The prompt "die" ends it
with an error, "quit" without one."""
import json
import os
import sys
import threading

model = sys.argv[sys.argv.index("--model") + 1]
notes = open(os.path.join(os.path.dirname(os.path.dirname(model)), "notes"), "a", buffering=1)
notes.write(f"model {os.path.basename(model)} {os.getpid()}\n")
stopped, questions, arrived = threading.Event(), [], threading.Semaphore(0)


def read():
    for line in sys.stdin:
        line = json.loads(line)
        if "stop" in line:
            notes.write("stop\n")
            stopped.set()
        else:
            questions.append(line)
            arrived.release()
    os._exit(0)


def say(**line):
    print(json.dumps(line), flush=True)


threading.Thread(target=read, daemon=True).start()
while arrived.acquire():
    question = questions.pop(0)
    notes.write(f"asked {question.get('prompt')}\n")
    if question["prompt"] == "die":
        sys.exit("error: there is no room for it")
    if question["prompt"] == "quit":
        sys.exit(3)
    stopped.clear()
    words, reason = question["prompt"].split(), "end"
    for i, word in enumerate(words):
        if stopped.wait(question.get("seed", 0) / 1000):
            words, reason = words[:i], "stop"
            break
        say(text=" " + word)
        notes.write("token\n")
    say(tokens=len(words), reason=reason)
    notes.write("end\n")
