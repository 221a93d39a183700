"""text.py -- encodes prompts and decodes samples by tokenizer.json. Texts are ids if the package `tokenizers` is missing."""
import contextlib
import json
import os

from dev.errors import fail


class Text:
    """The tokenizer of a folder or of a path to tokenizer.json. Without one, or with path None, it encodes nothing."""

    def __init__(self, path):
        self.tok, self.folder, self.vocab_size = None, path if path and os.path.isdir(path) else os.path.dirname(path or ""), 0
        if path and not os.path.exists(path):
            fail(f"{path}: no such file or folder")
        path = os.path.join(path, "tokenizer.json") if path and os.path.isdir(path) else path
        if path and os.path.basename(path) == "tokenizer.json" and os.path.exists(path):
            try:
                with open(path, encoding="utf-8") as f:
                    j = json.load(f)
                ids = list(j["model"]["vocab"].values()) + [t["id"] for t in j.get("added_tokens", [])]
                self.vocab_size = max(ids) + 1
            except (ValueError, KeyError, TypeError, AttributeError):
                fail(f"{path}: is damaged, or no tokenizer.json of a BPE")
            with contextlib.suppress(ImportError):
                from tokenizers import Tokenizer
                try:
                    self.tok = Tokenizer.from_file(path)
                except Exception as e:  # the library raises no other kind
                    fail(f"{path}: {e}")

    def encode(self, text, bos):
        """Returns the ids of a text, after the id `bos` unless that is None."""
        ids = self.tok.encode(text, add_special_tokens=False).ids if self.tok else []
        return ([bos] if bos is not None else []) + ids or [0]

    def id(self, special):
        return self.tok.token_to_id(special) if self.tok else None

    def decode(self, ids):
        return self.tok.decode(ids) if self.tok else " ".join(map(str, ids))
