"""Turns a data set of the Hugging Face hub, or a copy of one, into token files with the library `datasets`.

    python3 dev/data/hf.py HuggingFaceFW/fineweb --config sample-10BT --tokenizer T -o data/fineweb
    python3 dev/data/hf.py HuggingFaceFW/fineweb-edu --config sample-10BT --tokenizer T -o data/edu --jobs 4 --limit-shards 5
    python3 dev/data/hf.py my/folder --column body --tokenizer T -o data/mine
    python3 dev/data/hf.py --rows x.parquet | ./tokenize --field text -o x.bin -

NAME is a data set on the hub, a folder, a file (parquet, arrow, jsonl, csv; gzip, zstd) or a folder of save_to_disk(). Each
source file is read as a stream and piped into ./tokenize, which makes one shard of it: OUT_val_NNN.bin of the first
--val-files, OUT_train_NNN.bin of the others. A single file is split by --val-fraction. OUT_manifest.json lists the finished
shards. However a run ended, the same command continues with the next shard.
"""
import argparse
import concurrent.futures
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


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- the source files and their rows -------------------------------------------------------------------------------------


def load_library():
    os.environ.update(USE_TORCH="0", USE_TF="0", USE_JAX="0")  # their import takes seconds, and no tensors are wanted
    import datasets
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # its errors are exceptions, too
    return datasets


def saved_files(folder, split):
    """Lists the files of a folder that save_to_disk() wrote; none if it is another kind of folder."""
    if os.path.exists(os.path.join(folder, "dataset_dict.json")):
        folder = os.path.join(folder, split)
    state = os.path.join(folder, "state.json")
    if not os.path.exists(state):
        return []
    with open(state, encoding="utf-8") as f:
        return [os.path.abspath(os.path.join(folder, file["filename"])) for file in json.load(f)["_data_files"]]


def source_files(name, config, split):
    """Returns the format of a data set, as `datasets` calls it, and its files: paths, or addresses on the hub."""
    datasets = load_library()
    files = saved_files(name, split)
    if files:
        return "arrow", files
    if not os.path.exists(name) and re.search(r"\.(parquet|arrow|jsonl?|csv)(\.(gz|zst))?$", name):
        fail(f"{name}: no such file")  # the hub would be asked for a minute
    try:
        if os.path.isfile(name):
            folder, only = os.path.split(os.path.abspath(name))
            builder = datasets.load_dataset_builder(folder, config, data_files={split: only})
        else:
            builder = datasets.load_dataset_builder(name, config)
    except Exception as e:  # the library raises many kinds
        fail(f"{name}: cannot be read: {first_line(e)}",
             "wanted OWNER/NAME on the hub, or a folder or file of parquet, arrow, jsonl or csv")
    splits = builder.config.data_files or {}
    if split not in splits:
        fail(f"{name}: has no files of a split {split}", f"--split takes {', '.join(map(str, splits))}" if splits else None)
    if builder.name == "text":
        fail(f"{name}: holds plain text", "./tokenize reads it: ./tokenize --tokenizer T -o OUT.bin FILE...")
    return builder.name, list(splits[split])


def texts(file_format, file, column):
    """Yields the texts of a file's rows, without missing ones."""
    data = load_library().load_dataset(file_format, data_files=[file], split="train", streaming=True)
    for table in data.with_format("arrow").iter(batch_size=1000):
        if column not in table.column_names:
            fail(f"{typed(file)}: has no column {column}", f"--column takes {', '.join(table.column_names)}")
        for text in table.column(column).to_pylist():
            if text is not None and not isinstance(text, str):
                fail(f"{typed(file)}: column {column} holds values of type {type(text).__name__}, wanted text")
            if text is not None:
                yield text


