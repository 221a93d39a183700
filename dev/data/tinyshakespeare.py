"""Downloads tinyshakespeare (1.1 MB, from Karpathy's char-rnn) and writes it as token files.

    python3 dev/data/tinyshakespeare.py --tokenizer DIR|FILE [--input input.txt]

Writes tinyshakespeare_train.bin, and the last tenth of the text to tinyshakespeare_val.bin, in dev/data/tinyshakespeare.
Standard library only; needs ./tokenize (`make tokenize`).
"""
import argparse
import os

from data_common import DATA, check_input, download, report, tokenize, tokenizer_or_bytes

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SIZE = 1115394


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", metavar="DIR|FILE",
                        help="tokenizer.json, tokenizer.model or a folder with one (default: the one in --out, else bytes)")
    parser.add_argument("--input", metavar="FILE", help="use this copy of the text instead of the download")
    parser.add_argument("--val-fraction", type=float, default=0.1, metavar="F",
                        help="fraction of the text, at its end, to validate on (default 0.1)")
    parser.add_argument("--out", default=os.path.join(DATA, "tinyshakespeare"), metavar="DIR", help="folder to write to")
    args = parser.parse_args()

    text = args.input or os.path.join(args.out, "input.txt")
    if not args.input:
        download(URL, text, SIZE, "give a copy of the text as --input FILE")
    check_input(text)
    os.makedirs(args.out, exist_ok=True)
    tokenizer = tokenizer_or_bytes(args.tokenizer, args.out)
    base = os.path.join(args.out, "tinyshakespeare")
    tokenize(tokenizer, text, base + ".bin", args.val_fraction)
    report([base + "_train.bin"], base + "_val.bin", tokenizer)


if __name__ == "__main__":
    main()
