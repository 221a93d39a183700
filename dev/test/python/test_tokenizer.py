"""The tokenizer against tiktoken and tokenizers: ./tokenize --jsonl and --decode on adversarial text of many scripts.

TEST_DATA names a folder with llama3/tokenizer.model, llama3/tokenizer.json.gz and tinyshakespeare.txt. Without it the tests of
Llama 3's own tokenizer are skipped; tests of tokenizers trained here remain.
STRINGS (default 10000, with FULL=1 100000) sets the number of random strings. With FULL=1, long texts are longer, too.
"""
import functools
import gzip
import json
import os
import random
import shutil
import subprocess
import time
import unicodedata

import forks
import pytest

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
TOKENIZE = os.environ.get("TOKENIZE", os.path.join(ROOT, "tokenize"))
DATA = os.environ.get("TEST_DATA", "")
MODEL = os.path.join(DATA, "llama3", "tokenizer.model")
JSON_GZ = os.path.join(DATA, "llama3", "tokenizer.json.gz")
SHAKESPEARE = os.path.join(DATA, "tinyshakespeare.txt")
FULL = os.environ.get("FULL") == "1"
NUM_STRINGS = int(os.environ.get("STRINGS", "100000" if FULL else "10000"))
SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|endoftext|>"]

pytestmark = pytest.mark.skipif(not os.path.exists(TOKENIZE), reason=f"{TOKENIZE} is not built (make tokenize)")
needs_llama3 = pytest.mark.skipif(not os.path.exists(MODEL), reason="TEST_DATA has no llama3/tokenizer.model")
needs_llama3_json = pytest.mark.skipif(not os.path.exists(JSON_GZ), reason="TEST_DATA has no llama3/tokenizer.json.gz")
needs_shakespeare = pytest.mark.skipif(not os.path.exists(SHAKESPEARE), reason="TEST_DATA has no tinyshakespeare.txt")


# ---------------------------------------------------------------------------------------------------------------------
# running ./tokenize

def run_lines(args, lines):
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    done = subprocess.run([TOKENIZE, *args], input=data, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=600)
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


def encode(path, texts, *flags):
    out = run_lines(["--tokenizer", str(path), "--jsonl", *flags], [{"text": t} for t in texts])
    assert len(out) == len(texts)
    return [line["ids"] for line in out]


def decode(path, ids):
    out = run_lines(["--tokenizer", str(path), "--decode"], [{"ids": i} for i in ids])
    assert len(out) == len(ids)
    return [line["text"] for line in out]


def each_encoded(tiktoken_encoding, texts):
    """Returns the ids of each text. encode_ordinary_batch's threads wait for each other, seven times as long for short texts."""
    return [tiktoken_encoding.encode_ordinary(t) for t in texts]


def assert_same(texts, got, want):
    bad = [i for i in range(len(texts)) if list(got[i]) != list(want[i])]
    shown = [(texts[i], got[i], list(want[i])) for i in bad[:3]]
    assert not bad, f"{len(bad)} of {len(texts)} differ, the first: {shown}"


def check_against(path, tok, texts, other=None):
    """Compares plain and --specials with a `tokenizers` tokenizer, plain also with `other` (tiktoken); checks decoding."""
    tok.encode_special_tokens = True
    plain = [e.ids for e in tok.encode_batch_fast(texts, add_special_tokens=False)]
    tok.encode_special_tokens = False
    special = [e.ids for e in tok.encode_batch_fast(texts, add_special_tokens=False)]
    got = encode(path, texts)
    assert_same(texts, got, plain)
    if other:
        assert_same(texts, got, each_encoded(other, texts))
    assert_same(texts, encode(path, texts, "--specials"), special)
    assert decode(path, got) == texts
    assert decode(path, special) == texts


# ---------------------------------------------------------------------------------------------------------------------
# texts

