# llama3.c -- `make help` lists the targets. Detected settings can be overridden: make CC=clang MARCH= OPENMP=0 ...

CC ?= cc
PYTHON ?= python3
MARCH ?= -march=native
OPENMP ?= $(shell echo 'int main(void){return 0;}' | $(CC) -fopenmp -x c - -o /dev/null 2>/dev/null && echo 1 || echo 0)
# libedit edits the lines of --chat; LIBEDIT=0 builds without it
LIBEDIT ?= $(shell printf '\043include <histedit.h>\nint main(void){return 0;}' | $(CC) -x c - -ledit -o /dev/null 2>/dev/null && \
             echo 1 || echo 0)
# libmicrohttpd is for ./serve
MICROHTTPD ?= $(shell printf '\043include <microhttpd.h>\nint main(void){return 0;}' | $(CC) -x c - -lmicrohttpd -o /dev/null 2>/dev/null && \
                echo 1 || echo 0)
WERROR ?= 0
# with these three the layers' loops are as fast as with -O3, which takes longer to build a program; clang has no such flags
OPT ?= $(if $(findstring clang,$(shell $(CC) --version)),-O3,-O2 -ftree-vectorize -fvect-cost-model=dynamic -fipa-cp-clone)
CFLAGS_EXTRA ?=

WARNINGS = -Wall -Wextra $(if $(filter 1,$(OPENMP)),,-Wno-unknown-pragmas) $(if $(filter 1,$(WERROR)),-Werror)
CFLAGS = -std=c11 -ffp-contract=fast -fno-math-errno $(OPT) $(MARCH) $(WARNINGS) $(if $(filter 1,$(OPENMP)),-fopenmp) \
         $(CFLAGS_EXTRA)
