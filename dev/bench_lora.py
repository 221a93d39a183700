#!/usr/bin/env python3
"""bench_lora.py -- measures --lora and --documents of ./train_llama3cu on one GPU and writes a page of results.

    make train_llama3cu tokenize && python dev/bench_lora.py [--parts speed memory ...] [--out FILE.md]

speed      tokens/s of LoRA (rank 16, on all matrices) at 1B T=2048, beside PyTorch twice: transformers' Llama with peft's
           adapters, and train_llama3.py --lora, whose adapters stand beside fused matrices                  (200 s)
memory     3 steps of LoRA at T=4096 within a limit: 8B 22 GiB, 1B 7 GiB, all that is taken of the card       (70 s)
documents  training the whole model at 1B T=8192: rows across documents beside rows of documents of 500      (100 s)
chat       200 conversations on a 1B of random weights with tinytales' tokenizer: the loss on answers, the merged
           export, and what it generates                                                                      (50 s)
8B         `speed` at 8B T=4096 B=1                                                                          (200 s)

The seconds are estimates for an H200. A part whose estimate goes beyond --budget is skipped by name; each is stopped after
twice its estimate. The page is written again after each part. Base models are folders of random weights that this script
writes to --work (1B 2.3 GiB, 8B 15 GiB); --device cpu tries everything with ./train_llama3 at tiny shapes.

Both peers compile blocks one by one, compute the head in chunks, keep every activation, and take the fastest of PyTorch's
attention backends at the shape (train_llama3.py's Engine); adapters, gradients and AdamW's moments (fused) are bf16. The batch
is the largest of --batch that all sides hold. The FLOPs count no gradients of frozen weights: 4·(matmul weights) + 6·(adapters)
+ 6·L·H·hd·T a token. Memory is that of the whole GPU by nvidia-smi; `mode` says what the plan or PyTorch's allocator counts.

On a card, after the tests, with what they built (PyTorch, transformers, peft and numpy are needed, but no network):

    sh dev/test/test_gpu.sh all                                                                        (up to 40 minutes)
    python dev/bench_lora.py --trainer build/gpu/bf16/train_llama3cu --out lora.md                           (9 minutes)
    make build/bench_attention_cu && python dev/bench_attention.py --out attention.md                        (3 minutes)
    python dev/bench_gpu.py --trainer build/gpu/bf16/train_llama3cu --trainer-before OLD/train_llama3cu \\
        --shapes 126M 1B-2k --forward-steps 0 --out plain.md                                                 (2 minutes)

The third shows attention alone with documents, the last the plain step of two builds. OLD is a folder with an older commit in
which `make train_llama3cu GPU_ARCH=90 MARCH=` was run, on any machine; the card's needs no repository.
"""
import argparse
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_cpu import write_token_file, write_tokens  # noqa: E402
from bench_gpu import ROOT, Monitor, Side, bytes_per_parameter, page_head, ref, table  # noqa: E402

torch = ref.torch
RANK = 16
ENDLESS = ["--steps", "1000000", "--lr", "1e-4", "--schedule", "constant", "--sample-tokens", "0"]


# ---------------------------------------------------------------------------------------------------------------------
# the peer: transformers' Llama with peft's adapters, in the step of train_llama3.py


def fast_attention(module, query, key, value, attention_mask, **_):
    """Attention for transformers, by the backend that ref.pick_sdpa() selected."""
    return ref.attention(query, key, value).transpose(1, 2), None


class Peft(torch.nn.Module):
    """A model of peft in the form that ref.Engine trains: a trunk of blocks, which may be compiled, and a head."""

    def __init__(self, model, compiled):
        super().__init__()
        base = model.get_base_model()
        self.model, self.head, self.blocks = model, base.lm_head, base.model.layers
        self.embedding, self.rope = base.model.embed_tokens, base.model.rotary_emb
        self.norm = torch.compile(base.model.norm) if compiled else base.model.norm

    def trunk(self, x, dtype=None, blocks=None, starts=None):
        h = self.embedding(x)
        tables = self.rope(h, position_ids=torch.arange(x.shape[1], device=x.device)[None])
        for block in blocks or self.blocks:
            h = block(h, position_embeddings=tables)
        return self.norm(h)

    def forward(self, x, y, starts=None):
        h = self.trunk(x)
        return ref.cross_entropy_sum(h.view(-1, h.shape[-1]), self.head.weight, y.view(-1)) / y.numel()