def script_ranges():
    """Returns the first and last code point of blocks that differ in class, UTF-8 length or behaviour."""
    return [(0x20, 0x7E), (0x41, 0x5A), (0x61, 0x7A), (0x30, 0x39), (0xA0, 0xFF), (0x100, 0x24F), (0x250, 0x2FF), (0x300, 0x36F),
            (0x370, 0x3FF), (0x400, 0x4FF), (0x530, 0x58F), (0x590, 0x5FF), (0x600, 0x6FF), (0x700, 0x74F), (0x7C0, 0x7FF),
            (0x900, 0x97F), (0x980, 0x9FF), (0xB80, 0xBFF), (0xE00, 0xE7F), (0xF00, 0xFFF), (0x1000, 0x109F), (0x10A0, 0x10FF),
            (0x1100, 0x11FF), (0x1200, 0x137F), (0x13A0, 0x13FF), (0x1780, 0x17FF), (0x1800, 0x18AF), (0x1E00, 0x1EFF),
            (0x2000, 0x206F), (0x2070, 0x209F), (0x20A0, 0x20CF), (0x2100, 0x214F), (0x2150, 0x218F), (0x2190, 0x21FF),
            (0x2460, 0x24FF), (0x2500, 0x257F), (0x2600, 0x26FF), (0x3000, 0x303F), (0x3040, 0x30FF), (0x3100, 0x312F),
            (0x4E00, 0x9FFF), (0xA000, 0xA48F), (0xAC00, 0xD7A3), (0xE000, 0xE0FF), (0xFB00, 0xFB4F), (0xFE00, 0xFE0F),
            (0xFF00, 0xFFEF), (0x10000, 0x100FF), (0x10400, 0x1044F), (0x12000, 0x120FF), (0x1D400, 0x1D7FF), (0x1EE00, 0x1EEFF),
            (0x1F300, 0x1F6FF), (0x1F900, 0x1F9FF), (0x20000, 0x200FF), (0xE0001, 0xE007F), (0x10FF00, 0x10FFFF)]


SNIPPETS = ["'s", "'S", "'ſ", "'t", "'re", "'RE", "'vE", "'m", "'ll", "'lL", "'d", "'", "''", "’s", " ", "  ", "   ", "\n", "\r", "\r\n",
            "\n\n", "\t", "\t\t", " \n", "\n ", "\u00a0", "\u3000", "\u2028", "\u0085", "\u200b", "\u180e", "\u001c", "\x00", "\x7f",
            "\ufeff", "1", "12", "123", "1234", "12345678", "٣", "²", "½", "Ⅷ", "a", "I", "the", " the", "hello", "World", "ſ", "K",
            "é", "e\u0301", "\u0301", "ﬁ", "ß", "İ", "中", "中文字", "日本語", "한국어", "हिन्दी", "ไทย", "العربية", "עברית", "😀", "👩‍👩‍👧‍👦", "🇩🇪",
            "...", "!!!", "?!", "--", "==", "//", "/*", "<|", "|>", "{", "}", "\\", "\"", "#", "$", "%", "&", "(", ")", "_", "\u200d"]


def random_strings(n, seed=1):
    rng = random.Random(seed)
    ranges = script_ranges()
    texts = []
    for _ in range(n):
        mode = rng.random()
        parts = []
        few = [rng.choice(ranges) for _ in range(3)]
        for _ in range(rng.choice([1, 2, 3, 5, 8, 13, 30])):
            pick = rng.random()
            if pick < 0.45:
                parts.append(rng.choice(SNIPPETS))
            elif pick < 0.5:
                parts.append(rng.choice(SPECIALS)[:rng.choice([5, 99, 99])])
            elif pick < 0.55:
                parts.append(rng.choice(SNIPPETS) * rng.randrange(1, 20))
            else:
                low, high = rng.choice(few if mode < 0.6 else ranges)
                parts.append("".join(chr(rng.randint(low, high)) for _ in range(rng.choice([1, 1, 2, 4, 9]))))
        texts.append("".join(parts))
    return texts


def all_code_points():
    return [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]


@functools.lru_cache(maxsize=None)
def telling_code_points():
    """Returns all code points that lie within two of another category, and a few of the rest, which behave like their
    neighbours. With FULL=1: all of the planes with letters, numbers and spaces, and a few of the rest."""
    if FULL:
        return [c for c in all_code_points() if ord(c) < 0x33480 or ord(c) % 97 == 0]
    category = [unicodedata.category(chr(c)) for c in range(0x110000)]
    return [c for c in all_code_points() if len(set(category[max(0, ord(c) - 2):ord(c) + 3])) > 1
            or ord(c) % (17 if ord(c) < 0x33480 else 97) == 0]


def packed(form, points, per_string=256):
    """Returns every code point in `form`, each on its own line, many lines to a string."""
    return ["\n".join(form.format(c) for c in points[i:i + per_string]) for i in range(0, len(points), per_string)]


# ---------------------------------------------------------------------------------------------------------------------
# tokenizers

