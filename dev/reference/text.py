"""text.py -- what a folder says of its texts: encodes prompts and decodes samples by tokenizer.json, and writes into the folders of
a run what training has made of the model. llmc/text/text_rules.h has the same in C. Texts are ids if the package `tokenizers` is
missing."""
import collections
import contextlib
import fnmatch
import json
import os
import shutil

from dev.errors import fail
from dev.reference.tables import c_strings


def read_json(path):
    """Returns the object in a file; {} if there is no file."""
    if not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as f:
            return dict(json.load(f))
    except (ValueError, TypeError) as e:
        fail(f"{path}: {e}")


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as f:
        f.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


class Text:
    """The tokenizer of a folder or of a path to tokenizer.json. Without one, or with path None, it encodes nothing. fresh: of a
    new model, whose texts begin with BOS."""

    def __init__(self, path, fresh=False):
        self.tok, self.folder, self.vocab_size = None, path if path and os.path.isdir(path) else os.path.dirname(path or ""), 0
        self.fresh, self.specials, self.turn = fresh, {}, None
        if path and not os.path.exists(path):
            fail(f"{path}: no such file or folder")
        path = os.path.join(path, "tokenizer.json") if path and os.path.isdir(path) else path
        if path and os.path.basename(path) == "tokenizer.json" and os.path.exists(path):
            try:
                with open(path, encoding="utf-8") as f:
                    j = json.load(f)
                added = j.get("added_tokens", [])
                ids = list(j["model"]["vocab"].values()) + [t["id"] for t in added]
                self.vocab_size, self.specials = max(ids) + 1, {t["content"]: t["id"] for t in added if t.get("special")}
            except (ValueError, KeyError, TypeError, AttributeError):
                fail(f"{path}: is damaged, or no tokenizer.json of a BPE")
            with contextlib.suppress(ImportError):
                from tokenizers import Tokenizer
                try:
                    self.tok = Tokenizer.from_file(path)
                except Exception as e:  # the library raises no other kind
                    fail(f"{path}: {e}")

    def start(self, bos):
        """Returns the ids before a text: what the post-processor puts there, in a new model BOS."""
        if self.fresh or not self.tok:
            return [bos] if bos is not None else []
        bare, around = self.tok.encode("x", add_special_tokens=False).ids, self.tok.encode("x").ids
        return around[:around.index(bare[0])]

    def encode(self, text, bos):
        """Returns the ids of a text, after those of start()."""
        ids = self.tok.encode(text, add_special_tokens=False).ids if self.tok else []
        return self.start(bos) + ids or [0]

    def id(self, special):
        return self.tok.token_to_id(special) if self.tok else None

    def decode(self, ids):
        return self.tok.decode(ids) if self.tok else " ".join(map(str, ids))

    def learn_turn(self, files):
        """Finds in token files with a mask the special token that ends the most answers: the end of a turn. Returns its id."""
        ends, special = collections.Counter(), set(self.specials.values())
        for f in files:
            count = min(len(f.tokens), 1 << 20) if f.masked else 0
            trained, last = f.trained(0, count), None
            for i in range(count):
                last = (int(f.tokens[i]) if int(f.tokens[i]) in special else last) if trained[i] else None
                if last is not None and (i + 1 == count or not trained[i + 1]):
                    ends[last] += 1
        self.turn = ends.most_common(1)[0][0] if ends else None
        return self.turn

    def template(self):
        """Returns the chat template that the folder lacks and that this run has used, or None."""
        names = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
        if (self.turn is None and not self.fresh) or not all(name in self.specials for name in names):
            return None
        if "chat_template" in read_json(os.path.join(self.folder, "tokenizer_config.json")) or \
                os.path.exists(os.path.join(self.folder, "chat_template.jinja")):
            return None
        return "".join(c_strings("llmc/text/chat.h", "#define LLAMA3_CHAT_TEMPLATE", "/*"))

    def save(self, folder, c):
        """Writes what the folder says of its texts into another one, with the template and the end of a turn that this run has
        trained. c: the Config of the model."""
        copied = c_strings("llmc/files/side_files.h", "is_side_file(const char* name)", "};")
        for name in sorted(os.listdir(self.folder)) if self.folder else []:
            path, kept = os.path.join(self.folder, name), any(fnmatch.fnmatch(name.lower(), n.lower()) for n in copied)
            if os.path.isfile(path) and kept and not name.endswith(".safetensors") and \
                    (not self.fresh or name.startswith(("tokenizer", "chat_template"))):
                shutil.copy(path, folder)
        more = os.path.join(self.folder, "additional_chat_templates") if self.folder else ""
        if os.path.isdir(more):
            shutil.copytree(more, os.path.join(folder, os.path.basename(more)), dirs_exist_ok=True)
        config, template = os.path.join(folder, "tokenizer_config.json"), self.template()
        known = read_json(config)
        if self.vocab_size and (template or self.fresh or not known):
            names = {i: name for name, i in self.specials.items()}
            ids = dict(bos_token=c.bos_token_id, eos_token=(c.eos_token_id or [None])[0])
            known = {key: names[i] for key, i in ids.items() if i in names} | known if self.fresh or not known else known
            known = known if known.get("tokenizer_class") else known | {"tokenizer_class": "PreTrainedTokenizerFast"}
            write_json(config, known | ({"chat_template": template} if template else {}))
        self.save_generation(folder, c)

    def save_generation(self, folder, c):
        """Writes generation_config.json: that of the folder with the end of a turn, or a new one."""
        known = read_json(os.path.join(self.folder, "generation_config.json")) if self.folder and not self.fresh else {}
        eos = known.get("eos_token_id", c.eos_token_id)
        eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if known and (self.turn is None or self.turn in eos):
            shutil.copy(os.path.join(self.folder, "generation_config.json"), folder)
            return
        eos = eos + [self.turn] * (self.turn is not None and self.turn not in eos)
        known = known or {"bos_token_id": c.bos_token_id}
        write_json(os.path.join(folder, "generation_config.json"), known | {"eos_token_id": eos[0] if len(eos) == 1 else eos or None})
