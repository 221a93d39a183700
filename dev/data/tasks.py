"""Writes multiple-choice tasks for `--eval --tasks`, with the library `datasets`: one JSON object a line.

    python3 dev/data/tasks.py hellaswag arc_easy arc_challenge piqa mmlu -o tasks
    ./train_llama3 --model DIR --eval --tasks tasks/hellaswag.jsonl

A line holds "ctx" (the question), "choices" (continuations of it) and "label" (the index of the right one). The wording of the
questions is lm-eval's, without examples (its tasks of the same names, num_fewshot=0). --from DIR reads a copy of the data set
instead of the hub: anything `datasets.load_dataset` opens.
"""
import argparse
import json
import os
import re

from data_common import fail, shown


def hellaswag(row):
    def clean(text):
        text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
        return text.replace("  ", " ")
    ctx = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    return ctx, [clean(e) for e in row["endings"]], int(row["label"])


def arc(row):
    choices = row["choices"]
    return f"Question: {row['question']}\nAnswer:", choices["text"], choices["label"].index(row["answerKey"])


def piqa(row):
    return f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], row["label"]


def mmlu(row):
    letters = "ABCD"
    about = row["subject"].replace("_", " ")
    listed = "".join(f"{letter}. {choice}\n" for letter, choice in zip(letters, row["choices"]))
    ctx = (f"The following are multiple choice questions (with answers) about {about}.\n\n"
           f"{row['question'].strip()}\n{listed}Answer:")
    return ctx, list(letters), row["answer"]


# task: data set on the hub, its configuration, split, how to word a row
TASKS = {
    "hellaswag": ("Rowan/hellaswag", None, "validation", hellaswag),
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy", "test", arc),
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge", "test", arc),
    "piqa": ("baber/piqa", None, "validation", piqa),
    "mmlu": ("cais/mmlu", "all", "test", mmlu),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("-o", "--out", default="tasks", metavar="DIR", help="folder to write to (default: tasks)")
    parser.add_argument("--from", dest="source", metavar="DIR", help="a local copy of the data set (with one task)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N questions")
    args = parser.parse_args()
    if args.source and len(args.tasks) > 1:
        parser.error("--from goes with one task")
    if args.limit is not None and args.limit < 1:
        parser.error(f"--limit: is {args.limit}, wanted 1 or more")
    import datasets
    os.makedirs(args.out, exist_ok=True)
    for task in args.tasks:
        name, config, split, words = TASKS[task]
        try:
            rows = datasets.load_dataset(args.source or name, None if args.source else config, split=split)
        except Exception as e:  # the library raises many kinds
            fail(f"{args.source or name}: cannot be read: {str(e).splitlines()[0]}",
                 "without a network, give a copy: --from DIR")
        path = os.path.join(args.out, task + ".jsonl")
        count = 0
        with open(path + ".tmp", "w", encoding="utf-8") as f:
            for row in rows:
                if count == args.limit:
                    break
                ctx, choices, label = words(row)
                f.write(json.dumps({"ctx": ctx, "choices": list(choices), "label": label}, ensure_ascii=False) + "\n")
                count += 1
        os.replace(path + ".tmp", path)
        print(f"wrote {shown(path)}: {count} questions")


if __name__ == "__main__":
    main()