@pytest.fixture(scope="session")
def llama3_json(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama3") / "tokenizer.json"
    with gzip.open(JSON_GZ, "rb") as f, open(path, "wb") as out:
        shutil.copyfileobj(f, out)
    return path


def llama3_tiktoken():
    tiktoken = pytest.importorskip("tiktoken")
    import base64
    from bpe_oracle import LLAMA3_PATTERN
    with open(MODEL, "rb") as f:
        ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in f}
    return tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks,
                             special_tokens={"<|begin_of_text|>": 128000})


def training_text():
    rng = random.Random(7)
    words = ["the", "cat", "sat", "on", "a", "mat", "don't", "we're", "naïve", "日本", "語", "x1", "42", "1999", "Привет", "мир", "over",
             "hello", "there", "thereafter", "their", "aaaa", "abab", "!!", "...", "\n", "\n\n", "  ", "\t", "😀", "🎉", "हिन्दी"]
    return ["".join(rng.choice(words) + rng.choice([" ", " ", "", "\n"]) for _ in range(400)) for _ in range(50)]


def train(pre_tokenizer, ignore_merges, specials, vocab_size=800, alphabet=True):
    tok = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tok.pre_tokenizer = pre_tokenizer
    tok.decoder = decoders.ByteLevel()
    initial = pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    tok.train_from_iterator(training_text(), trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=initial,
                                                                 special_tokens=specials, show_progress=False))
    return tok


def byte_level(use_regex=True):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def smollm():
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()])


def digit_runs():
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), byte_level()])


def llama3_like():
    from bpe_oracle import pre_tokenizer
    return pre_tokenizer()


KINDS = {"gpt2": byte_level, "smollm": smollm, "digit_runs": digit_runs, "llama3": llama3_like,
         "whole_text": lambda: byte_level(use_regex=False)}


# ---------------------------------------------------------------------------------------------------------------------
# tests

@needs_llama3
def test_random_strings_encode_as_in_tiktoken_and_tokenizers(llama3_json):
    texts = random_strings(NUM_STRINGS)
    tok = Tokenizer.from_file(str(llama3_json))
    check_against(MODEL, tok, texts, llama3_tiktoken())


@needs_llama3_json
def test_random_strings_encode_alike_from_tokenizer_json(llama3_json):
    texts = random_strings(NUM_STRINGS // 4, seed=2)
    check_against(llama3_json, Tokenizer.from_file(str(llama3_json)), texts)


@needs_llama3
def test_every_code_point_alone_and_between_letters(llama3_json):
    other = llama3_tiktoken()
    tok = Tokenizer.from_file(str(llama3_json))
    points = all_code_points() if FULL else telling_code_points()
    alone = encode(MODEL, points)
    assert_same(points, alone, each_encoded(other, points))
    texts = packed("a{}b", points)
    assert_same(texts, encode(MODEL, texts), each_encoded(other, texts))
    for form in ["a{}b", " {}", "'{}", "1{}2", " {} x"]:
        texts = packed(form, telling_code_points())
        got = encode(MODEL, texts)
        assert_same(texts, got, each_encoded(other, texts))
        assert_same(texts, got, [e.ids for e in tok.encode_batch_fast(texts, add_special_tokens=False)])
    assert decode(MODEL, alone) == points


@needs_llama3
@needs_shakespeare
def test_tinyshakespeare_has_the_known_number_of_tokens():
    with open(SHAKESPEARE, encoding="utf-8", newline="") as f:
        text = f.read()
    ids, = encode(MODEL, [text])
    assert len(ids) == 301768
    assert ids == llama3_tiktoken().encode_ordinary(text)
    assert decode(MODEL, [ids]) == [text]


@needs_llama3
def test_a_long_run_without_spaces_is_fast_and_right():
    rng = random.Random(3)
    texts = ["".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(100_000)), "a" * 100_000]
    texts += ["中" * 30_000, "=" * 100_000]
    load = time.time()
    encode(MODEL, ["a"])
    load = time.time() - load
    start = time.time()
    got = encode(MODEL, texts)
    seconds = time.time() - start - load
    print(f"\n4 pieces of 100 kB: {seconds:.3f} s")
    assert_same(texts, got, [llama3_tiktoken().encode_ordinary(t) for t in texts])
    assert seconds < 2