LDLIBS = -lm -lpthread
EDIT_FLAGS = $(if $(filter 1,$(LIBEDIT)),-DLLMC_LIBEDIT)
EDIT_LIBS = $(if $(filter 1,$(LIBEDIT)),-ledit)
HEADERS = $(wildcard llmc/*.h llmc/*/*.h llmc/*/*/*.h llmc/*/*.def llmc/*/*/*.def dev/data/*.h dev/test/*.h)
UNIT_TESTS = $(patsubst dev/test/unit/%.c,build/%,$(wildcard dev/test/unit/test_*.c))
# unit tests that compute for at most a second: to optimize them would take longer than they run. test_generate mostly waits
QUICK_TESTS := test_generate $(shell awk '/^build\/test_/ && !/llama3/ && $$3 < 2 { sub("build/", ""); print $$1 }' dev/test/counts.txt)
TALES = dev/data/tinytales
# where the programs under build/ are written
vpath %.c dev/data dev/test/unit dev/test/shell dev/test/emulator dev/bench
vpath %.cu dev/test/cuda dev/bench

comma := ,
.PHONY: all help emulated test-emulated test-cards require-nvcc require-microhttpd quickstart test test-full test-programs \
        test-kill test-crash test-no-gpu \
        sanitize sanitize-programs fuzz fuzz-minimize fuzz-coverage format format-check lint clean FORCE
all: train_llama3 tokenize

help:
	@echo "make quickstart [STEPS=N]  build, generate the tinytales data, train a small Llama 3 and print samples"
	@echo "make test                  run every test that this machine can run"
	@echo "make test-full             that, and whatever else can be tested without a GPU: sanitizers, fuzzers, CUDA builds (an hour)"
	@echo "make test-kill [KILLS=50]  kill a run with -9 at random moments and resume it each time"
	@echo "make test-crash            fail, kill and cut the power at each call of a run; feed it damaged files (minutes)"
	@echo "make train_llama3 test_llama3 tokenize             build the CPU programs"
	@echo "make train_llama3cu test_llama3cu [PRECISION=BF16|FP16|FP32] [GPU_ARCH=75|80|90|120|\"75 90 120\"]"
	@echo "make serve                 build ./serve, a page that shows a run and asks its checkpoints (needs libmicrohttpd)"
	@echo "make test-no-gpu           build train_llama3cu and test what it does where no GPU is (minutes)"
	@echo "make emulated test-emulated  build the CUDA programs for a card that the CPU emulates; test them there (minutes)"
	@echo "make -C dev/cuda rmsnorm   build a file of the kernel zoo; also test-emulated, test, bench (dev/cuda/README.md)"
	@echo "make sanitize              run the tests under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make fuzz [SECONDS=20] [INPUTS=N] [JOBS=1]  run each fuzz target for SECONDS or N inputs, 0: its seeds (needs clang)"
	@echo "make fuzz-coverage         show which lines of the readers of input the fuzzers' inputs reach (needs llvm)"
	@echo "make format format-check lint clean"

# --- CPU ---------------------------------------------------------------------------------------------------------------

# no function of a program may take more than 64 KiB of stack: threads may have 128 KiB (musl), and theirs call little else
train_llama3 tokenize build/tinytales: WARNINGS += -Wframe-larger-than=65536
train_llama3: train_llama3.c $(HEADERS)
	$(CC) $(CFLAGS) $(EDIT_FLAGS) -I. $< -o $@ $(LDLIBS) $(EDIT_LIBS)

test_llama3: test_llama3.cu train_llama3.c $(HEADERS)
	$(CC) $(CFLAGS) -I. -x c $< -x none -o $@ $(LDLIBS)

tokenize: dev/data/tokenize.c $(HEADERS)
	$(CC) $(CFLAGS) -I. $< -o $@ $(LDLIBS)

ifneq ($(FULL),1)
$(QUICK_TESTS:%=build/%): OPT = -O0
endif
# another FULL builds them anew
$(QUICK_TESTS:%=build/%): build/quick_flags
build/quick_flags: FORCE | build
	@echo '$(filter 1,$(FULL))' | cmp -s - $@ || echo '$(filter 1,$(FULL))' > $@
build/%: %.c $(HEADERS) | build
	$(CC) $(CFLAGS) -I. $< -o $@ $(LDLIBS)

build:
	@mkdir -p build

# --- a page beside a run ---------------------------------------------------------------------------------------------------
# libmicrohttpd speaks HTTP. The page's policy names its style and its script, each from a line <style> to a line </style>, by
# their SHA-256

page_block = { echo; sed '1,/^<$(1)>$$/d;/^<\/$(1)>$$/,$$d' $<; }
page_sum = 'sha256-$$(env printf "$$($(call page_block,$(1)) | sha256sum | cut -c 1-64 | sed 's/../\\x&/g')" | base64)'
build/serve_page.h: dev/serve/page.html | build
	@{ echo "#define SERVE_STYLE \"$(call page_sum,style)\""; echo "#define SERVE_SCRIPT \"$(call page_sum,script)\""; \
	    echo "static const unsigned char serve_page[] = {"; od -An -v -tx1 $< | sed 's/ \(..\)/0x\1,/g'; echo "};"; } > $@
require-microhttpd:
	@$(if $(filter 1,$(MICROHTTPD)),true,echo "error: libmicrohttpd was not found: install it (Debian: libmicrohttpd-dev)"; exit 1)
serve build/sanitize/serve: dev/serve/serve.c $(wildcard dev/serve/*.h) build/serve_page.h $(HEADERS) | build/sanitize require-microhttpd
	$(CC) $(if $(filter build/%,$@),$(SANITIZE),$(CFLAGS)) -I. $< -o $@ $(LDLIBS) -lmicrohttpd

# --- GPU ---------------------------------------------------------------------------------------------------------------
# GPU_ARCH: the architectures of this machine's GPUs by nvidia-smi; 80 if there is none. A GPU newer than nvcc counts as the
# highest architecture that nvcc knows. Each gets its machine code (90: sm_90a); the highest also its PTX, which newer GPUs
# compile. GPUs older than 75 (T4) are ignored. dev/doc/cards.md says what each card gets.
# NCCL (several GPUs) is opened at run time; nccl.h is in CUDA_HOME, the system's headers or NCCL_HOME/include.
# PTX_ONLY=75 builds only the PTX of that architecture, to test the code for an older GPU on a newer one. COMPILE_ONLY=1 checks
# that the kernels compile: without PTX, and with the host's code unoptimized, building takes half of the time.

CUDA_HOME ?= $(firstword $(wildcard /usr/local/cuda /usr/lib/cuda /opt/cuda))
NVCC ?= $(firstword $(if $(filter file,$(origin CUDA_HOME)),,$(wildcard $(CUDA_HOME)/bin/nvcc)) \
          $(shell command -v nvcc 2>/dev/null) \
          $(wildcard $(CUDA_HOME)/bin/nvcc))
DETECTED_ARCH := $(sort $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d ' \r' | \
                   grep -E '^1?[0-9]\.[0-9]$$' | tr -d .))
USABLE_ARCH := $(filter-out 3% 5% 6% 70 72,$(DETECTED_ARCH))
KNOWN_ARCH := $(if $(and $(USABLE_ARCH),$(NVCC)),$(shell $(NVCC) --list-gpu-code 2>/dev/null | sed -n 's/^sm_\([0-9]*\)$$/\1/p'))
FOUND_ARCH := $(if $(KNOWN_ARCH),$(shell for gpu in $(USABLE_ARCH); do printf '%s\n' $(KNOWN_ARCH) | \
                awk -v gpu=$$gpu '$$1 <= gpu && $$1 > most { most = $$1 } END { print most }'; done))
GPU_ARCH ?= $(or $(FOUND_ARCH),$(USABLE_ARCH),80)
PTX_ONLY ?=
COMPILE_ONLY ?= 0
# in the order of numbers, which `sort` alone does not know: two digits, then three
ARCHS = $(or $(PTX_ONLY),$(strip $(sort $(filter-out 1%,$(GPU_ARCH))) $(sort $(filter 1%,$(GPU_ARCH)))))
OLD_ARCHS = $(filter 75,$(ARCHS))
POSSIBLE_ARCHS := 75 $(foreach tens,8 9 10 11 12 13 14 15 16 17 18 19,$(addprefix $(tens),0 1 2 3 4 5 6 7 8 9))
ifneq ($(filter-out $(POSSIBLE_ARCHS),$(ARCHS)),)
$(error $(if $(PTX_ONLY),PTX_ONLY is $(PTX_ONLY),GPU_ARCH is $(GPU_ARCH)), wanted numbers such as 75, 90 or 120)
endif
PRECISION ?= $(if $(OLD_ARCHS),FP16,BF16)
ifneq ($(filter-out BF16 FP16 FP32,$(PRECISION)),)
$(error PRECISION is $(PRECISION), wanted BF16, FP16 or FP32)
endif
ifneq ($(and $(filter BF16,$(PRECISION)),$(OLD_ARCHS)),)
$(error PRECISION=BF16 needs GPU_ARCH 80 or newer, but GPU_ARCH is $(ARCHS): build with PRECISION=FP16 or FP32)
endif
gencode = -gencode arch=compute_$(1)$(comma)code=$(2)_$(1)
CODE = $(foreach a,$(filter-out 90,$(ARCHS)),$(call gencode,$(a),sm)) $(if $(filter 90,$(ARCHS)),$(call gencode,90a,sm))
PTX = $(call gencode,$(lastword $(ARCHS)),compute)
GENCODE = $(if $(PTX_ONLY),$(PTX),$(CODE) $(if $(filter 1,$(COMPILE_ONLY)),,$(PTX)))
NVCCFLAGS = -std=c++17 $(if $(filter 1,$(COMPILE_ONLY)),,-O3) --threads 0 -DPRECISION_$(PRECISION) $(GENCODE) \
            -Xcompiler "$(if $(filter 1,$(OPENMP)),-fopenmp) $(MARCH)" \
            -Xptxas -warn-spills -diag-suppress 177 $(if $(filter 1,$(WERROR)),-Werror all-warnings) -I. \
            $(if $(NCCL_HOME),-I$(NCCL_HOME)/include) $(NVCCFLAGS_EXTRA)
CUDA_LDLIBS = -lcublas -lcublasLt -ldl -lpthread
CUDA_HEADERS = $(HEADERS) $(wildcard llmc/*.cuh llmc/*/*.cuh llmc/*/*/*.cuh dev/bench/*.cuh dev/cuda/*.cuh dev/test/cuda/*.cuh \
                 dev/test/cuda/*/*.cuh)