def print_rows(file_format, files, column):
    """Prints a JSON object a line on stdout, then their number on stderr. Ends early when its parent has ended."""
    parent, count = os.getppid(), 0
    try:
        for file in files:
            for text in texts(file_format, file, column):
                line = json.dumps({"text": text}, ensure_ascii=False) + "\n"
                sys.stdout.buffer.write(line.encode("utf-8", "replace"))
                count += 1
                if count % 1000 == 0 and os.getppid() != parent:
                    sys.exit("error: the program that reads the rows has gone")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(PIPE_CLOSED)  # without a second attempt to flush
    except ImportError:  # dev/errors.py names the package
        raise
    except Exception as e:  # the library raises many kinds
        fail(f"{typed(file)}: cannot be read: {first_line(e)}", None if os.path.exists(file) else CONTINUES)
    print(f"rows {count}", file=sys.stderr, flush=True)
    os._exit(0)  # the library's threads may abort a usual exit


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
                if ((old["source"], old["size"]) != (shown_source(shard["file"]), shard["size"])
                        or (old["tokens"], old["bytes"]) != (token_count(target)[0], os.path.getsize(target))):
                    return False
            return True
        except (OSError, KeyError):
            return False

    def add(self, shard, rows):
        """Notes a finished shard and returns its tokens. `rows` counts those of its source file."""
        with self.lock:
            for target in shard["targets"]:
                name = os.path.basename(target)
                self.shards[name] = {"file": name, "source": shown_source(shard["file"]), "size": shard["size"], "rows": rows,
                                     "tokens": token_count(target)[0], "bytes": os.path.getsize(target)}
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


def convert(shard, file_format, column, tokenize):
    """Makes one shard: a process that prints the rows, piped into ./tokenize. Returns the number of rows. Files get their names
    only when both processes have succeeded: rows may stop early."""
    with tempfile.TemporaryFile("w+") as rows_said, tempfile.TemporaryFile("w+") as tokenize_said:
        print_it = [sys.executable, os.path.abspath(__file__), "--rows", shard["file"], "--format", file_format,
                    "--column", column]
        read_it = [*tokenize, *shard["flags"], "--field", "text", "-o", shard["out"], "-"]
        with subprocess.Popen(print_it, stdout=subprocess.PIPE, stderr=rows_said) as rows:
            done = subprocess.run(read_it, stdin=rows.stdout, stdout=subprocess.DEVNULL, stderr=tokenize_said, check=False)
            rows.stdout.close()
        rows_failed = rows.returncode not in (0, PIPE_CLOSED)
        if rows_failed or done.returncode:
            for part in filter(os.path.exists, shard["parts"]):
                os.remove(part)
            said = rows_said if rows_failed else tokenize_said
            said.seek(0)
            lines = said.read().splitlines() or ["killed"]
            error = next((line for line in lines if line.startswith("error: ")), lines[-1]).removeprefix("error: ")
            hint = next((line for line in lines if line.startswith("  hint: ")), "").removeprefix("  hint: ")
            if not rows_failed or lines == ["killed"]:  # the rows name their file, and know whether the error may pass
                error, hint = f"{typed(shard['file'])}: {error}", hint or CONTINUES
            raise ShardError(error, hint)
        rows_said.seek(0)
        count = int(rows_said.read().split()[-1])
    for part, target in zip(shard["parts"], shard["targets"]):
        os.replace(part, target)
    return count


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
                rows = future.result()
                made = manifest.add(shard, rows)
                tokens, size, left, finished = tokens + made, size + shard["size"], left - shard["size"], finished + 1
                print(f"[{finished}/{total}] {', '.join(map(shown, shard['targets']))}: {made:,} tokens of {rows:,} rows; "
                      f"{tokens / seconds / 1e6:.2f} M tokens/s, eta {clock(left * seconds / max(size, 1))}", flush=True)
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
    files = files[:args.limit_shards]
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
    parser.add_argument("--column", default="text", help="column that holds the text (default: %(default)s)")
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
    parser.add_argument("--format",
                        help="with --rows: NAME is one file of this format of `datasets` (default: as its name says)")
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
    file_format, files = (args.format, [args.name]) if args.format else source_files(args.name, args.config, args.split)
    if args.rows:
        return print_rows(file_format, files[:args.limit_shards], args.column)
    if not os.path.exists(TOKENIZE):
        fail(f"{shown(TOKENIZE)}: is missing", "build it with `make tokenize`")
    shards = plan(args, files)
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
    convert_all(todo, len(shards), manifest, args.jobs,
                (file_format, args.column, [TOKENIZE, *tokenizer, "--threads", str(threads)]))
    val = f" --val '{shown(args.out)}_val_*.bin'" if args.val_files else ""
    print(f"train on it:\n  ./train_llama3 --model d6{' ' if tokenizer else ''}{' '.join(tokenizer)} "
          f"--train '{shown(args.out)}_train_*.bin'{val} --out out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