@needs_llama3
def test_megabytes_in_one_piece_take_less_than_400_ms_each(tmp_path):
    rng, megabytes = random.Random(4), 20 if FULL else 5
    (tmp_path / "text.txt").write_text("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=megabytes * 1_000_000)))
    start = os.times()
    run("--tokenizer", MODEL, "-o", tmp_path / "out.bin", tmp_path / "text.txt", check=True)
    end = os.times()  # processor time: one thread encodes a piece, and other programs may run beside it
    seconds = end.children_user - start.children_user + end.children_system - start.children_system
    print(f"\n{megabytes} MB of random letters in one piece: {seconds:.3f} s")
    assert seconds < 0.4 * megabytes


@pytest.mark.parametrize("ignore_merges", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_trained_tokenizers_of_each_kind(tmp_path, kind, ignore_merges):
    path = tmp_path / "tokenizer.json"
    tok = train(KINDS[kind](), ignore_merges, ["<|endoftext|>"])
    tok.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>x"])
    tok.save(str(path))
    check_against(path, tok, random_strings(NUM_STRINGS // 10, seed=4) + training_text())


@pytest.mark.parametrize("kind", ["gpt2", "smollm", "digit_runs"])
def test_every_code_point_with_trained_tokenizers(tmp_path, kind):
    path = tmp_path / "tokenizer.json"
    tok = train(KINDS[kind](), False, ["<|endoftext|>"])
    tok.save(str(path))
    points = telling_code_points()
    if kind != "gpt2" and len(pre_tokenizers.Digits(True).pre_tokenize_str("a\U00011de0a")) != 3:
        # digits of Unicode 17, which this version of `tokenizers` does not know yet (unicode_extra_digits)
        points = [c for c in points if not 0x11DE0 <= ord(c) <= 0x11DE9 and not 0x16FF4 <= ord(c) <= 0x16FF6]
    for form in ["a{}b", "1{}2", " {} ", "'{}"]:
        texts = packed(form, points)
        assert_same(texts, encode(path, texts), [e.ids for e in tok.encode_batch_fast(texts, add_special_tokens=False)])


def test_merges_as_strings_read_like_pairs(tmp_path):
    tok = train(byte_level(), False, [])
    pairs, strings = tmp_path / "pairs.json", tmp_path / "strings.json"
    parts = json.loads(tok.to_str())
    assert isinstance(parts["model"]["merges"][0], list)
    pairs.write_text(json.dumps(parts))
    parts["model"]["merges"] = ["#version: 0.2"] + [" ".join(m) for m in parts["model"]["merges"]]
    strings.write_text(json.dumps(parts))
    texts = random_strings(500, seed=5)
    assert encode(pairs, texts) == encode(strings, texts) == [tok.encode(t).ids for t in texts]


def test_merges_in_an_order_that_is_not_that_of_the_ids(tmp_path):
    tok = train(byte_level(), False, [])
    parts = json.loads(tok.to_str())
    random.Random(6).shuffle(parts["model"]["merges"])
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(parts))
    for ignore in (False, True):
        parts["model"]["ignore_merges"] = ignore
        path.write_text(json.dumps(parts))
        check_against(path, Tokenizer.from_file(str(path)), training_text() + random_strings(2000, seed=6))


def test_added_tokens_that_are_not_special(tmp_path):
    tok = train(llama3_like(), True, [])
    tok.add_tokens(["foo", "foobar", "bar baz", tokenizers.AddedToken("cat", normalized=False), "the"])
    tok.add_special_tokens(["<|eot_id|>", "<|start_header_id|>", "ar b"])
    tok.add_tokens(["eot_id", "tart"])
    path = tmp_path / "tokenizer.json"
    tok.save(str(path))
    rng = random.Random(8)
    words = ["foo", "foobar", "bar", " baz", "cat", "the", "<|eot_id|>", "<|start_header_id|>", "eot", "eot_id", "tart", " ",
             "r b", "x"]
    texts = ["".join(rng.choice(words) for _ in range(rng.randrange(1, 12))) for _ in range(5000)]
    check_against(path, tok, texts)


@pytest.mark.parametrize("place", ["tokenizer.json", "tokenizer_config.json"])
def test_added_tokens_take_the_white_space_around_them(tmp_path, place):
    """axolotl-ai-cloud/axolotl#678: phi-4's tokens do. The flags of tokenizer_config.json overrule those of tokenizer.json."""
    tok, rng, strips = train(llama3_like(), True, []), random.Random(3), [(True, False), (False, True), (True, True)]
    names = ["<|im_start|>", "<|im_sep|>", "<|end|>", "cat", "\t", "\n"]
    tok.add_tokens([tokenizers.AddedToken(name, special=i < 3, normalized=i > 3) for i, name in enumerate(names)])
    listed = json.loads(tok.to_str())
    given = [{**token, "lstrip": left, "rstrip": right} for token, (left, right) in zip(listed["added_tokens"], strips * 2)]
    if place == "tokenizer.json":
        listed["added_tokens"] = given
    (tmp_path / "tokenizer.json").write_text(json.dumps(listed))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(
        {} if place == "tokenizer.json" else {"added_tokens_decoder": {str(t.pop("id")): t for t in given}}))
    fast = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path)
    words = [*names, " ", "\n", "\t", "\u2003", "\x85", "\u200b", "a", "é", " the", "<|"]
    texts = ["".join(rng.choice(words) for _ in range(rng.randrange(1, 12))) for _ in range(3000)]
    assert_same(texts, encode(tmp_path, texts, "--specials"), fast(texts, add_special_tokens=False).input_ids)
    big = tmp_path / "big.txt"  # is cut nowhere
    big.write_text("a\n<|im_start|>b\n" * 20000 + "c")
    subprocess.run([TOKENIZE, "--tokenizer", tmp_path, "--specials", "-o", tmp_path / "big.bin", big], check=True, capture_output=True)
    assert read_tokens(tmp_path / "big.bin")[-1] == fast(big.read_text(), add_special_tokens=False).input_ids


def test_added_tokens_are_numbered_in_the_order_of_the_list(tmp_path):
    """Whatever ids the list gives them: huggingface/tokenizers#1366, ggml-org/llama.cpp#3585."""
    tok = train(llama3_like(), True, [])
    tok.add_tokens(["<tool>", "</tool>", "<think>"])
    tok.add_special_tokens(["<|eot_id|>"])
    listed, path, rng = json.loads(tok.to_str()), tmp_path / "tokenizer.json", random.Random(5)
    texts = ["<tool>hi</tool>", "a<think>b<|eot_id|>c"]
    for ids in ([801, 800, 803, 802], [900, 7, 800, 800], [0, 0, 0, 0]):
        rng.shuffle(listed["added_tokens"])
        for token, given in zip(listed["added_tokens"], ids):
            token["id"] = given
        path.write_text(json.dumps(listed))
        check_against(path, Tokenizer.from_file(str(path)), texts)


@pytest.mark.parametrize("lists", [{"added_tokens_decoder": {"700": {"content": "<tool>", "special": True}}},
                                   {"additional_special_tokens": ["<|eot_id|>", "<tool>"]}, {"extra_special_tokens": {"t": "<tool>"}},
                                   {"pad_token": "<tool>"}, {"eos_token": {"content": "<tool>"}}, {"<tool>": 800}])
def test_tokens_that_transformers_would_add_are_named(tmp_path, lists):
    """microsoft/onnxruntime-extensions#890, ggml-org/llama.cpp#5838, #3583: files of the folder list or name what tokenizer.json lacks."""
    tok = train(llama3_like(), True, [])
    tok.add_special_tokens(["<|eot_id|>"])
    tok.save(str(tmp_path / "tokenizer.json"))
    for missing in (True, False):
        (tmp_path / ("added_tokens.json" if "<tool>" in lists else "tokenizer_config.json")).write_text(json.dumps(lists))
        done = subprocess.run([TOKENIZE, "--tokenizer", tmp_path, "--jsonl"], input='{"text": "a"}', capture_output=True, text=True)
        assert done.returncode == 0 and ('no token "<tool>"' in done.stderr) == missing, done.stderr
        tok.add_special_tokens(["<tool>"])
        tok.save(str(tmp_path / "tokenizer.json"))
    word = {"content": "<|eot_id|>", "single_word": True}  # it finds fewer tokens
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"700": word}}))
    done = subprocess.run([TOKENIZE, "--tokenizer", tmp_path, "--jsonl"], input='{"text": "a"}', capture_output=True, text=True)
    assert done.returncode == 1 and "added_tokens_decoder.700.single_word is true, wanted false" in done.stderr, done.stderr
    # members by which transformers makes other ids
    for member, kind in (("split_special_tokens", "PreTrainedTokenizerFast"), ("add_prefix_space", "GPT2Tokenizer")):
        for on in (True, False):
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({member: on, "tokenizer_class": kind}))
            done = subprocess.run([TOKENIZE, "--tokenizer", tmp_path, "--jsonl"], input='{"text": "a"}', capture_output=True, text=True)
            assert done.returncode == 0 and (f"{member} is true" in done.stderr) == on, done.stderr


