"""Turns a data set of the Hugging Face hub, or a copy of one, into token files.

    python3 dev/data/hf.py HuggingFaceFW/fineweb --config sample-10BT --tokenizer T -o data/fineweb
    python3 dev/data/hf.py HuggingFaceFW/fineweb-edu --config sample-10BT --tokenizer T -o data/edu --jobs 4 --limit-shards 5
    python3 dev/data/hf.py my/folder --column body --tokenizer T -o data/mine
    python3 dev/data/hf.py HuggingFaceTB/smoltalk --config all --column messages --tokenizer T -o data/talks
    python3 dev/data/hf.py tatsu-lab/alpaca --column instruction,input,output --tokenizer T -o data/alpaca
    python3 dev/data/hf.py --rows x.parquet | ./tokenize --field text -o x.bin -

NAME is a data set on the hub, a folder, a file (parquet, arrow, jsonl, csv, tsv; gzip, zstd) or a folder of save_to_disk().
Each source file is read as a stream and piped into ./tokenize, which makes one shard of it: OUT_val_NNN.bin of the first
--val-files, OUT_train_NNN.bin of the others. A single file is split by --val-fraction. OUT_manifest.json lists the finished
shards. However a run ended, the same command continues with the next shard.

Every cell of csv and tsv is text as it stands there: NA, 007 and 2024-01-01, too. A column of conversations (lists of messages)
goes through ./tokenize --chat, and so do several columns, of questions and answers. A row without a value is left out and
counted. Files of a folder that are not read are named; the exit status is then 1, unless they belong to another split.
"""
import argparse
import concurrent.futures
import csv
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time

from data_common import HEADER, ROOT, fail, shown, token_count

TOKENIZE = os.path.join(ROOT, "tokenize")
PIPE_CLOSED = 3  # exit status of --rows when nobody reads it any more
VAL_FRACTION = 0.05
CONTINUES = "the same command continues"  # a hint after errors that may pass
POINTER = b"version https://git-lfs"  # what a clone without Git LFS has instead of a large file
KIND = re.compile(r"\.(parquet|arrow|jsonl|ndjson|json|csv|tsv)(\.(gz|bz2|xz|zst))?$", re.IGNORECASE)
TALKS = ("messages", "conversations")  # names of columns of conversations
SPLITS = {"train": "train|training", "validation": "validation|valid|val|dev", "test": "test|testing|eval|evaluation"}
BESIDE = re.compile(r"(readme|license|licence|notice|citation)\b.*|dataset_infos?\.json|.*\.(md|py)", re.IGNORECASE)  # no data


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- the source files and their rows -------------------------------------------------------------------------------------


def library_files(name, config, split):
    """Returns the files of a data set on the hub, or of a folder with a configuration: paths, or addresses on the hub."""
    os.environ.update(USE_TORCH="0", USE_TF="0", USE_JAX="0")  # their import takes seconds, and no tensors are wanted
    import datasets
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # its errors are exceptions, too
    try:
        splits = datasets.load_dataset_builder(name, config).config.data_files or {}
    except Exception as e:  # the library raises many kinds
        fail(f"{name}: cannot be read: {first_line(e)}",
             "wanted OWNER/NAME on the hub, or a folder or file of parquet, arrow, jsonl, csv or tsv")
    if split not in splits:
        fail(f"{name}: has no files of a split {split}", f"--split takes {', '.join(map(str, splits))}" if splits else None)
    return list(splits[split])


def saved_files(folder, split):
    """Lists the files of a folder that save_to_disk() wrote; none if it is another kind of folder."""
    listed = os.path.join(folder, "dataset_dict.json")
    if os.path.exists(listed):
        with open(listed, encoding="utf-8") as f:
            splits = json.load(f)["splits"]
        if split not in splits:
            fail(f"{folder}: has no split {split}", f"--split takes {', '.join(splits)}")
        if len(splits) > 1:
            print(f"not read: the splits {', '.join(s for s in splits if s != split)}", file=sys.stderr)
        folder = os.path.join(folder, split)
    state = os.path.join(folder, "state.json")
    if not os.path.exists(state):
        return []
    with open(state, encoding="utf-8") as f:
        return [os.path.abspath(os.path.join(folder, file["filename"])) for file in json.load(f)["_data_files"]]


