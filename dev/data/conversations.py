"""Writes conversations about little tales, to teach the quickstart's model to answer, and questions to test it.

    python3 dev/data/conversations.py -o data/chat
    ./tokenize --tokenizer DIR --chat -o data/chat/train.bin data/chat/train.jsonl

train.jsonl and val.jsonl hold a conversation a line ("messages"): a tale of somebody who lost something, in the words of
tinytales, and two questions about it with their answers. questions.jsonl asks the same about other tales, for --eval --tasks:
the model chooses among four ends of an answer, so chance is 25 %. Nobody loses the same thing in two of the files, so the
model has to find the answers in the tale. The same --seed gives the same bytes on every machine. Standard library only.
"""
import argparse
import json
import os
import random

import data_common  # noqa: F401  for its errors of one line

# names with kind, adjective, pronouns and friend; things and places of tinytales.c, where the things are in other places
HEROES = [("Lily", "girl", "curious", "She", "her", "Pip"), ("Tom", "boy", "dreamy", "He", "his", "Clover"),
          ("Mia", "girl", "stubborn", "She", "her", "Leo"), ("Max", "boy", "hungry", "He", "his", "Ginger"),
          ("Hazel", "squirrel", "cheerful", "She", "her", "Bruno"), ("Biscuit", "hedgehog", "shy", "He", "his", "Poppy"),
          ("Bramble", "badger", "kind", "He", "his", "Daisy"), ("Luna", "raccoon", "clever", "She", "her", "Barley")]
THINGS = ["kite", "hat", "key", "doll", "boat", "scarf", "drum", "whistle", "book", "lantern", "bicycle", "flute"]
PLACES = ["in the barn", "behind the well", "under the bed", "under the table", "by the gate", "in the big chest",
          "behind the stove", "in the shed", "in the garden", "under the stairs", "behind the cupboard", "in the haystack"]
OPENINGS = ["Once there was a {adjective} {kind} named {name}.",
            "Once upon a time, there was a {adjective} {kind} named {name}.",
            "There was once a {adjective} {kind} named {name}.", "This is the story of {name}, a {adjective} {kind}."]
EVENTS = ["One {weather} morning, {possessive} {thing} was gone.", "One {weather} day, {name} lost {possessive} {thing}."]
FINDS = ["{name} looked and looked, and there it was, {place}!", "{he} ran to {friend}, and they found it {place}.",
         "\"Look {place},\" said {friend}. And there it was!"]
WEATHERS = ["windy", "rainy", "sunny", "cold", "misty", "frosty"]
# a question, the start of its answer, and the field that ends it
QUESTIONS = [("Who lost the {thing}?", "The {thing} was lost by", "name"),
             ("What did {name} lose?", "{name} lost the", "thing"), ("Where was the {thing}?", "The {thing} was", "place")]
CHOICES = {"name": [hero[0] for hero in HEROES], "thing": THINGS, "place": PLACES}
HEAD, END = "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"  # of Llama 3's chat format


def pick(rng, items):
    """Replaces rng.choice, which may change from one version of Python to the next."""
    return items[int(rng.random() * len(items))]


def shuffled(rng, items):
    return [item for _, item in sorted((rng.random(), item) for item in items)]


def tale(rng, hero, thing):
    """Returns the fields of a tale, and its text."""
    name, kind, adjective, he, possessive, friend = hero
    fields = dict(name=name, kind=kind, adjective=adjective, he=he, possessive=possessive, friend=friend, thing=thing,
                  place=pick(rng, PLACES), weather=pick(rng, WEATHERS))
    return fields, " ".join(pick(rng, part) for part in (OPENINGS, EVENTS, FINDS)).format(**fields)


def conversation(rng, hero, thing):
    fields, text = tale(rng, hero, thing)
    messages = []
    for question, answer, end in shuffled(rng, QUESTIONS)[:2]:
        asked = question.format(**fields)
        messages.append({"role": "user", "content": asked if messages else f"{text} {asked}"})
        messages.append({"role": "assistant", "content": f"{answer} {{{end}}}.".format(**fields)})
    return {"messages": messages}


def task(rng, hero, thing):
    fields, text = tale(rng, hero, thing)
    question, answer, end = pick(rng, QUESTIONS)
    choices = [fields[end], *shuffled(rng, [c for c in CHOICES[end] if c != fields[end]])[:3]]
    order = shuffled(rng, range(4))
    ctx = HEAD.format("user") + f"{text} {question.format(**fields)}" + END + HEAD.format("assistant") + answer.format(**fields)
    return {"ctx": ctx, "choices": [choices[i] for i in order], "label": order.index(0)}


def write(path, count, make, rng, pairs):
    """Writes `count` lines about pairs of a hero and a thing, no two the same."""
    seen = set()
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        while len(seen) < count:
            line = json.dumps(make(rng, *pick(rng, pairs)))
            if line not in seen:
                seen.add(line)
                f.write(line + "\n")
    os.replace(path + ".tmp", path)
    print(f"wrote {path}: {count} lines")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-o", "--out", default="data/chat", metavar="DIR", help="folder to write to (default %(default)s)")
    p.add_argument("--count", type=int, default=200, metavar="N", help="conversations to train on (%(default)s)")
    p.add_argument("--val", type=int, default=40, metavar="N", help="conversations for validation (%(default)s)")
    p.add_argument("--questions", type=int, default=200, metavar="N", help="questions of the task (%(default)s)")
    p.add_argument("--seed", type=int, default=1, metavar="N", help="(%(default)s)")
    args = p.parse_args()
    for name in ("count", "val", "questions"):
        if not 1 <= getattr(args, name) <= 5000:
            p.error(f"--{name} is {getattr(args, name)}, wanted 1 to 5000")
    rng = random.Random(args.seed)
    pairs = shuffled(rng, [(hero, thing) for hero in HEROES for thing in THINGS])
    held_out = len(pairs) // 6
    os.makedirs(args.out, exist_ok=True)
    write(os.path.join(args.out, "train.jsonl"), args.count, conversation, rng, pairs[2 * held_out:])
    write(os.path.join(args.out, "val.jsonl"), args.val, conversation, rng, pairs[held_out:2 * held_out])
    write(os.path.join(args.out, "questions.jsonl"), args.questions, task, rng, pairs[:held_out])


if __name__ == "__main__":
    main()