def test_bytes_missing_in_the_vocabulary_are_dropped_as_in_tokenizers(tmp_path):
    tok = train(byte_level(), False, [], vocab_size=300, alphabet=False)
    path = tmp_path / "tokenizer.json"
    tok.save(str(path))
    texts = random_strings(2000, seed=9)
    assert_same(texts, encode(path, texts), [e.ids for e in tok.encode_batch_fast(texts, add_special_tokens=False)])
    parts = json.loads(tok.to_str())
    parts["model"]["unk_token"] = "a"
    path.write_text(json.dumps(parts))
    tok = Tokenizer.from_file(str(path))
    assert_same(texts, encode(path, texts), [e.ids for e in tok.encode_batch_fast(texts, add_special_tokens=False)])


@needs_llama3
def test_parts_of_characters_decode_as_in_tokenizers(llama3_json):
    tok = Tokenizer.from_file(str(llama3_json))
    rng = random.Random(10)
    broken = [t for t in range(128000) if "\ufffd" in tok.decode([t], skip_special_tokens=False)]
    ids = [[rng.choice(broken) if rng.random() < 0.7 else rng.randrange(128256) for _ in range(rng.randrange(1, 9))]
           for _ in range(20000)]
    assert decode(MODEL, ids) == tok.decode_batch(ids, skip_special_tokens=False)