def load_peft(a, c, device, dtype):
    try:
        import peft
        import transformers
    except ImportError as e:
        ref.die(f"the peer needs the packages peft and transformers: {e}")
    transformers.AttentionInterface.register("fast", fast_attention)
    base = transformers.LlamaForCausalLM.from_pretrained(a.model, dtype=dtype, attn_implementation="fast").to(device)
    lora = peft.LoraConfig(r=a.lora, lora_alpha=a.lora_alpha or 2 * a.lora, target_modules=ref.LORA_ON[a.lora_on],
                           lora_dropout=0.0, bias="none", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora, autocast_adapter_dtype=False).train()
    trained, wanted = sum(p.numel() for p in ref.trained_parameters(model)), adapter_parameters(c, a.lora)
    if trained != wanted:
        ref.die(f"peft trains {trained:,} parameters, wanted {wanted:,}")
    return Peft(model, a.compile)


def peer(argv):
    """Trains peft's adapters by the flags of train_llama3.py. Writes a line a step to OUT/log.jsonl: loss, ms, memory."""
    a = ref.parse_arguments(argv)
    device, dtype = torch.device(a.device or "cuda"), torch.float32 if a.dtype == "fp32" else torch.bfloat16
    c = ref.read_config(a.model)
    sdpa = ref.pick_sdpa(c, a.batch, a.seq, device, dtype)
    engine = ref.Engine(load_peft(a, c, device, dtype), a, device)
    loader = ref.DataLoader(a.train, a.batch, a.seq, a.seed, True)
    os.makedirs(a.out, exist_ok=True)
    print(f"attention: {sdpa}", flush=True)

    def report(step, loss, begin, end):
        ms = ref.milliseconds(begin, end)
        print(json.dumps(dict(event="step", step=step, loss=loss.item(), ms=ms, memory=ref.peak_memory(device))), file=log,
              flush=True)

    with open(os.path.join(a.out, "log.jsonl"), "w", encoding="utf-8") as log:
        pending = None
        for step in range(1, a.steps + 1):
            begin = ref.mark(device)
            x, y = loader.next(device, c.vocab_size)
            loss = engine.micro_step(x, y, y.numel(), 1.0)
            engine.update(a.lr)
            end = ref.mark(device)
            if pending:  # read one step late, so that the GPU never waits for the host
                report(*pending)
            pending = step, loss, begin, end
        report(*pending)


# ---------------------------------------------------------------------------------------------------------------------
# folders of random weights, and token files


def adapter_parameters(c, rank):
    """Returns the number of parameters of adapters on every matrix of a block."""
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    widths = 2 * (c.hidden_size + q) + 2 * (c.hidden_size + kv) + 3 * (c.hidden_size + c.intermediate_size)
    return c.num_hidden_layers * rank * widths


def lora_flops(c, rank, seq):
    """Returns the FLOPs of a token: products by frozen weights forward and to their input, those of adapters also to them."""
    frozen = c.matmul_parameters()
    return c.flops_per_token(seq) - 2 * frozen + 6 * adapter_parameters(c, rank)