# ptxas only warns of spills and serialized wgmma, which ruin a kernel, and the host compiler of a stack frame past 64 KiB,
# which a small stack cannot hold; with WERROR=1 they fail the build
ON_REMARKS = { rm -f $@; echo "error: $@: ptxas spills registers or serializes wgmma, or a stack frame is too large"; exit 1; }
STRICT = $(if $(filter 1,$(WERROR)),> build/$(notdir $@).log 2>&1; status=$$?; cat build/$(notdir $@).log; \
           [ $$status -eq 0 ] || exit $$status; ! grep -qE 'spill|serializ|frame size' build/$(notdir $@).log || $(ON_REMARKS))

# a change of PRECISION or GPU_ARCH triggers a rebuild: this stamp holds the flags of the last build
build/cuda_flags: FORCE | build
	@echo '$(NVCCFLAGS)' | cmp -s - $@ || echo '$(NVCCFLAGS)' > $@

require-nvcc:
	@$(if $(NVCC),command -v $(firstword $(NVCC)) >/dev/null,false) || \
	    { echo "error: $(or $(firstword $(NVCC)),nvcc) was not found: install the CUDA toolkit, or set NVCC=/path/to/nvcc"; exit 1; }

train_llama3cu: train_llama3.cu $(CUDA_HEADERS) build/cuda_flags | require-nvcc
	$(NVCC) $(NVCCFLAGS) $(EDIT_FLAGS) -Xcompiler -Wframe-larger-than=65536 $< -o $@ $(CUDA_LDLIBS) $(EDIT_LIBS) $(STRICT)