def test_what_train_bpe_writes_is_read_alike(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": t}) + "\n" for t in training_text()))
    out = tmp_path / "tokenizer.json"
    subprocess.run([TOKENIZE, "--train-bpe", "600", "--chat", "-o", out, text], check=True, stdout=subprocess.DEVNULL)
    texts = random_strings(5000, seed=11) + training_text()
    tok = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    check_against(tmp_path, tok, texts)
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    bos = fast.convert_tokens_to_ids("<|begin_of_text|>")
    assert fast("the cat sat")["input_ids"] == [bos] + encode(tmp_path, ["the cat sat"])[0]


@pytest.fixture(scope="session")
def tokenizer_copy():
    """Saves a tokenizer with llmc/text/tokenizer_write.h and opens the saved files with transformers."""
    transformers = pytest.importorskip("transformers")
    program = forks.built("copy")

    def copy(source, target, load=True):
        os.makedirs(target, exist_ok=True)
        out = subprocess.run([str(program), "tokenizer", str(source), str(target)], check=True, stdout=subprocess.PIPE, text=True).stdout
        return out.split()[3], transformers.AutoTokenizer.from_pretrained(str(target)) if load else None

    return copy


def check_saved(fast, path, texts, bos):
    """Checks that transformers puts BOS in front and otherwise encodes and decodes like ./tokenize."""
    ours = encode(path, texts)
    assert_same(texts, [e[1:] for e in fast(texts)["input_ids"]], encode(path, texts, "--specials"))
    assert all(e[0] == bos for e in fast(texts)["input_ids"])
    assert fast(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"] == ours
    assert [fast.decode(i) for i in ours] == texts
    assert fast.bos_token_id == bos


@needs_llama3
def test_llama3_saved_from_either_file_opens_in_transformers(tokenizer_copy, llama3_json, tmp_path):
    texts = random_strings(3000, seed=14)
    prints = set()
    for source in (MODEL, llama3_json):
        target = tmp_path / os.path.basename(source)
        fingerprint, fast = tokenizer_copy(source, target)
        check_saved(fast, target, texts, 128000)
        assert fast.eos_token_id == 128001 and len(fast) == 128256 and fast.model_max_length == 2048
        messages = [{"role": "system", "content": "Be kind. "}, {"role": "user", "content": "Hi\n\nyou"}]
        chat = fast.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        head = "<|start_header_id|>{}<|end_header_id|>\n\n"
        assert chat == ("<|begin_of_text|>" + head.format("system") + "Be kind.<|eot_id|>" + head.format("user") +
                        "Hi\n\nyou<|eot_id|>" + head.format("assistant"))
        again, _ = tokenizer_copy(target, tmp_path / "again", load=False)
        prints |= {fingerprint, again}
        assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    assert len(prints) == 1


def test_the_byte_tokenizer_opens_in_transformers(tokenizer_copy, tmp_path):
    _, fast = tokenizer_copy("bytes", tmp_path)
    check_saved(fast, tmp_path, [t for t in random_strings(1000, seed=15)], 256)
    assert fast("aé")["input_ids"] == [256, 97, 0xC3, 0xA9]


@pytest.mark.parametrize("kind", ["gpt2", "smollm", "llama3"])
def test_a_saved_folder_of_each_kind_opens_in_transformers(tokenizer_copy, tmp_path, kind):
    source = tmp_path / "source"
    source.mkdir()
    tok = train(KINDS[kind](), False, ["<|endoftext|>"])
    tok.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "GPT2Tokenizer", "add_bos_token": False, "add_prefix_space": False, "model_max_length": 77,
        "bos_token": {"__type": "AddedToken", "content": "<|endoftext|>"}, "eos_token": "<|endoftext|>"}))
    before, _ = tokenizer_copy(source, tmp_path / "saved", load=False)
    after, fast = tokenizer_copy(tmp_path / "saved", tmp_path / "again")
    assert before == after and fast.model_max_length == 77
    check_saved(fast, tmp_path / "saved", random_strings(1000, seed=16), tok.token_to_id("<|endoftext|>"))