def split_of(path):
    """Returns the split that a word of a path names, as `datasets` reads paths; without such a word, train."""
    words = set(re.split(r"[^a-z]+", path.lower()))
    return next((split for split, names in SPLITS.items() if words & set(names.split("|"))), "train")


def folder_files(folder, config, split):
    """Returns a folder's files of a split, and the names of its files of unknown kinds. Names the files of other splits."""
    card = os.path.join(folder, "README.md")
    with open(card if os.path.exists(card) else os.devnull, encoding="utf-8", errors="replace") as f:
        described = config or re.search(r"^configs:", f.read(), re.MULTILINE)
    listed = {os.path.realpath(file) for file in library_files(folder, config, split)} if described else set()
    files, others, unknown = [], [], []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]  # os.walk() goes into none
        for name in sorted(name for name in names if not name.startswith(".") and not BESIDE.fullmatch(name)) + links:
            path = os.path.join(parent, name)
            taken = os.path.realpath(path) in listed if described else split_of(os.path.relpath(path, folder)) == split
            known = name not in links and KIND.search(name)
            (unknown if not known else files if taken else others).append(os.path.relpath(path, folder))
    if not files and not others:
        fail(f"{folder}: holds no file of parquet, arrow, jsonl, csv or tsv",
             "./tokenize reads plain text: ./tokenize --tokenizer T -o OUT.bin FILE..." if unknown else None)
    if not files:
        fail(f"{folder}: has no files of a split {split}",
             f"--split takes {', '.join(sorted(set(map(split_of, others))))}")
    if others:
        print(f"not read, since of another split than {split}: {', '.join(others)}", file=sys.stderr)
    return [os.path.abspath(os.path.join(folder, path)) for path in files], unknown


def source_files(name, config, split):
    """Returns the files of a data set, paths or addresses on the hub, and the names of files that are not read."""
    if os.path.isdir(name):
        saved = saved_files(name, split)
        return (saved, []) if saved else folder_files(name, config, split)
    if os.path.exists(name) or "://" in name or KIND.search(name):
        if "://" not in name and not os.path.exists(name):
            fail(f"{name}: no such file")
        if not KIND.search(name):
            fail(f"{name}: is of no kind that is read, wanted parquet, arrow, jsonl, csv or tsv")
        return [name if "://" in name else os.path.abspath(name)], []
    files = library_files(name, config, split)
    return [f for f in files if KIND.search(f)], [shown_source(f) for f in files if not KIND.search(f)]


def table_rows(f, columns):
    """Returns the columns of an open parquet or arrow file, and its rows with those of them that are wanted."""
    import pyarrow
    import pyarrow.parquet
    if f.read(4) == b"PAR1":
        table = pyarrow.parquet.ParquetFile(f)
        names = table.schema_arrow.names
        batches = table.iter_batches(1000, columns=[name for name in columns if name in names])
    else:
        f.seek(0)
        try:
            batches, names = (table := pyarrow.ipc.open_stream(f)), table.schema.names
        except pyarrow.ArrowInvalid:
            table = pyarrow.ipc.open_file(f)
            batches, names = map(table.get_batch, range(table.num_record_batches)), table.schema.names
    return names, (row for batch in batches for row in batch.select([n for n in columns if n in names]).to_pylist())


def json_rows(f):
    """Returns the members of the first objects of an open file, and all objects. They are a line each, or in a list."""
    text = io.TextIOWrapper(f, encoding="utf-8-sig")
    first = next((line for line in text if line.strip()), "")
    rows = iter(json.loads(first + text.read())) if first.lstrip().startswith("[") else (
        json.loads(line) for line in itertools.chain([first], text) if line.strip())
    ahead = list(itertools.islice(rows, 1000))  # a member may be missing in the first
    return list(dict.fromkeys(k for row in ahead for k in row)), itertools.chain(ahead, rows)


