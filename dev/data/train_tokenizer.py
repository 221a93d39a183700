"""Trains a byte-level BPE tokenizer with Llama 3's split pattern and writes it as tokenizer.json.

    python3 dev/data/train_tokenizer.py input.txt stories.jsonl --vocab-size 4096 -o tokenizer.json

A .jsonl file holds one document per line, in the field `text`; any other file is text. Ids are laid out as in Llama 3: the 256
bytes, then the merged tokens in the order they were learnt, then the special tokens. The merge list is rebuilt from these ids,
which makes one rule of "lowest merge first" (Hugging Face) and "lowest id of the merged bytes first" (tiktoken). The last step
encodes some of the training text by both rules and compares the ids. llmc/text/tokenizer_read.h and `transformers` read the
file in the same way.
"""
import argparse
import json
import os
import sys
import time

from data_common import check_text, fail  # first: it names packages that are missing
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                  r"|\s*[\r\n]+|\s+(?!\S)|\s+")
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
CHAT = ["<|finetune_right_pad_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"]
CHUNK = 1 << 20  # characters of a long text passed on at a time


def documents(paths):
    """Yields the texts of all files, long ones in chunks of whole lines."""
    for path in paths:
        with open(path, encoding="utf-8-sig", newline="") as f:  # a byte order mark does not belong to the text
            if path.endswith(".jsonl"):
                for number, line in enumerate(f, 1):
                    if line.strip():
                        try:
                            text = json.loads(line)["text"]
                            text.encode()
                        except UnicodeEncodeError:
                            fail(f"{path}:{number}: the text holds a surrogate without its other half")
                        except (ValueError, KeyError, TypeError, AttributeError):
                            fail(f"{path}:{number}: wanted a JSON object with a string \"text\"")
                        yield text
            else:
                while lines := f.readlines(CHUNK):
                    yield "".join(lines)


def pre_tokenizer():
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])


def learn(texts, num_tokens):
    """Returns the token strings in the order of their ids: the 256 bytes, then the merged tokens."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizer()
    trainer = trainers.BpeTrainer(vocab_size=num_tokens, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=sys.stderr.isatty())
    tok.train_from_iterator(texts, trainer)
    vocab = tok.get_vocab()
    return sorted(vocab, key=vocab.get)


def merges_of(tokens):
    """Returns tiktoken's rule as a list of merges: all splits of each token into two, in the order of the tokens' ids."""
    rank = {token: i for i, token in enumerate(tokens)}
    merges = []
    for token in tokens:
        splits = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in rank and token[i:] in rank]
        merges += sorted(splits, key=lambda pair: (rank[pair[0]], rank[pair[1]]))
    return merges


def build(tokens, specials):
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges_of(tokens), ignore_merges=True))
    tok.pre_tokenizer = pre_tokenizer()
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(specials)
    tok.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, tok.token_to_id(BOS))])
    return tok


def check(tok, texts, limit=2_000_000):
    """Checks on up to `limit` characters that tiktoken's rule gives the same ids and that they decode to the text."""
    try:
        import tiktoken
    except ImportError:
        return "not compared (tiktoken is not installed)"
    byte_of = {c: b for b, c in enumerate(bytes_to_chars())}
    vocab = tok.get_vocab(with_added_tokens=False)
    ranks = {bytes(byte_of[c] for c in token): i for token, i in vocab.items()}
    other = tiktoken.Encoding("trained", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={})
    tok.encode_special_tokens = True  # a special name inside the text is plain text for both
    seen = 0
    for text in texts:
        text = text[:limit - seen]
        ids = tok.encode(text, add_special_tokens=False).ids
        if ids != other.encode_ordinary(text) or tok.decode(ids, skip_special_tokens=False) != text:
            fail("Hugging Face's and tiktoken's rules disagree on the training text; this is a bug of this script")
        seen += len(text)
        if seen >= limit:
            break
    return f"{seen:,} characters have the same ids in tokenizers and tiktoken"


def bytes_to_chars():
    """Lists GPT-2's stand-in for each byte: the byte itself if it is printable, else the next character from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars, extra = [], 0x100
    for b in range(256):
        chars.append(chr(b if b in printable else extra))
        extra += b not in printable
    return chars


def write(tok, path):
    """Writes one line for each part of the file: small, and a diff shows which part changed."""
    parts = json.loads(tok.to_str())
    lines = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}"
             for key, value in parts.items()]
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        f.write("{\n" + ",\n".join(lines) + "\n}\n")
    os.replace(path + ".tmp", path)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("files", nargs="+", metavar="FILE", help="text, or .jsonl with a field `text` on each line")
    p.add_argument("--vocab-size", type=int, required=True, help="number of tokens, including the special ones")
    p.add_argument("-o", "--out", default="tokenizer.json", help="file to write (default %(default)s)")
    p.add_argument("--chat", action="store_true", help="also add the special tokens of Llama 3's chat format")
    args = p.parse_args()

    specials = [BOS, EOS] + (CHAT if args.chat else [])
    if args.vocab_size < 256 + len(specials):
        p.error(f"--vocab-size {args.vocab_size}: wanted at least {256 + len(specials)}: 256 bytes and {len(specials)} "
                "special tokens")
    if args.vocab_size > 1 << 20:  # the library ends in an abort where memory ends
        p.error(f"--vocab-size {args.vocab_size}: wanted at most {1 << 20}")
    for path in args.files:
        check_text(path)
    start = time.time()
    try:
        tokens = learn(documents(args.files), args.vocab_size - len(specials))
    except UnicodeDecodeError as e:
        fail(f"the text is not UTF-8: {e}")
    tok = build(tokens, specials)
    compared = check(build(tokens, specials), documents(args.files))
    write(tok, args.out)
    size = tok.get_vocab_size()
    print(f"{args.out}: {size:,} tokens ({len(specials)} special), {time.time() - start:.1f} s; {compared}")
    if size < args.vocab_size:
        print(f"  the text has no more pairs to merge: {args.vocab_size - size:,} tokens fewer than asked for")


if __name__ == "__main__":
    main()