def crc32c(data):
    """Returns the checksum of RFC 3720, a byte at a time."""
    table = list(range(256))
    for _ in range(8):
        table = [r >> 1 ^ (0x82F63B78 if r & 1 else 0) for r in table]
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def read_tokens(path):
    import struct
    data = open(path, "rb").read()
    words = struct.unpack("<256i", data[:1024])
    wide = words[0] == 20240801
    assert wide or words[0] == 20240520
    assert words[1] == (7 if wide else 1)
    body = data[1024:]
    tokens = list(struct.unpack(f"<{len(body) // (4 if wide else 2)}{'I' if wide else 'H'}", body))
    assert words[2] == len(tokens) and words[4] == len(tokens) and words[5] == 0
    assert words[6] or words[7]
    assert words[8] == 1 and words[9] & 0xFFFFFFFF == crc32c(body) and not any(words[10:])
    return words, tokens


def test_token_files_hold_bos_and_documents_in_order(tmp_path):
    tok = train(llama3_like(), True, [])
    tok.add_special_tokens(["<|begin_of_text|>"])
    tok.save(str(tmp_path / "tokenizer.json"))
    bos = tok.token_to_id("<|begin_of_text|>")
    documents = random_strings(3000, seed=12)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    # many units of 64 KiB, cut at safe places
    long_text = "".join(t + "\n" for t in random_strings(40000 if FULL else 10000, seed=13))
    (tmp_path / "b.txt").write_bytes(long_text.encode())
    tok.encode_special_tokens = True
    want = []
    for document in documents + [long_text]:
        want += [bos] + tok.encode(document, add_special_tokens=False).ids
    for threads in ("1", "3"):
        command = [TOKENIZE, "--tokenizer", str(tmp_path), "--threads", threads, "-o"]
        inputs = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")]
        subprocess.run(command + [str(tmp_path / "out.bin")] + inputs, check=True, stdout=subprocess.DEVNULL)
        words, tokens = read_tokens(tmp_path / "out.bin")
        assert tokens == want and words[3] == tok.get_vocab_size()
    subprocess.run(command + [str(tmp_path / "cut.bin"), "--val-fraction", "0.3"] + inputs, check=True,
                   stdout=subprocess.DEVNULL)
    first, second = read_tokens(tmp_path / "cut_train.bin")[1], read_tokens(tmp_path / "cut_val.bin")[1]
    assert first + second == want
    command += [str(tmp_path / "docs.bin"), "--val-fraction", "0.3", inputs[0]]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    first, second = read_tokens(tmp_path / "docs_train.bin")[1], read_tokens(tmp_path / "docs_val.bin")[1]
    assert second[0] == bos and abs(len(second) / (len(first) + len(second)) - 0.3) < 0.01
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
    # other names of lines, and rows that are none
    words = "Hi\nthere"
    for name, text in (("a.NDJSON", json.dumps({"text": words}) + "\n"), ("a.JSONL", json.dumps({"text": words})), ("a.CSV", words)):
        (tmp_path / name).write_text(text)
        done = subprocess.run([*command[:-4], str(tmp_path / "name.bin"), tmp_path / name], check=True, capture_output=True, text=True)
        assert read_tokens(tmp_path / "name.bin")[1] == [bos] + tok.encode(words, add_special_tokens=False).ids
        assert ("hf.py --rows" in done.stderr) == (name == "a.CSV"), done.stderr