build/test_llama3_cpu.o: test_llama3.cu train_llama3.c $(HEADERS) | build
	$(CC) $(CFLAGS) -I. -DTEST_CPU_HALF -x c -c $< -o $@

test_llama3cu: test_llama3.cu train_llama3.cu build/test_llama3_cpu.o $(CUDA_HEADERS) build/cuda_flags | require-nvcc
	$(NVCC) $(NVCCFLAGS) $< build/test_llama3_cpu.o -o $@ $(CUDA_LDLIBS) $(STRICT)

build/trainers_cu: train_llama3.cu test_llama3.cu dev/test/cuda/test_determinism.cu build/test_llama3_cpu.o
build/%_cu: %.cu $(CUDA_HEADERS) build/cuda_flags | build require-nvcc
	$(NVCC) $(NVCCFLAGS) $< $(filter %.o,$^) -o $@ $(CUDA_LDLIBS) $(STRICT)

# --- GPU programs on the CPU, for tests ----------------------------------------------------------------------------------
# EMULATED_ARCH (75, 80 or 90) and PRECISION say for which card, see dev/test/emulator/device.h. make emulated puts them into
# build/emulated/PRECISION_ARCH; it needs g++, x86-64, the CUDA toolkit and nccl.h.

EMULATOR = dev/test/emulator
EMULATED_ARCH ?= 90
# -O2 takes longer than it saves, except in trainers_cu, which runs most, and in the card's own code
EMULATED_OPT ?= -O1
EMULATED = build/emulated/$(PRECISION)_$(EMULATED_ARCH)
EMULATED_SOURCES = $(CUDA_HEADERS) train_llama3.c train_llama3.cu test_llama3.cu $(wildcard dev/test/cuda/*.cu)
EMULATED_INCLUDES = -I$(EMULATOR) $(if $(NCCL_HOME),-I$(NCCL_HOME)/include) -isystem $(CUDA_HOME)/include
EMULATED_FLAGS = -std=c++17 $(EMULATED_OPT) $(MARCH) $(if $(filter 1,$(OPENMP)),-fopenmp) -fno-strict-aliasing -ffp-contract=fast \
                 -fno-math-errno -Wno-psabi -fno-pie -DEMULATED_ARCH=$(EMULATED_ARCH)0 -DPRECISION_$(PRECISION) $(EMULATED_INCLUDES)
EMULATED_CARD = $(addprefix $(EMULATED)/,block.o runtime.o cublaslt.o)
EMULATED_PROGRAMS = train_llama3cu test_llama3cu test_determinism_cu test_kernels_cu test_attention_cu

emulated: $(EMULATED_CARD) $(addprefix $(EMULATED)/,$(EMULATED_PROGRAMS)) build/emulated/libnccl.so.2

# several variants, each by a make of its own
VARIANTS = FP32_90 BF16_90 BF16_80 FP16_75
VARIANTS_BUILT = $(VARIANTS:%=emulated-%)
.PHONY: $(VARIANTS_BUILT)
$(VARIANTS_BUILT): build/emulated/libnccl.so.2 build/test_llama3_cpu.o
$(VARIANTS_BUILT): emulated-%:
	@$(MAKE) -s emulated PRECISION=$(firstword $(subst _, ,$*)) EMULATED_ARCH=$(lastword $(subst _, ,$*)) $(OF_VARIANT)
emulated-BF16_80: OF_VARIANT = EMULATED_PROGRAMS=test_attention_cu
emulated-FP16_75: OF_VARIANT = EMULATED_PROGRAMS="test_kernels_cu test_attention_cu"
test-emulated test-cards: train_llama3 build/random_model $(VARIANTS_BUILT)
	@FULL=$(FULL) dev/test/run.sh $(if $(filter %cards,$@),dev/test/gpu/test_no_gpu.sh) \
	    $(addprefix dev/test/emulator/test_emulated_layers.sh:,kernels passes) \
	    $(addprefix dev/test/emulator/test_emulated_runs.sh:,one two shared)
# test-no-gpu and test-emulated in one queue
test-cards: train_llama3cu

$(EMULATED):
	@mkdir -p $@

build/emulated/sources: $(EMULATED_SOURCES) $(EMULATOR)/launches.sed $(EMULATOR)/ptx.h | $(EMULATED) require-nvcc
	@for f in $(EMULATED_SOURCES); do \
	    mkdir -p $@.tmp/$$(dirname $$f) && sed -z -E -f $(EMULATOR)/launches.sed $$f > $@.tmp/$$f || exit 1; \
	done
	@cp $(EMULATOR)/ptx.h $@.tmp/$(wildcard llmc/*/ptx.cuh) && rm -rf $@ && mv $@.tmp $@