def csv_rows(f, delimiter):
    """Returns the columns of an open file, and its rows. Each cell is text."""
    csv.field_size_limit(2**31 - 1)
    rows = csv.DictReader(io.TextIOWrapper(f, encoding="utf-8-sig", newline=""), delimiter=delimiter, strict=True)

    def checked():
        for row in rows:
            if None in row:
                raise ValueError(f"line {rows.line_num} has more cells than the first line")
            yield row
    return list(rows.fieldnames or []), checked()


def values(file, column):
    """Yields the value of each row of a file: a text, a list of messages, an object of several columns, or None where it is
    missing."""
    import fsspec
    kind, columns = KIND.search(file)[1].lower(), column.split(",")
    try:
        if os.path.isfile(file):
            with open(file, "rb") as f:
                if f.read(len(POINTER)) == POINTER:
                    fail(f"{typed(file)}: is a Git LFS pointer, wanted the data", "git lfs pull gets the file itself")
        with fsspec.open(file, "rb", compression="infer") as f:
            names, rows = (csv_rows(f, "\t" if kind == "tsv" else ",") if kind in ("csv", "tsv") else
                           table_rows(f, columns) if kind in ("parquet", "arrow") else json_rows(f))
            lacks = next((name for name in columns if names and name not in names), None)
            if lacks is not None:
                talks = next((name for name in TALKS if name in names), None)
                fail(f"{typed(file)}: has no column {lacks}", f"it holds conversations: --column {talks}" if talks else
                     f"--column takes {', '.join(names)}" + (", or several: A,B" if len(names) > 1 else ""))
            for row in rows:
                found = {name: value for name in columns if (value := row.get(name)) is not None}
                for name, value in found.items():
                    if name in TALKS and isinstance(value, str):  # in csv a list is text
                        found[name] = value = json.loads(value)
                    if not isinstance(value, str) and not is_talk(value):
                        fail(f"{typed(file)}: column {name} holds values of type {type(value).__name__}, wanted text or lists "
                             "of messages")
                yield found.get(column) if len(columns) == 1 else found or None
    except (ImportError, GeneratorExit, BrokenPipeError):
        raise
    except Exception as e:  # the libraries raise many kinds
        fail(f"{typed(file)}: cannot be read: {first_line(e)}", None if os.path.exists(file) else CONTINUES)


def is_talk(value):
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)


def stripped(value):
    """Returns a list of messages without what a table adds: there every message has the members of all, null where it has none
    itself. A text is returned as it is."""
    return value if isinstance(value, str) else [
        {k: v for k, v in message.items() if v is not None or k in ("content", "value")} for message in value]


def line_of(value):
    """Returns a row as ./tokenize reads it."""
    if isinstance(value, str):
        return {"text": value}
    if isinstance(value, dict):
        return {name: stripped(side) for name, side in value.items()}
    return {"conversations" if value and "from" in value[0] else "messages": stripped(value)}


def print_rows(files, column):
    """Prints a JSON object a line on stdout, then their number on stderr. Ends early when its parent has ended."""
    parent, count, missing = os.getppid(), 0, 0
    try:
        for value in itertools.chain.from_iterable(values(file, column) for file in files):
            missing += value is None
            if value is None:
                continue
            line = json.dumps(line_of(value), ensure_ascii=False, default=str) + "\n"
            sys.stdout.buffer.write(line.encode("utf-8", "replace"))
            count += 1
            if count % 1000 == 0 and os.getppid() != parent:
                sys.exit("error: the program that reads the rows has gone")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(PIPE_CLOSED)  # without a second attempt to flush
    print(f"rows {count}" + (f", and {missing} without a value in the column {column}" if missing else ""), file=sys.stderr)


def holds_talks(files, column):
    """Returns whether the first value of a column, or of several, is a conversation."""
    value = next((v for file in files for v in values(file, column) if v is not None), None)
    if value is None:
        fail(f"column {column} holds no value in {', '.join(map(typed, files[:3]))}{' ...' if files[3:] else ''}")
    return not isinstance(value, str)


def shown_source(file):
    """Returns a file's name without the commit that the hub's addresses hold."""
    return re.sub(r"@[0-9a-f]{40}", "", file)