def run(*args, **kwargs):
    done = subprocess.run([TOKENIZE, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)
    return done.returncode, done.stdout, done.stderr


def test_wrong_usage_ends_with_2_and_names_the_flag(tmp_path):
    for args, says in [(["--tokeniser", "x"], "--tokenizer"), (["--val-fracton=0.1"], "--val-fraction"), ([], "--out"),
                       (["-o", "x.bin"], "no input"), (["-o"], "needs a value"), (["--jsonl", "--decode"], "goes without"),
                       (["--jsonl", "file"], "stdin"), (["--val-fraction", "1.5", "-o", "x", "y"], "fraction"),
                       (["--zzzzz"], "--help"), (["--threads", "0"], "threads"), (["--specials=1"], "no value")]:
        code, out, err = run(*args, cwd=tmp_path, stdin=subprocess.DEVNULL)
        assert code == 2 and not out and says in err and err.count("\n") <= 2, (args, err)
    code, out, err = run("--help")
    assert code == 0 and not err and "--val-fraction" in out
    assert os.listdir(tmp_path) == []


def test_bad_input_ends_with_1_names_the_place_and_leaves_nothing(tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n\n{"text": 5}\n')
    (tmp_path / "cut.jsonl").write_text('{"text": "a"}\n{"text": "b\n')
    (tmp_path / "array.jsonl").write_text('[1]\n')
    before = sorted(os.listdir(tmp_path))
    for file, says in [("missing.txt", "missing.txt: cannot open"), (".", "is a folder"),
                       ("bad.jsonl", "bad.jsonl:3: text is 5"), ("cut.jsonl", "cut.jsonl:2:"),
                       ("array.jsonl", "array.jsonl:1: text is missing")]:
        code, out, err = run("-o", "out.bin", file, cwd=tmp_path)
        assert code == 1 and not out and says in err and err.count("\n") == 1, (file, err)
        assert sorted(os.listdir(tmp_path)) == before
    code, _, err = run("--tokenizer", "bad.jsonl", "-o", "out.bin", "empty.txt", cwd=tmp_path)
    assert code == 1 and "bad.jsonl" in err
    for flag, line in [("--jsonl", '{"text": 1}'), ("--jsonl", ""), ("--jsonl", '{"text": "\\ud800"}'),
                       ("--decode", '{"ids": [257]}'), ("--decode", '{"ids": [-1]}'), ("--decode", '{"ids": ["a"]}'),
                       ("--decode", '{"ids": 1}')]:
        code, out, err = run(flag, input='{"text": "a", "ids": [97]}\n' + line + "\n")
        assert code == 1 and err.startswith("error: stdin:2:") and err.count("\n") == 1, (line, err)
        assert json.loads(out) == ({"ids": [97]} if flag == "--jsonl" else {"text": "a"})


def test_a_full_disk_ends_with_1_and_leaves_nothing(tmp_path):
    (tmp_path / "text.txt").write_text("abc" * 100000)
    command = f"trap '' XFSZ; ulimit -f 64; exec {TOKENIZE} -o out.bin text.txt"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "writing failed" in done.stderr and done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["text.txt"]


def test_lines_are_answered_while_stdin_stays_open():
    with subprocess.Popen([TOKENIZE, "--jsonl"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as p:
        for text in ["a", "", "bc", "x" * 300000]:
            p.stdin.write(json.dumps({"text": text, "other": [1, {}]}) + "\n")
            p.stdin.flush()
            assert json.loads(p.stdout.readline())["ids"] == [ord(c) for c in text]


@needs_llama3
@needs_shakespeare
def test_speed_beside_tiktoken(tmp_path):
    other = llama3_tiktoken()
    with open(SHAKESPEARE, encoding="utf-8", newline="") as f:
        text = f.read()
    source = tmp_path / "text.txt"
    source.write_text(text * (20 if FULL else 8))
    command = [TOKENIZE, "--tokenizer", MODEL, "--threads", "1", "-o", str(tmp_path / "x.bin"), str(source)]
    ours = theirs = 0.0
    for _ in range(3):
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.decode()
        ours = max(ours, float(out.split("(")[1].split(" MB/s")[0]))
        start = time.time()
        other.encode_ordinary(text)
        theirs = max(theirs, len(text.encode()) / 1e6 / (time.time() - start))
    print(f"\none core, tinyshakespeare: ./tokenize {ours:.1f} MB/s (file to file), tiktoken {theirs:.1f} MB/s: "
          f"{ours / theirs:.2f} x")
    assert ours > theirs