$(EMULATED)/trainers_cu $(EMULATED)/%.o: private EMULATED_OPT = -O2
EMULATED_DEVICE = $(EMULATED)/device.h
$(EMULATED)/trainers_cu: private EMULATED_DEVICE = device.h
$(EMULATED)/%.o: $(EMULATOR)/%.cpp $(wildcard $(EMULATOR)/*.h) llmc/cuda/occupancy.cuh | $(EMULATED) require-nvcc
	$(CXX) $(EMULATED_FLAGS) -I. -Wall -Wextra -c $< -o $@
# device.h and the toolkit's headers are compiled once for the programs of a variant; g++ fails if another -O reads them
$(EMULATED)/device.h.gch: $(EMULATOR)/device.h $(EMULATOR)/runtime.h | $(EMULATED) require-nvcc
	$(CXX) $(EMULATED_FLAGS) -x c++-header $< -o $@
$(EMULATED)/%_cu: build/emulated/sources $(EMULATED_CARD) $(EMULATED)/device.h.gch
	$(CXX) $(EMULATED_FLAGS) -I$< -x c++ -include $(EMULATED_DEVICE) $</dev/test/cuda/$*.cu -x none $(filter %.o,$^) -no-pie -rdynamic -o $@ \
	    -ldl -lpthread
# one program, which each of its names runs
$(EMULATED)/trainers_cu: build/test_llama3_cpu.o
$(addprefix $(EMULATED)/,train_llama3cu test_llama3cu test_determinism_cu): $(EMULATED)/trainers_cu
	ln -f $< $@
build/emulated/libnccl.so.2: $(EMULATOR)/nccl.cpp $(EMULATOR)/runtime.h | $(EMULATED) require-nvcc
	$(CXX) -std=c++17 -O2 -Wall -Wextra -fPIC -shared $(EMULATED_INCLUDES) $< -o $@

# --- the kernel zoo; its targets are those of dev/cuda/Makefile ------------------------------------------------------------

ZOO_FLAGS = -DZOO_ARCHS='"$(ARCHS)"' $(if $(MINE),-DMINE='"$(if $(EMULATED_ZOO),mine.cuh,$(MINE))"')
build/zoo/flags: FORCE
	@mkdir -p build/zoo && { echo "$(ZOO_FLAGS) $(MINE)" | cmp -s - $@ || echo "$(ZOO_FLAGS) $(MINE)" > $@; }
build/zoo/%: dev/cuda/%.cu $(CUDA_HEADERS) $(MINE) build/cuda_flags build/zoo/flags | require-nvcc
	$(NVCC) $(NVCCFLAGS) $(ZOO_FLAGS) $< -o $@ $(CUDA_LDLIBS) $(STRICT)
	@$@ --skips
build/emulated/zoo/%: dev/cuda/% $(EMULATOR)/launches.sed $(MINE) build/zoo/flags
	@mkdir -p $(@D) && sed -z -E -f $(EMULATOR)/launches.sed $< > $@
	@$(if $(MINE),sed -z -E -f $(EMULATOR)/launches.sed $(MINE) > $(@D)/mine.cuh)
$(EMULATED)/zoo/%: EMULATED_ZOO = 1
$(EMULATED)/zoo/%: build/emulated/zoo/%.cu build/emulated/sources $(EMULATED_CARD) $(EMULATED)/device.h.gch
	@mkdir -p $(@D)
	$(CXX) $(EMULATED_FLAGS) $(ZOO_FLAGS) -Ibuild/emulated/sources -Ibuild/emulated/zoo -x c++ -include $(EMULATED)/device.h $< -x none \
	    $(EMULATED_CARD) -no-pie -rdynamic -o $@ -ldl -lpthread

# --- the embedded data set and the first run ---------------------------------------------------------------------------

# a story ends in the token that ends an answer: LoRA can teach a model to chat, but not a token that it has never seen
$(TALES)/tinytales_train.bin: build/tinytales tokenize $(TALES)/tokenizer.json
	./build/tinytales --end "<|eot_id|>" -o $(TALES)/tinytales.jsonl
	./tokenize --tokenizer $(TALES)/tokenizer.json --specials --val-fraction 0.02 -o $(TALES)/tinytales.bin $(TALES)/tinytales.jsonl

# trains on the GPU if there are a GPU and nvcc, else on the CPU; each run has its own output folder
HAS_GPU := $(if $(NVCC),$(USABLE_ARCH))
QUICKSTART_TRAINER = $(if $(HAS_GPU),train_llama3cu,train_llama3)
QUICKSTART_OUT ?= out/quickstart-$(shell date +%Y%m%d-%H%M%S)
QUICKSTART_FLAGS = --model d3 --batch 4 --seq 256 --lr 4e-3 --warmup 50 --final-lr-frac 0.05 --val-every 200 \
                   --sample-every 400 --sample-tokens 250 $(if $(STEPS),--steps $(STEPS),--minutes 3) --out $(QUICKSTART_OUT)

quickstart: $(QUICKSTART_TRAINER) $(TALES)/tinytales_train.bin
	./$(QUICKSTART_TRAINER) $(QUICKSTART_FLAGS)

# --- tests ---------------------------------------------------------------------------------------------------------------

SHELL_TESTS = $(wildcard dev/test/shell/*.sh)
KILLS ?= 50
FULL ?= 0
SECONDS ?= 20
INPUTS ?=
JOBS ?= 1
TARGETS ?=
# building takes longer than a few seconds of fuzzing
FUZZ_OPT = $(if $(filter 0 1 2 3 4 5,$(SECONDS)),-O0,-O1)

# a portable build with the plain loops: no OpenMP, only the architecture's baseline vector instructions
build/test_llama3_plain: test_llama3.cu train_llama3.c $(HEADERS) | build
	$(CC) $(filter-out -fopenmp $(MARCH),$(CFLAGS)) -Wno-unknown-pragmas -DLLMC_PLAIN -I. -x c $< -x none -o $@ $(LDLIBS)

# tests the vector path of the matrix products on CPUs that would use the matrix unit (AMX). On others these are the programs
# without the suffix once more, so FULL=1 alone runs them there
HAS_AMX = $(shell $(CC) $(MARCH) -dM -E -x c /dev/null 2>/dev/null | grep -q 'AMX_*BF16' && echo 1 || echo 0)
NO_AMX := $(if $(filter 1,$(FULL) $(HAS_AMX)),build/test_llama3_no_amx build/test_layers_no_amx)
build/%_no_amx: %.c $(HEADERS) | build
	$(CC) $(CFLAGS) -DLLMC_NO_AMX -I. $< -o $@ $(LDLIBS)
build/test_llama3_no_amx: test_llama3.cu train_llama3.c $(HEADERS) | build
	$(CC) $(CFLAGS) -DLLMC_NO_AMX -I. -x c $< -x none -o $@ $(LDLIBS)

$(foreach p,build build/sanitize,$(p)/ranks_trainer $(p)/test_parity $(p)/test_documents): test_llama3.cu train_llama3.c
CPU_PARITY = ./test_llama3 build/test_llama3_plain
test-programs: train_llama3 tokenize $(if $(filter 1,$(MICROHTTPD)),serve) $(CPU_PARITY:./%=%) $(UNIT_TESTS) $(NO_AMX) build/ranks_trainer

test: test-programs
	@$(if $(NO_AMX),true,echo "skip test_llama3_no_amx, test_layers_no_amx: here they equal test_llama3, test_layers; FULL=1 runs them")
	@CC="$(CC)" PYTHON="$(PYTHON)" dev/test/run.sh $(CPU_PARITY) $(UNIT_TESTS) $(NO_AMX) $(SHELL_TESTS) \
	    dev/test/faults/test_faults.sh dev/test/crash/test_crash.sh dev/test/gpu/test_gpu.sh $(wildcard dev/test/python/test_*.py)

# whatever can be tested without a GPU: CI's stages, with more architectures, fuzzing and programs with sanitizers
test-full:
	.ci/run full

test-kill: train_llama3 tokenize
	dev/test/shell/kill_resume.sh $(KILLS)

test-crash: train_llama3 tokenize
	dev/test/crash/test_crash.sh full

test-no-gpu: train_llama3cu train_llama3
	@dev/test/run.sh dev/test/gpu/test_no_gpu.sh

# the same programs and tests under AddressSanitizer and UndefinedBehaviorSanitizer; data loader, mix and team under ThreadSanitizer
SANITIZE = -std=c11 $(if $(filter $(QUICK_TESTS),$(notdir $@)),-O0,-O1) -g1 -fsanitize=address,undefined \
           -fno-sanitize-recover=all -fno-omit-frame-pointer \
           $(if $(filter 1,$(OPENMP)),-fopenmp,-Wno-unknown-pragmas) -I.
SERVES = $(filter 11,$(FULL)$(MICROHTTPD))
SANITIZED = $(addprefix build/sanitize/,train_llama3 tokenize test_llama3 $(if $(filter 1,$(FULL)),ranks_trainer) $(SERVES:11=serve) \
              $(notdir $(UNIT_TESTS)))
build/sanitize:
	@mkdir -p $@
build/sanitize/train_llama3: train_llama3.c $(HEADERS) | build/sanitize
	$(CC) $(SANITIZE) $(EDIT_FLAGS) $< -o $@ $(LDLIBS) $(EDIT_LIBS)
build/sanitize/test_llama3: test_llama3.cu train_llama3.c $(HEADERS) | build/sanitize
	$(CC) $(SANITIZE) -x c $< -x none -o $@ $(LDLIBS)
build/sanitize/%: %.c $(HEADERS) | build/sanitize
	$(CC) $(SANITIZE) $< -o $@ $(LDLIBS)
build/sanitize/threads_%: test_%.c $(HEADERS) | build/sanitize
	$(CC) -std=c11 -O1 -g1 -fsanitize=thread -Wno-unknown-pragmas -I. $< -o $@ $(LDLIBS)

THREADED = $(addprefix build/sanitize/threads_,dataloader mix team)
# FULL=1: also tests of little that the others do not run under the sanitizers
FULL_SANITIZED = $(addprefix dev/test/shell/test_,loop.sh scripts.sh launch.sh contact.sh resume.sh)
NOT_SANITIZED = %test_several_ranks.sh %test_docs.sh $(if $(filter 1,$(FULL)),,$(FULL_SANITIZED))
sanitize-programs: $(SANITIZED) $(THREADED)
sanitize: sanitize-programs
	@$(if $(filter 1,$(FULL)),true,echo "skip under the sanitizers: $(notdir $(FULL_SANITIZED)): FULL=1 runs them")
	@BIN=build/sanitize SERVE=build/sanitize/serve PYTHON="$(PYTHON)" MEMORY=unlimited dev/test/run.sh build/sanitize/test_llama3 \
	    $(SERVES:11=dev/test/python/test_serve.py) \
	    $(patsubst build/%,build/sanitize/%,$(UNIT_TESTS)) $(THREADED) $(filter-out $(NOT_SANITIZED),$(SHELL_TESTS))

# make fuzz TARGETS="json config" for some; minimized seeds go into dev/test/fuzz/corpus
fuzz:
	@JOBS=$(JOBS) OPT=$(FUZZ_OPT) dev/test/fuzz/fuzz.sh $(if $(INPUTS),inputs $(INPUTS),seconds $(SECONDS)) $(TARGETS)
fuzz-minimize:
	@dev/test/fuzz/fuzz.sh minimize $(TARGETS)
fuzz-coverage:
	@dev/test/fuzz/coverage.sh $(TARGETS)

# clang-format for C and CUDA files; lint: see dev/test/lint.sh
FORMATTED = $(sort $(wildcard *.c *.cu) $(shell find llmc dev -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cpp'))
format:
	clang-format -i $(FORMATTED)
format-check:
	clang-format --dry-run -Werror $(FORMATTED)
lint:
	@FULL=$(FULL) dev/test/lint.sh

clean:
	rm -rf build train_llama3 train_llama3cu test_llama3 test_llama3cu tokenize serve