def typed(file):
    """Returns a file's name as the user would type it."""
    return shown(file) if os.path.exists(file) else shown_source(file)


def size_of(file):
    import fsspec
    try:
        filesystem, path = fsspec.core.url_to_fs(file)
        return filesystem.size(path)
    except Exception as e:  # the library raises many kinds
        fail(f"{typed(file)}: cannot be read: {first_line(e)}")


# --- the manifest --------------------------------------------------------------------------------------------------------


class Manifest:
    """OUT_manifest.json: the source and the tokenizer of the shards, and the finished shards. It is replaced as a whole."""

    def __init__(self, path, made_of):
        self.path, self.made_of, self.shards, self.lock = path, made_of, {}, threading.Lock()
        if not os.path.exists(path):
            return
        try:
            with open(path, encoding="utf-8") as f:
                old = json.load(f)
            self.shards = {shard["file"]: shard for shard in old["shards"]}
        except (OSError, ValueError, KeyError, TypeError):
            fail(f"{shown(path)}: is no manifest of this script", "remove it, or choose another -o")
        for key, value in made_of.items():
            if old.get(key) != value:
                fail(f"{shown(path)}: {key} is {old.get(key)}, but this run has {value}",
                     "remove these shards, or choose another -o")

    def finished(self, shard):
        """Returns whether a shard is whole and was made of the same source."""
        try:
            for target in shard["targets"]:
                old = self.shards[os.path.basename(target)]
                made = (token_count(target)[0], os.path.getsize(target)) if old["rows"] else (0, 0)
                if (old["source"], old["size"], old["tokens"], old["bytes"]) != (
                        shown_source(shard["file"]), shard["size"], *made):
                    return False
            return True
        except (OSError, KeyError):
            return False

    def add(self, shard, rows):
        """Notes a finished shard and returns its tokens. `rows`: of its source file; without any, it has no token file."""
        with self.lock:
            for target in shard["targets"]:
                name = os.path.basename(target)
                self.shards[name] = {"file": name, "source": shown_source(shard["file"]), "size": shard["size"], "rows": rows,
                                     "tokens": token_count(target)[0] if rows else 0,
                                     "bytes": os.path.getsize(target) if rows else 0}
            with open(self.path + ".tmp", "w", encoding="utf-8") as f:
                json.dump({**self.made_of, "shards": [self.shards[k] for k in sorted(self.shards)]}, f, indent=1)
                f.write("\n")
                f.flush()
                os.fsync(f.fileno())
            os.replace(self.path + ".tmp", self.path)
        return sum(self.shards[os.path.basename(target)]["tokens"] for target in shard["targets"])


# --- shards --------------------------------------------------------------------------------------------------------------


class ShardError(Exception):
    """A message and a hint, or "", of one of a shard's two processes."""


