"""Downloads TinyStories (Eldan and Li, arXiv 2305.07759; the stories by GPT-4, 2.2 GB) and writes them as token files.

    python3 dev/data/tinystories.py --tokenizer DIR|FILE [--input stories.txt|stories.jsonl [--val-input FILE]]

Writes tinystories_train_NNN.bin (about --shard-mb of text each) and tinystories_val.bin to dev/data/tinystories. A text file
holds stories with a line <|endoftext|> between them. A .jsonl file holds one object per line, with the story as "text" or
"story". Memory does not grow with the files. Standard library only; needs ./tokenize (`make tokenize`).

This command makes a tokenizer of the stories, which the script then uses by default:

    ./tokenize --train-bpe 4096 -o dev/data/tinystories/tokenizer.json dev/data/tinystories/valid.txt
"""
import argparse
import glob
import json
import os

from data_common import DATA, check_input, download, fail, report, shown, tokenize, tokenizer_or_bytes

URL = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-{}.txt"
SEPARATOR = b"<|endoftext|>"


def stories(path):
    """Yields (position of its first byte, story) for each story of a file."""
    if path.endswith(".jsonl"):
        with open(path, "rb") as f:
            at = 0
            for number, line in enumerate(f, 1):
                if line.strip():
                    try:
                        item = json.loads(line)
                        text = item["text"] if "text" in item else item["story"]
                        yield at, text.strip()
                    except (ValueError, KeyError, TypeError, AttributeError):
                        fail(f"{shown(path)}:{number}: wanted a JSON object with the story as \"text\" or \"story\"")
                at += len(line)
        return
    with open(path, "rb") as f:
        at = start = 0
        lines = []
        for line in f:
            at += len(line)
            if line.strip() == SEPARATOR:
                yield start, b"".join(lines).decode("utf-8", "replace").strip()
                start, lines = at, []
            else:
                lines.append(line)
        yield start, b"".join(lines).decode("utf-8", "replace").strip()


class Source:
    """The stories of a file one by one: `at` and `text` are the next one's; at = None after the last."""

    def __init__(self, path):
        self.items = stories(path)
        self.advance()

    def advance(self):
        self.at, self.text = next(self.items, (None, None))


def convert(source, end, target, tokenizer):
    """Tokenizes the next stories of `source` that begin before byte `end`. Returns how many."""
    jsonl = target[: -len(".bin")] + ".jsonl"
    count = 0
    try:
        with open(jsonl, "w", encoding="utf-8") as f:
            while source.at is not None and source.at < end:
                if source.text:
                    f.write(json.dumps({"text": source.text}) + "\n")
                    count += 1
                source.advance()
        if count:
            tokenize(tokenizer, jsonl, target)
    finally:
        if os.path.exists(jsonl):
            os.remove(jsonl)
    return count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", metavar="DIR|FILE",
                        help="tokenizer.json, tokenizer.model or a folder with one (default: the one in --out, else bytes)")
    parser.add_argument("--input", metavar="FILE", help="use these stories instead of the download")
    parser.add_argument("--val-input", metavar="FILE", help="stories to validate on (default: the end of --input)")
    parser.add_argument("--val-fraction", type=float, default=0.01, metavar="F",
                        help="fraction of --input to validate on (default 0.01)")
    parser.add_argument("--shard-mb", type=float, default=256, metavar="N", help="MB of text per token file (default 256)")
    parser.add_argument("--out", default=os.path.join(DATA, "tinystories"), metavar="DIR", help="folder to write to")
    args = parser.parse_args()
    if not 0 < args.val_fraction < 1 or args.shard_mb <= 0:
        parser.error("--val-fraction must be between 0 and 1, --shard-mb above 0")

    train, val = args.input, args.val_input
    if not train:
        hint = "give the stories as --input FILE (text with <|endoftext|> lines, or .jsonl)"
        train, val = os.path.join(args.out, "train.txt"), val or os.path.join(args.out, "valid.txt")
        if not args.val_input:
            download(URL.format("valid"), val, None, hint)
        download(URL.format("train"), train, None, hint)
    for path in (train, val):
        if path:
            check_input(path)
    os.makedirs(args.out, exist_ok=True)
    tokenizer = tokenizer_or_bytes(args.tokenizer, args.out)

    base = os.path.join(args.out, "tinystories")
    for old in glob.glob(glob.escape(base) + "_*.bin"):  # a longer set of shards must not mix with this one
        os.remove(old)
    size = os.path.getsize(train)
    train_end = size if val else int(size * (1 - args.val_fraction))
    num_shards = max(1, round(train_end / (args.shard_mb * 1e6)))
    source, shards = Source(train), []
    for i in range(num_shards):
        target = f"{base}_train_{i:03d}.bin"
        if convert(source, train_end * (i + 1) // num_shards, target, tokenizer):
            shards.append(target)
    val_source = Source(val) if val else source
    if not convert(val_source, float("inf"), base + "_val.bin", tokenizer) or not shards:
        fail(f"{shown(val or train)}: holds too few stories",
             "wanted stories with a line <|endoftext|> between them, or .jsonl")
    report(shards, base + "_val.bin", tokenizer)


if __name__ == "__main__":
    main()
