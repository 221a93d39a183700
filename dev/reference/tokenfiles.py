"""tokenfiles.py -- token files of llm.c's format, and the order of their rows in training, for one process.

llmc/files has the same in C: the format in tokenfile.h, rows of documents in rows.h, the order of rows in dataloader.h, and
several sources by weight in mix.h."""
import bisect
import glob
import os

import numpy as np
import torch

from dev.reference.log import die, warn
from dev.reference.rand import RAND_MIX, RAND_SHUFFLE_SHARDS, order_row, shuffled

ROWS_WINDOW = 256


class TokenFile:
    """One token file, mapped into memory, and its rows."""

    def __init__(self, path):
        head = np.fromfile(path, dtype="<i4", count=256)
        kinds = {(20240520, 1): ("<u2", False), (20240801, 7): ("<u4", False),
                 (20240520, 2): ("<u2", True), (20240801, 8): ("<u4", True)}
        kind, self.masked = kinds.get((int(head[0]), int(head[1])) if len(head) == 256 else None, (None, False))
        if kind is None:
            die(f"{path}: is no token file\n  hint: make one from text with ./tokenize --tokenizer DIR -o OUT.bin FILE")
        self.starts = bool(head[12] == 1)  # a bit for each token follows the mask: 1 for the first token of a document
        # word 9 is a checksum (--dry-run of the C trainers checks it), words 10 and 11 are the hash of a chat template
        if (head[8:10].any() and head[8] != 1) or head[12] not in (0, 1) or self.starts > self.masked or head[13:].any():
            die(f"{path}: words 8 to 255 of the header hold what this program does not know")
        count, self.vocab_size, self.path = int(head[4:6].view("<u8")[0]) or int(head[2]), int(head[3]), path
        size, end = os.path.getsize(path), 1024 + count * np.dtype(kind).itemsize
        bits = (count + 7) // 8
        if size != end + bits * (self.masked + self.starts):
            die(f"{path}: token count is {count}, but the file of {size} bytes holds another number of tokens")
        self.tokens = np.memmap(path, dtype=kind, mode="r", offset=1024, shape=(count,))
        self.mask = np.memmap(path, dtype="u1", mode="r", offset=end) if self.masked else None  # one bit a token
        self.starts = np.memmap(path, dtype="u1", mode="r", offset=end + bits) if self.starts else None

    def trained(self, first, last):
        """Returns for each token first ... last - 1 whether it is trained as a target."""
        if not self.masked:
            return np.ones(max(0, last - first), dtype=bool)
        bits = np.unpackbits(self.mask[first // 8:(last + 7) // 8], bitorder="little")
        return bits[first % 8:first % 8 + max(0, last - first)].astype(bool)

    def make_rows(self, T, documents, bos):
        """Finds the rows of T tokens, as llmc/files/rows.h does. `pieces` has a list of (first, length) for each row. None: row
        i is the T tokens from i * T."""
        count, cross, self.cross = len(self.tokens), documents == "cross", False
        if count < (T + 1 if cross else 2):
            die(f"{self.path}: holds {count} tokens, wanted at least {T + 1}, one row of --seq {T} and its last target\n"
                f"  hint: use --seq {count - 1} or less, or leave this file out")
        self.rows, self.pieces, self.documents = (count - 1) // T, None, documents
        if cross and not self.masked:
            return
        marks = self.tokens == bos if self.starts is None else np.unpackbits(self.starts, bitorder="little")
        starts = np.flatnonzero(marks)
        if len(starts) == 0 and not cross:
            die(f"{self.path}: holds no BOS token (id {bos}), so the starts of its documents are not known")
        edges = sorted({0, *starts.tolist(), count})
        if cross:  # a piece begins at the first start in its row: an answer is never trained without its question
            self.cross = True
            begin = [i if len(starts) == 0 else edges[bisect.bisect_left(edges, i)] for i in range(0, self.rows * T, T)]
            pieces = [(start, end - start) for start, end in zip(begin, range(T, count, T)) if start < end]
        else:
            pieces = [(i, min(T, end - i)) for start, end in zip(edges, edges[1:])
                      for i in ([self.piece_start(start, end, T)] if self.masked else range(start, end, T))]
        self.pieces, window, trained, late, edges = [], [], 0, 0, set(edges)
        for first, length in pieces:
            if (n := self.trained(first + 1, min(first + length + 1, count)).sum()) > 0:
                self.place(window, first, length, T)
            trained += n
            late += n if self.masked and not cross and first not in edges else 0  # of answers behind a row's end
        left = self.trained(1, count).sum() - trained
        if self.masked and left + late and len(starts) > 0:
            warn(f"{self.path}: {left + late:,} trained tokens have lost the start of their conversation; {left:,} of them are "
                 "left out")
        self.pieces += [row for _, row in window]
        self.rows = len(self.pieces)
        if not self.pieces:
            die(f"{self.path}: holds no trained token in rows of --seq {T}")

    def piece_start(self, start, end, T):
        """Returns the first token of the one piece that is taken of the document of tokens [start, end)."""
        if end - start <= T:
            return start
        trained = self.trained(start + 1, min(end, start + 2 * T + 1))
        first = int(np.argmax(trained))
        if first < T:  # in the first piece, or 0: there is none
            return start
        length = int(np.argmin(np.append(trained[first:], False)))
        return start + 1 + first + min(length - T, -(T // 2)) if first + length < 2 * T else start

    def place(self, window, first, length, T):
        """Puts a piece into the open row with the least sufficient room. window: [room, pieces] of each open row, the oldest
        first."""
        fits = [w for w in window if w[0] >= length]
        if not fits and len(window) == (ROWS_WINDOW if self.masked else 1):
            self.close(window, min(window, key=lambda w: w[0]))
        if not fits:
            window.append([T, []])
        row = min(fits, key=lambda w: w[0]) if fits else window[-1]
        row[0] -= row[0] if self.cross else length
        row[1].append((first, length))
        if row[0] == 0:
            self.close(window, row)

    def close(self, window, row):
        self.pieces.append(row[1])
        del window[next(i for i, w in enumerate(window) if w is row)]

    def read(self, row, T):
        """Returns tokens, targets and starts of a row, (3, T)."""
        out, at = np.zeros((3, T), dtype=np.int64), 0
        out[1] = -1
        for first, length in [(row * T, T)] if self.pieces is None else self.pieces[row]:
            end, skip = min(first + length + 1, len(self.tokens)), T - length if self.cross else 0
            targets = np.where(self.trained(first + 1, end), self.tokens[first + 1:end].astype(np.int64), -1)
            out[0, at:at + skip + length] = self.tokens[first - skip:first + length]
            out[1, at + skip:at + skip + len(targets)] = targets
            out[2, at:at + length] = at
            at += length
        out[2, at:] = at
        return out if self.documents == "mask" else out[:2]


class DataLoader:
    """Reads rows of T tokens from the files that match a pattern. `row` counts the rows read so far, over all epochs, and
    `padding` the tokens in them that are none."""

    def __init__(self, pattern, B, T, seed=0, shuffle=False, documents="auto", bos=None, apart=None):
        paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern), key=os.fsencode)
        if not paths:
            die(f"{pattern}: no such token file, and no file matches this as a pattern")
        shared = [p for p in paths if apart and any(os.path.samefile(p, f.path) for f in apart.files)]
        paths = [p for p in paths if p not in shared] or paths[:1]
        for p in shared:  # a file of the loader `apart` is read here only if there are no others
            warn(f"--val: {p} is also what --train reads: its loss says nothing about other text" if p in paths else
                 f"{p}: is a file of --val, and refused as one of --train {pattern}")
        self.files = [TokenFile(p) for p in paths]
        masked = self.files[0].masked
        self.documents = documents if documents != "auto" else "mask" if masked else "cross"
        if any(f.masked != masked for f in self.files):
            die(f"{pattern}: some files have a mask, others have none")
        if self.documents != "cross" and bos is None and any(f.starts is None for f in self.files):
            die(f"{pattern}: the tokenizer that made it is not known\n  hint: give it as --tokenizer, or --documents cross")
        for f in self.files:
            f.make_rows(T, self.documents, bos)
        self.pattern, self.B, self.T, self.seed, self.shuffle, self.row, self.padding = pattern, B, T, seed, shuffle, 0, 0
        self.rows_per_epoch = sum(f.rows for f in self.files)
        self.num_tokens = sum(len(f.tokens) for f in self.files)
        self.vocab_size = max(f.vocab_size for f in self.files)
        self.usual_vocab = {2: 50257, 4: 128256}[self.files[0].tokens.itemsize]  # for files without one: GPT-2's, Llama 3's
        self.epoch, self.partial = -1, any(f.pieces is not None for f in self.files)  # partial: some targets are -1

    def set_batch(self, B):
        """Takes batches of B rows. The C trainers refuse one that is larger than the data of a single source, too."""
        n = self.rows_per_epoch
        if n < B and not isinstance(self, MixLoader):
            die(f"{self.pattern}: holds {n} row{'s' * (n != 1)} of --seq {self.T} in all, wanted at least {B}, one batch\n"
                "  hint: use a smaller --batch or --seq, or more text")
        self.B = B

    def epoch_steps(self, rows):
        """Returns the steps of `rows` rows in an epoch."""
        n = self.rows_per_epoch
        return n // rows or die(f"--train: one epoch has {n} rows of {self.T} tokens, but a step takes {rows}\n"
                                "  hint: give --steps N to train over several epochs, or lower --batch, --seq or --total-batch")

    def locate(self, row):
        """Returns (file, row in the file) of row `row` of the stream."""
        epoch, at = divmod(row, self.rows_per_epoch)
        if epoch != self.epoch:
            n = len(self.files)
            self.epoch = epoch
            self.order = shuffled(n, self.seed, RAND_SHUFFLE_SHARDS, epoch) if self.shuffle else list(range(n))
            self.starts = np.cumsum([0] + [self.files[i].rows for i in self.order]).tolist()
        place = bisect.bisect_right(self.starts, at) - 1
        i, at = self.order[place], at - self.starts[place]
        f = self.files[i]
        return f, order_row(at, f.rows, self.seed, i, epoch) if self.shuffle else at

    def next(self, device, vocab_size, B=None):
        """Returns the next B rows as int64 (B, T) on the device: inputs, targets (-1: not trained), and with --documents mask
        the index in its row at which each token's document starts."""
        B = B or self.B
        rows = np.zeros((3 if self.documents == "mask" else 2, B, self.T), dtype=np.int64)
        for b in range(B):
            f, i = self.locate(self.row + b)
            row = f.read(i, self.T)
            rows[:len(row), b] = row
            self.padding += 0 if f.pieces is None or f.cross else self.T - sum(n for _, n in f.pieces[i])
            if rows[:2, b].max() >= vocab_size:
                die(f"{f.path}: row {i} holds token {rows[:2, b].max()}, but the vocabulary has {vocab_size}")
        self.row += B
        out = [torch.from_numpy(r.copy()) for r in rows]
        return [t.pin_memory().to(device, non_blocking=True) for t in out] if device.type == "cuda" else out


MIX_BLOCK = 4096


def names_files(text):
    return os.path.exists(text) or bool(glob.glob(text))


def mix_part(text):
    """Returns (pattern, weight, length) of the first part of a --train. Weight 0: the part has none."""
    ends = [i for i in range(len(text), -1, -1) if i == len(text) or text[i] == ","]
    for n in ends:  # the longest part that names files; if none does, the loop ends with the part before the first comma
        whole = text[:n]
        pattern, colon, number = whole.rpartition(":")
        if names_files(whole):
            return whole, 0, n
        if colon and "," not in number and names_files(pattern):
            break
    try:
        weight = float(number) if colon else None
    except ValueError:
        weight = 0 if names_files(pattern) else None
    if weight is None:
        return whole, 0, n
    if not 0 < weight <= 1e9:
        die(f"--train: the weight of {pattern} is {number}, wanted a number above 0, at most 1e9")
    return pattern, weight, n


def mix_parts(text):
    """Returns [(pattern, weight), ...] of a --train."""
    parts = []
    while True:
        *part, n = mix_part(text)
        parts.append(part)
        if n == len(text):
            break
        text = text[n + 1:]
    for pattern, weight in parts:
        if not pattern:
            die("--train: a part is empty, wanted PATTERN:WEIGHT between commas")
        if pattern[0] == " " and not names_files(pattern):
            die(f'--train: "{pattern}" begins with a blank, and names no file, wanted no blank behind a comma')
        if len(parts) > 1 and not weight:
            die(f"--train: {pattern} has no weight, wanted one for each of the {len(parts)} parts")
    return parts


class MixLoader(DataLoader):
    """Reads the rows of several sources in the order of llmc/files/mix.h."""

    def __init__(self, parts, B, T, seed, documents="auto", bos=None, apart=None):
        self.sources = [DataLoader(pattern, B, T, seed, True, documents, bos, apart) for pattern, _ in parts]
        self.documents = "mask" if any(s.documents == "mask" for s in self.sources) else "cross"
        total = sum(weight for _, weight in parts)
        quota = [weight / total * MIX_BLOCK for _, weight in parts]
        self.share = [int(q) for q in quota]
        for _ in range(MIX_BLOCK - sum(self.share)):
            rest = [q - n for q, n in zip(quota, self.share)]
            most = 0
            for i in range(1, len(rest)):
                most = i if rest[i] > rest[most] + 1e-6 else most
            self.share[most] += 1
        if 0 in self.share:
            die(f"--train: the weight of {parts[self.share.index(0)][0]} is too small for one row in {MIX_BLOCK}")
        self.files, self.partial = [f for s in self.sources for f in s.files], any(s.partial for s in self.sources)
        self.B, self.T, self.seed, self.row, self.block, self.padding = B, T, seed, 0, -1, 0
        self.rows_per_epoch = sum(s.rows_per_epoch for s in self.sources)
        self.num_tokens = sum(s.num_tokens for s in self.sources)
        self.vocab_size = max(s.vocab_size for s in self.sources)
        self.usual_vocab = max(s.usual_vocab for s in self.sources)

    def source(self, row):
        """Returns the source of row `row` of the stream, and which of its own rows that is."""
        block, i = divmod(row, MIX_BLOCK)
        if block != self.block:
            of_place = np.repeat(np.arange(len(self.share)), self.share)
            self.of_row = of_place[shuffled(MIX_BLOCK, self.seed, RAND_MIX, block)]
            self.block = block
        s = int(self.of_row[i])
        return s, block * self.share[s] + int((self.of_row[:i] == s).sum())

    def next(self, device, vocab_size, B=None):
        self.row_sources.append([self.source(self.row + b)[0] for b in range(B or self.B)])
        return super().next(device, vocab_size, B)

    def locate(self, row):
        s, position = self.source(row)
        return self.sources[s].locate(position)


def train_loader(parts, B, T, seed, documents, bos, apart=None):
    """Returns the loader of the parts of a --train, which shuffles."""
    if len(parts) > 1:
        return MixLoader(parts, B, T, seed, documents, bos, apart)
    return DataLoader(parts[0][0], B, T, seed, True, documents, bos, apart)