def write_model(c, folder):
    """Writes a model folder in bf16 whose weights spread as those of a new model. They repeat a block of random numbers, whose
    length is prime: to draw 8 billion takes minutes."""
    block = torch.randn(33554393 if c.hidden_size >= 1024 else 65521, generator=torch.Generator().manual_seed(1))
    residual = 1 / math.sqrt(2 * c.num_hidden_layers)
    drawn = {scale: (0.02 * scale * block).bfloat16().view(torch.int16).numpy() for scale in (1, residual)}
    with torch.device("meta"):
        shapes = [(name, tuple(w.shape)) for name, w in ref.hf_tensors(ref.Llama(c))]
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes:
        end = at + 2 * math.prod(shape)
        header[name] = dict(dtype="BF16", shape=shape, data_offsets=[at, end])
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    os.makedirs(folder, exist_ok=True)
    ref.write_config(c, folder, "bfloat16")
    place = 0
    with open(os.path.join(folder, "model.safetensors"), "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes:
            numbers = drawn[residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1]
            left = math.prod(shape)
            if len(shape) == 1:
                f.write(np.full(left, 0x3f80, dtype="<u2").tobytes())  # ones
                continue
            while left:
                part = numbers[place:place + left]
                f.write(part.data)
                left, place = left - len(part), (place + len(part)) % len(numbers)


def write_documents(path, count, vocab, bos, shortest, longest):
    """Writes a token file of documents of random tokens, each of `shortest` to `longest` tokens, BOS included."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab - 1, count)
    tokens += tokens >= bos  # none of them is BOS
    lengths = rng.integers(shortest, longest + 1, count // shortest + 1)
    first = np.concatenate(([0], np.cumsum(lengths)))
    tokens[first[first < count]] = bos
    write_token_file(path, tokens, vocab)


class Bench:
    """What the parts share: arguments, the monitor, a folder to work in and the models in it."""

    def __init__(self, a, monitor, work):
        self.a, self.monitor, self.work = a, monitor, work
        self.vocab = 500 if a.device == "cpu" else 128256

    def path(self, name):
        return os.path.join(self.work, name)

    def config(self, model):
        c = ref.preset(model, self.vocab)
        return c if c.bos_token_id is not None else ref.replace(c, bos_token_id=1, eos_token_id=[2])

    def model(self, name):
        """Returns the folder of a preset with random weights, which is written when it is first asked for."""
        folder = self.path(name)
        if not os.path.exists(os.path.join(folder, "model.safetensors")):
            begin = time.monotonic()
            write_model(self.config(name), folder + ".tmp")
            os.rename(folder + ".tmp", folder)
            print(f"wrote {name}, random weights, in {time.monotonic() - begin:.1f} s", flush=True)
        return folder

    def tokens(self, batch, seq):
        path = self.path("tokens.bin")
        write_tokens(path, max(50 * batch * (seq + 1), 100_000), self.vocab)
        return path

    def gpu_flags(self, *flags):
        return [] if self.a.device == "cpu" else list(flags)

    def turn(self, side):
        side.turn(self.work, self.monitor, self.a.seconds, self.a.warm)


class Watched(Side):
    """A side that also keeps what its last turn printed and the events that it logged."""

    def __init__(self, *args):
        super().__init__(*args)
        self.screen, self.steps = "", []

    def run(self, work, monitor, seconds, warm):
        result = super().run(work, monitor, seconds, warm)
        with open(os.path.join(work, "screen"), encoding="utf-8") as f:
            self.screen = f.read()
        path = os.path.join(work, "out", "log.jsonl")
        if os.path.exists(path):
            with open(path, encoding="utf-8") as f:
                events = [json.loads(line) for line in f if line.endswith("\n")]
            self.steps = [e for e in events if e["event"] == "step"] or self.steps
        return result

    def found(self, pattern, form="{}"):
        """Returns `form` with what the pattern's group finds on the screen at last, or nothing."""
        groups = re.findall(pattern, self.screen, re.M)
        return form.format(groups[-1]) if groups else ""

    def describe(self):
        """Adds to the note what only a run tells: memory as the program counts it, attention's backend, the first loss."""
        peaks = [e["memory"] for e in self.steps if "memory" in e]
        self.note += (f", allocated at most {max(peaks) / 2**30:.1f} GiB" if peaks else
                      self.found(r"^memory +need +(\S+ \S+)", ", plan {}") or
                      self.found(r"% +([\d.]+)G +\d", ", allocated at most {} GiB"))
        self.note += self.found(r"attention: (.+)$", ", attention {}")
        self.note += f", first loss {self.steps[0]['loss']:.3f}" if self.steps else ""


# ---------------------------------------------------------------------------------------------------------------------
# the parts: each returns the lines of the page


def is_short_of_memory(side):
    return side.error is not None and re.search(r"out of memory| short\)", side.error) is not None


def contestants(b, folder, batch, seq):
    flags = ["--model", folder, "--train", b.tokens(batch, seq), "--batch", str(batch), "--seq", str(seq), *ENDLESS,
             "--lora", str(RANK), "--lora-on", "all"]
    torch_flags = [*flags, "--compile", "--dtype", b.a.torch_dtype, "--device", b.a.device]
    frozen, each = (4, 16) if b.a.torch_dtype == "fp32" else (2, 8)
    ours = bytes_per_parameter(["--grad-dtype", "fp32"], b.a.precision)
    notes = f"{b.a.torch_dtype}, blocks compiled"
    return [Watched("ours", [b.a.trainer, *flags], f"{4 if b.a.precision == 'FP32' else 2}, adapters {ours}", b.a.precision),
            Watched("transformers + peft", [sys.executable, os.path.abspath(__file__), "--peer", *torch_flags],
                    f"{frozen}, adapters {each}", notes),
            Watched("train_llama3.py --lora", [sys.executable, os.path.join(ROOT, "train_llama3.py"), *torch_flags],
                    f"{frozen}, adapters {each}", notes)]


def speed(b, model, batches, seq):
    folder, c = b.model(model), b.config(model)
    for batch in batches:
        sides = contestants(b, folder, batch, seq)
        print(f"{model}, LoRA {RANK}, B={batch}, T={seq}", flush=True)
        for side in sides:
            b.turn(side)
            if is_short_of_memory(side) and batch != batches[-1]:
                break
        if not any(map(is_short_of_memory, sides)):
            break
    for side in reversed(sides):
        b.turn(side)
        side.describe()
    lines, rates = table(sides, batch * seq, lora_flops(c, RANK, seq), b.a.gpu)
    others = {name: rate for name, rate in rates.items() if name != "ours"}
    page = [f"### LoRA: {model}, rank {RANK} on all matrices ({adapter_parameters(c, RANK):,} parameters), T={seq}, B={batch}",
            "", *lines, ""]
    if "ours" in rates and others:
        fastest = max(others, key=others.get)
        page += [f"**Ratio {rates['ours'] / others[fastest]:.3f}** (ours ÷ {fastest}, the fastest other; steps counted: "
                 + ", ".join(f"{side.name} {len(side.ms)}" for side in sides) + ")", ""]
    return page


def speed_1b(b):
    return speed(b, *(("d3", [8, 4], 64) if b.a.device == "cpu" else ("llama3.2-1b", b.a.batch, 2048)))


def speed_8b(b):
    return speed(b, *(("d4", [1], 128) if b.a.device == "cpu" else ("llama3.1-8b", [1], 4096)))


def call(command, text=None):
    """Runs a command to its end, with `text` as its input. Returns what it printed; ends this part if it fails."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                          check=False, input=text)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} ... ended with exit code {done.returncode}: {done.stdout[-400:]}")
    return done.stdout


def memory(b):
    """Trains three steps within each limit."""
    page = ["### LoRA: memory at T=4096, B=1, three steps", "",
            "| | limit | the plan | at most, by the program | of the card, by nvidia-smi | ms a step |",
            "|---|---|---|---|---|---|"]
    goals = [("d4", 64, 22), ("d3", 64, 7)] if b.a.device == "cpu" else [("llama3.1-8b", 4096, 22), ("llama3.2-1b", 4096, 7)]
    for model, seq, limit in goals:
        out = b.path("memory")
        command = [b.a.trainer, "--model", b.model(model), "--train", b.tokens(1, seq), "--batch", "1", "--seq", str(seq),
                   "--steps", "3", "--lr", "1e-4", "--sample-tokens", "0", "--lora", str(RANK), "--out", out,
                   *b.gpu_flags("--recompute", "block", "--max-memory", f"{limit}G")]
        time.sleep(1)  # what the card holds before
        begin = time.monotonic()
        before = [s[2] for s in b.monitor.between(begin - 0.8, begin)]
        screen = call(command)
        taken = [s[2] - min(before) for s in b.monitor.between(begin, time.monotonic())] if before else []
        shutil.rmtree(out)
        of_card = f"{max(taken) / 1024:.2f} GiB" if taken else "-"
        plan = re.search(r"^memory +need +(\S+ \S+)", screen, re.M)
        used = re.search(r"peak memory (\S+ \S+)", screen)
        ms = re.search(r"([\d.]+) ms a step", screen)
        verdict = "" if not taken else ", within" if max(taken) <= limit * 1024 else ", **above**"
        page.append(f"| {model} | {limit} GiB | {plan.group(1) if plan else '-'} | {used.group(1) if used else '-'} | "
                    f"{of_card}{verdict} | {ms.group(1) if ms else '-'} |")
        print(page[-1], flush=True)
    return [*page, ""]


def documents(b):
    """Times whole training, not LoRA: there attention's share of a step is that of a user who trains long rows."""
    model, batch, seq, length = ("d3", 2, 128, 16) if b.a.device == "cpu" else ("llama3.2-1b", 4, 8192, 500)
    folder, c, count = b.model(model), b.config(model), 50 * batch * (seq + 1)
    short, whole = b.path("short.bin"), b.path("whole.bin")
    write_documents(short, count, c.vocab_size, c.bos_token_id, length * 4 // 5, length * 6 // 5)
    write_documents(whole, count, c.vocab_size, c.bos_token_id, seq, seq)
    flags = ["--model", folder, "--batch", str(batch), "--seq", str(seq), *ENDLESS]

    def side(name, tokens, how):
        return Watched(name, [b.a.trainer, *flags, "--train", tokens, "--documents", how], "", "")
    print(f"documents: {model}, B={batch}, T={seq}", flush=True)
    sides = [side("across documents", short, "cross"), side(f"documents of {length}, each sees itself", short, "mask"),
             side("one document a row", whole, "mask")]
    for contestant in (*sides, *reversed(sides)):
        b.turn(contestant)
    about = (f"Documents have {length * 4 // 5} to {length * 6 // 5} tokens. `one document a row` does the work of "
             "`across documents` with the attention kernels for documents. tokens/s do not count padding.")
    page = [f"### Documents: {model}, the whole model is trained, T={seq}, B={batch}", "", about, "",
            "| rows | ms a step (min … max) | tokens/s | padding | W |", "|---|---|---|---|---|"]
    medians = []
    for s in sides:
        if s.error:
            page.append(f"| {s.name} | failed: {s.error.replace('|', '/')} | | | |")
            continue
        padding, ms = float(s.found(r"([\d.]+) % padding") or 0), statistics.median(s.ms)
        medians.append(ms)
        watts = f"{s.mean(1):.0f}" if s.samples else "-"
        page.append(f"| {s.name} | {ms:.2f} ({min(s.ms):.2f} … {max(s.ms):.2f}) | "
                    f"{batch * seq * (1 - padding / 100) / ms * 1e3:,.0f} | {padding} % | {watts} |")
    if len(medians) == 3:
        counts = ", ".join(str(len(s.ms)) for s in sides)
        page += ["", f"**Ratio {medians[0] / medians[1]:.3f}** (step across documents ÷ step of documents), "
                 f"{medians[2] / medians[1]:.3f} with the same kernels for both; steps counted: {counts}"]
    return [*page, ""]


def chat_base(b, model, tales):
    """Makes the folder of a base of random weights with the tokenizer of `tales`."""
    folder = b.path("chat_base")
    with open(os.path.join(tales, "tokenizer.json"), encoding="utf-8") as f:
        special = {t["content"]: t["id"] for t in json.load(f)["added_tokens"]}
    c = ref.replace(ref.preset(model, 2048), bos_token_id=special["<|begin_of_text|>"],
                    eos_token_id=[special["<|end_of_text|>"]])
    if c.vocab_size == b.vocab:  # the same weights as elsewhere
        os.makedirs(folder, exist_ok=True)
        os.link(os.path.join(b.model(model), "model.safetensors"), os.path.join(folder, "model.safetensors"))
        ref.write_config(c, folder, "bfloat16")
    else:
        write_model(c, folder)
    shutil.copy(os.path.join(tales, "tokenizer.json"), folder)
    return folder


def score(b, model, questions):
    """Returns the share of questions that a model answers right."""
    return float(re.search(r"\bacc ([\d.]+)", call([b.a.trainer, "--model", model, "--eval", "--tasks", questions]))[1])


def answers_of_libraries(b, base, adapters, merged, prompt):
    """Returns what transformers says with the merged model, and peft with the adapters, or why they do not."""
    try:
        import peft
        import transformers
    except ImportError as e:
        return [f"transformers, peft: {e}"]
    dtype = torch.float32 if b.a.torch_dtype == "fp32" else torch.bfloat16
    tokenizer, said = transformers.AutoTokenizer.from_pretrained(merged), []
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    ids = torch.cat([torch.tensor([[tokenizer.bos_token_id]]), ids], 1).to(b.a.device)
    kinds = {"transformers, merged": lambda m: m.from_pretrained(merged, dtype=dtype),
             "peft, adapters": lambda m: peft.PeftModel.from_pretrained(m.from_pretrained(base, dtype=dtype), adapters)}
    for name, load in kinds.items():
        model = load(transformers.AutoModelForCausalLM).to(b.a.device).eval()
        with torch.no_grad():
            out = model.generate(input_ids=ids, max_new_tokens=24, do_sample=False)
        said.append(f"{name}: {tokenizer.decode(out[0, ids.shape[1]:]).strip()}")
    return said


def chat(b):
    """Tunes a base of random weights, so that the loss on answers can only fall by training, then merges and generates. The few
    conversations are seen often enough to be learned by heart: this shows that tuning works, not that it teaches."""
    model, batch, steps, rate = ("d3", 4, 40, "5e-3") if b.a.device == "cpu" else ("llama3.2-1b", 16, 200, "1e-3")
    tales, data, out, merged = os.path.join(ROOT, "dev", "data", "tinytales"), *map(b.path, ("chat", "tuned", "merged"))
    folder = chat_base(b, model, tales)
    call([sys.executable, "dev/data/conversations.py", "-o", data])
    for part in ("train", "val"):
        call([b.a.tokenize, "--tokenizer", tales, "--chat", "-o", f"{data}/{part}.bin", f"{data}/{part}.jsonl"])
    screen = call([b.a.trainer, "--model", folder, "--lora", "8", "--train", f"{data}/train.bin", "--val", f"{data}/val.bin",
                   "--batch", str(batch), "--seq", "256", "--steps", str(steps), "--lr", rate, "--warmup", "10",
                   "--weight-decay", "0", "--val-every", str(steps // 4), "--sample-tokens", "0", "--out", out])
    scores = [score(b, path, f"{data}/questions.jsonl") for path in (folder, out)]
    screen += call([b.a.trainer, "--model", out, "--export", merged])
    kept = [line.replace(b.work + os.sep, "") for line in screen.splitlines()
            if re.match(r"lora |rows |validation |done |warning|exported", line)]
    with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as f:
        events = [json.loads(line) for line in f]
    losses, held_out = ([e["loss"] for e in events if e["event"] == kind] for kind in ("step", "val"))
    rows = int(re.search(r"^rows .*?: ([\d,]+) rows", screen, re.MULTILINE)[1].replace(",", ""))
    with open(f"{data}/val.jsonl", encoding="utf-8") as f:
        asked, answer, *_ = [m["content"] for m in json.loads(f.readline())["messages"]]
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    prompt = head.format("user") + asked + "<|eot_id|>" + head.format("assistant")
    answers = [call([b.a.trainer, "--model", path, "--chat", "--tokens", "24", "--temperature", "0"], asked + "\n\n")
               for path in (out, merged)]
    adapters = os.path.join(out, sorted(name for name in os.listdir(out) if name.startswith("step_"))[-1])
    libraries = answers_of_libraries(b, folder, adapters, merged, prompt)
    for path in (out, merged, folder):
        shutil.rmtree(path)
    falls = "it falls" if losses[-1] < losses[0] else "**it does not fall**"
    text = (f"The loss on answers is {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last: {falls}. It is that of "
            f"conversations which were seen {steps * batch / rows:.0f} times each; on others, by validation, it ends at "
            f"{held_out[-1]:.4f}. Of questions.jsonl the base answers {scores[0]:.4f} right, the tuned model {scores[1]:.4f}; "
            f"guessing is 0.25. A base of random weights knows no language, so an answer to what was not trained need not be "
            f"right. What the adapters and the merged model say to such a question, `{asked}`, where `{answer}` was wanted:")
    said = [f"{name}: {answer.strip()}" for name, answer in zip(("adapters", "merged"), answers)] + libraries
    return [f"### Conversations: 200, {model} of random weights, LoRA 8, B={batch}, T=256, {steps} steps", "", "```", *kept,
            "```", "", text, "", "```", *said, "```", ""]


PARTS = {"speed": (speed_1b, 200), "memory": (memory, 70), "documents": (documents, 100), "chat": (chat, 50),
         "8B": (speed_8b, 200)}


def late(*_):
    raise TimeoutError("ran out of its time")


def run_part(b, name, left):
    """Runs a part for at most twice its estimate, and the `left` seconds. Returns its lines, or what went wrong."""
    work, estimate = PARTS[name]
    signal.alarm(0 if b.a.device == "cpu" else int(min(2 * estimate, left)))
    begin = time.monotonic()
    try:
        lines = work(b)
    except (Exception, SystemExit) as e:  # the other parts still run
        lines = [f"### {name}", "", f"failed: {type(e).__name__}: {e}", ""]
    finally:
        signal.alarm(0)
    print("\n".join(lines) + f"\npart {name}: {time.monotonic() - begin:.0f} s\n", flush=True)
    return lines


def main():
    if sys.argv[1:2] == ["--peer"]:
        return peer(sys.argv[2:])
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    p.add_argument("--trainer", help="the trainer (./train_llama3cu; with --device cpu ./train_llama3)")
    p.add_argument("--tokenize", default=os.path.join(ROOT, "tokenize"), help="the tokenizer's program (./tokenize)")
    p.add_argument("--precision", help="precision of --trainer (BF16; with --device cpu FP32)")
    p.add_argument("--torch-dtype", choices=("bf16", "fp32"), help="type of the peers (bf16; with --device cpu fp32)")
    p.add_argument("--batch", type=int, nargs="+", default=[32, 16], help="batches to try at 1B, the largest first (32 16)")
    p.add_argument("--seconds", type=float, default=4.0, help="seconds of counted steps per turn (4)")
    p.add_argument("--warm", type=int, default=6, help="uncounted first steps of each turn (6)")
    p.add_argument("--budget", type=float, default=530, help="seconds for all parts together (530)")
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cuda, or cpu to try this script")
    p.add_argument("--work", help="folder for models and runs, 21 GiB (a new one in the temporary folder)")
    p.add_argument("--out", help="file to write (dev/results/GPU-lora.md)")
    a = p.parse_args()
    cpu = a.device == "cpu"
    a.trainer = os.path.abspath(a.trainer or os.path.join(ROOT, "train_llama3" if cpu else "train_llama3cu"))
    a.tokenize = os.path.abspath(a.tokenize)
    a.precision, a.torch_dtype = a.precision or ("FP32" if cpu else "BF16"), a.torch_dtype or ("fp32" if cpu else "bf16")
    if not cpu and not torch.cuda.is_available():
        sys.exit("error: PyTorch finds no GPU\n  hint: --device cpu tries this script")
    for program in (a.trainer, *([a.tokenize] if "chat" in a.parts else [])):
        if not os.path.exists(program):
            sys.exit(f"error: {program}: not found\n  hint: make {os.path.basename(program)}")
    a.gpu = "CPU" if cpu else torch.cuda.get_device_name()
    path = a.out or os.path.join(ROOT, "dev", "results", re.sub(r"[^a-z0-9]+", "-", a.gpu.lower()).strip("-") + "-lora.md")
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    if a.work:
        os.makedirs(a.work, exist_ok=True)
    page = page_head(a.gpu, a.device, "random tokens and weights, optimizer step included, turns A B B A")
    begin, monitor, work = time.monotonic(), Monitor(), tempfile.mkdtemp(dir=a.work)
    signal.signal(signal.SIGALRM, late)
    try:
        b = Bench(a, monitor, work)
        for name in a.parts:
            left = a.budget - (time.monotonic() - begin)
            if cpu or PARTS[name][1] <= left:
                page += run_part(b, name, left)
            else:
                page += [f"### {name}", "", f"skipped: {left:.0f} s are left", ""]
            with open(path, "w", encoding="utf-8") as f:
                f.write("\n".join(page))
    finally:
        monitor.close()
        shutil.rmtree(work, ignore_errors=True)
    print(f"wrote {path} in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