def fingerprint_of(tokenizer):
    """Returns the fingerprint that ./tokenize writes into token files of this tokenizer; a bad tokenizer ends the program."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "x.bin")
        done = subprocess.run([TOKENIZE, *tokenizer, "-o", path, "-"], input=b"x", stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            sys.exit(done.returncode)
        with open(path, "rb") as f:
            return f"{HEADER.unpack(f.read(HEADER.size))[5]:016x}"


def convert(shard, column, tokenize):
    """Makes one shard: a process that prints the rows, piped into ./tokenize. Returns the number of rows, and a note on missing
    ones. Files get their names only when both processes have succeeded: rows may stop early."""
    with tempfile.TemporaryFile("w+") as rows_said, tempfile.TemporaryFile("w+") as tokenize_said:
        print_it = [sys.executable, os.path.abspath(__file__), "--rows", shard["file"], "--column", column]
        read_it = [*tokenize, *shard["flags"], "-o", shard["out"], "-"]
        with subprocess.Popen(print_it, stdout=subprocess.PIPE, stderr=rows_said) as rows:
            done = subprocess.run(read_it, stdin=rows.stdout, stdout=subprocess.DEVNULL, stderr=tokenize_said, check=False)
            rows.stdout.close()
        rows_said.seek(0)
        lines = rows_said.read().splitlines() or ["killed"]
        counted = re.match(r"rows (\d+)(.*)", lines[-1])
        if rows.returncode == 0 and counted[1] == "0":
            return 0, counted[2]  # ./tokenize refuses a text without a byte
        rows_failed = rows.returncode not in (0, PIPE_CLOSED)
        if rows_failed or done.returncode:
            for part in filter(os.path.exists, shard["parts"]):
                os.remove(part)
            if not rows_failed:
                tokenize_said.seek(0)
                lines = tokenize_said.read().splitlines() or ["killed"]
            error = next((line for line in lines if line.startswith("error: ")), lines[-1]).removeprefix("error: ")
            hint = next((line for line in lines if line.startswith("  hint: ")), "").removeprefix("  hint: ")
            if not rows_failed or lines == ["killed"]:  # the rows name their file, and know whether the error may pass
                error, hint = f"{typed(shard['file'])}: {error}", hint or CONTINUES
            raise ShardError(error, hint)
    for part, target in zip(shard["parts"], shard["targets"]):
        os.replace(part, target)
    return int(counted[1]), counted[2]


def clock(seconds):
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"


def convert_all(todo, total, manifest, jobs, work):
    """Converts the shards, `jobs` at a time. Prints a line for each, and on a terminal the progress."""
    start, tokens, size, left = time.monotonic(), 0, 0, sum(shard["size"] for shard in todo)
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    running = {pool.submit(convert, shard, *work): shard for shard in todo}
    finished = total - len(todo)
    try:
        while running:
            done, _ = concurrent.futures.wait(running, timeout=2, return_when=concurrent.futures.FIRST_COMPLETED)
            seconds = time.monotonic() - start
            for future in done:
                shard = running.pop(future)
                rows, note = future.result()
                made = manifest.add(shard, rows)
                tokens, size, left, finished = tokens + made, size + shard["size"], left - shard["size"], finished + 1
                print(f"[{finished}/{total}] {', '.join(map(shown, shard['targets']))}: {made:,} tokens of "
                      f"{rows:,} rows{note}; {tokens / seconds / 1e6:.2f} M tokens/s, "
                      f"eta {clock(left * seconds / max(size, 1))}", flush=True)
            if sys.stderr.isatty():
                parts = [part + ".tmp" for shard in running.values() for part in shard["parts"]]
                written = sum(os.path.getsize(part) for part in parts if os.path.exists(part))
                print(f"\r{clock(seconds)}  {finished} of {total} shards, {written / 1e6:,.1f} MB of the next   \r", end="",
                      file=sys.stderr, flush=True)
    except ShardError as e:
        pool.shutdown(cancel_futures=True)
        fail(*e.args)
    except KeyboardInterrupt:
        pool.shutdown(cancel_futures=True)
        fail("stopped", CONTINUES)


def split_file(args, file):
    """Returns the one shard of a single file, of which ./tokenize makes two token files."""
    return {"file": file, "size": size_of(file), "targets": [f"{args.out}_{side}_000.bin" for side in ("train", "val")],
            "out": args.out + ".part.bin", "parts": [f"{args.out}.part_{side}.bin" for side in ("train", "val")],
            "flags": ["--val-fraction", str(args.val_fraction or VAL_FRACTION)]}


def plan(args, files):
    """Returns the shards: source file, its size, token files, and how ./tokenize makes them (-o, the names that it then gives,
    flags). The first --val-files are for validation."""
    if len(files) == args.val_files == 1:
        return [split_file(args, files[0])]
    if args.val_fraction:
        fail(f"--val-fraction: splits a single file, but there are {len(files)} files and --val-files is {args.val_files}",
             "--val-files N takes whole files for validation")
    if len(files) <= args.val_files:
        count = f"{len(files)} file{'s' if len(files) > 1 else ''}"
        fail(f"{args.name}: has {count} of split {args.split}, wanted more than --val-files {args.val_files}",
             "--val-files 0 makes no validation set")
    shards = []
    for i, file in enumerate(files):
        val = i < args.val_files
        target = f"{args.out}_val_{i:03d}.bin" if val else f"{args.out}_train_{i - args.val_files:03d}.bin"
        shards.append({"file": file, "size": size_of(file), "targets": [target], "out": target + ".part",
                       "parts": [target + ".part"], "flags": []})
    return shards


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="data set on the hub, a folder or a file")
    parser.add_argument("--config", help="configuration of the data set, such as sample-10BT")
    parser.add_argument("--split", default="train", help="default: %(default)s")
    parser.add_argument("--column", default="text", metavar="A[,B...]",
                        help="column of texts or of conversations, or columns of questions and answers (default: %(default)s)")
    parser.add_argument("--tokenizer", metavar="T",
                        help="tokenizer.json, tokenizer.model or a folder with one (default: bytes)")
    parser.add_argument("-o", "--out", metavar="OUT", help="start of the names of the token files")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="shards made at a time (default: %(default)s)")
    parser.add_argument("--val-files", type=int, default=1, metavar="N",
                        help="source files to validate on (default: %(default)s)")
    parser.add_argument("--val-fraction", type=float, metavar="F",
                        help=f"of a single source file: fraction of its tokens to validate on (default: {VAL_FRACTION})")
    parser.add_argument("--limit-shards", type=int, metavar="N", help="only the first N source files")
    parser.add_argument("--rows", action="store_true", help="print the texts as lines of JSON instead")
    args = parser.parse_args()
    if bool(args.out) == args.rows:
        parser.error("wanted -o OUT, or --rows")
    if args.jobs < 1 or args.val_files < 0 or (args.limit_shards is not None and args.limit_shards < 1):
        parser.error("--jobs and --limit-shards must be 1 or more, --val-files 0 or more")
    if args.val_fraction is not None and not 0 < args.val_fraction < 1:
        parser.error(f"--val-fraction is {args.val_fraction}, wanted a fraction above 0 and below 1")
    return args


def main():
    args = parse_args()
    files, unread = source_files(args.name, args.config, args.split)
    files = files[:args.limit_shards]
    if args.rows:
        print_rows(files, args.column)
    else:
        make_shards(args, files)
    if unread:
        fail(f"{args.name}: all else is done, but these files were not read: {', '.join(unread)}",
             "wanted parquet, arrow, jsonl, csv or tsv")
    sys.stdout.flush()
    os._exit(0)  # the libraries' threads may abort a usual exit


def make_shards(args, files):
    if not os.path.exists(TOKENIZE):
        fail(f"{shown(TOKENIZE)}: is missing", "build it with `make tokenize`")
    shards, talks = plan(args, files), holds_talks(files, args.column)
    tokenizer = ["--tokenizer", args.tokenizer] if args.tokenizer else []
    if not tokenizer:
        print("no --tokenizer given: every byte is a token")
    os.makedirs(os.path.dirname(args.out) or ".", exist_ok=True)
    source = os.path.abspath(args.name) if os.path.exists(args.name) else args.name
    manifest = Manifest(args.out + "_manifest.json", {
        "source": source, "config": args.config, "split": args.split, "column": args.column, "val_files": args.val_files,
        "val_fraction": (args.val_fraction or VAL_FRACTION) if shards[0]["flags"] else None,
        "fingerprint": fingerprint_of(tokenizer)})
    todo = [shard for shard in shards if not manifest.finished(shard)]
    if len(todo) < len(shards):
        print(f"{len(shards) - len(todo)} of {len(shards)} shards exist already")
    threads = max(1, len(os.sched_getaffinity(0)) // args.jobs)
    how = ["--chat"] if talks else ["--field", "text"]
    convert_all(todo, len(shards), manifest, args.jobs,
                (args.column, [TOKENIZE, *tokenizer, "--threads", str(threads), *how]))
    val = f" --val '{shown(args.out)}_val_*.bin'" if args.val_files else ""
    print(f"train on it:\n  ./train_llama3 --model d6{' ' if tokenizer else ''}{' '.join(tokenizer)} "
          f"--train '{shown(args.out)}_train_*.bin'{val} --out out")


if __name__ == "__main__":
    main()
