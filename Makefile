# llama3.c -- `make help` lists the targets. Detected settings can be overridden: make CC=clang MARCH= OPENMP=0 ...
#
# This file builds the programs of the CPU, the page beside a run, and the first run. dev/make has the rest: cuda.mk the programs
# of the GPU, emulated.mk the same for a card that the CPU emulates, tests.mk the tests.

.DELETE_ON_ERROR:
PYTHON ?= python3
WERROR ?= 0
# $(call q,TEXT): one word of the shell. $(call tool,COMMAND): a path with spaces becomes one word
q = '$(subst ','\'',$(1))'
tool = $(if $(and $(word 2,$(1)),$(wildcard $(subst $() $(),\ ,$(1)))),$(call q,$(1)),$(1))
override CC := $(call tool,$(CC))
# dev/make/choose.sh asks this machine, once, when an answer is first needed: $(eval) keeps it
choose = $(eval $(1) := $(shell CC=$(call q,$(CC) $(USER_FLAGS) $(LDFLAGS)) NVCC=$(call q,$(CUDA_COMPILER)) dev/make/choose.sh $(2)))$($(1))
MARCH ?= $(call choose,MARCH,march)
OPT ?= $(call choose,OPT,opt)
OPENMP_FLAGS = $(call choose,OPENMP_FLAGS,openmp $(OPENMP))
# libedit edits the lines of --chat; LIBEDIT=0 builds without it. libmicrohttpd is for ./serve
LIBEDIT ?= $(call choose,LIBEDIT,library histedit.h -ledit el_init libedit "--chat will not edit lines")
MICROHTTPD ?= $(call choose,MICROHTTPD,library microhttpd.h -lmicrohttpd MHD_get_version)

WARNINGS = -Wall -Wextra $(if $(filter 1,$(WERROR)),-Werror)
OWN_FLAGS = -std=c11 -ffp-contract=fast -fno-math-errno $(OPT) $(MARCH) $(OPENMP_FLAGS)
EDIT = $(if $(filter 1,$(LIBEDIT)),-DLLMC_LIBEDIT -ledit)
HEADERS = $(wildcard llmc/*.h llmc/*/*.h llmc/*/*/*.h llmc/*/*.def llmc/*/*/*.def dev/data/*.h dev/test/*.h) build/cpu_flags
TALES = dev/data/tinytales
# where the programs under build/ are written
vpath %.c dev/data dev/test/unit dev/test/shell dev/test/python dev/bench
vpath %.cu dev/test/cuda dev/bench

# makes a program of the first prerequisite; a rule may add DEFINES and LIBS, or have FLAGS of its own. The user's CPPFLAGS, CFLAGS,
# LDFLAGS and LDLIBS come last, and replace nothing
FLAGS = $(OWN_FLAGS)
DEFINES =
LIBS =
USER_FLAGS = $(CPPFLAGS) $(CFLAGS) $(CFLAGS_EXTRA)
COMPILE = $(CC) $(FLAGS) $(WARNINGS) $(DEFINES) -I. $(USER_FLAGS) $(if $(filter %.cu,$<),-x c) $< -o $@ $(LDFLAGS) \
          -lm -lpthread $(LIBS) $(LDLIBS)
# a stamp is a file with the flags of the last build; if they change, so does the file. This one also has the compiler's macros: its
# version, and what -march=native stands for on this machine
stamp = [ "$$(cat $@ 2>/dev/null || echo none)" = $(call q,$(1)) ] || { $(2) printf '%s\n' $(call q,$(1)) > $@; }
build/cpu_flags: FORCE | build
	@$(call stamp,$(CC) $(CXX) $(OWN_FLAGS) $(EDIT) $(USER_FLAGS) $(LDFLAGS) $(LDLIBS) $(shell $(CC) $(OWN_FLAGS) -dM -E -x c /dev/null | cksum))

.PHONY: all help quickstart install train run chat generate require-microhttpd format format-check clean FORCE
all: train_llama3 tokenize

help: # the tables of the manual
	@awk -F ' *[|] *' '/^[|] `make/ { gsub(/\]\([^)]*\)|\[|`/, ""); printf "%-42s %s\n", $$2, $$3 }' dev/doc/installing.md

# --- programs ----------------------------------------------------------------------------------------------------------

# no function of a program may take more than 64 KiB of stack: threads may have 128 KiB (musl), and theirs call little else
train_llama3 tokenize build/tinytales: WARNINGS += -Wframe-larger-than=65536
train_llama3 build/sanitize/train_llama3: LIBS = $(EDIT)
train_llama3: train_llama3.c $(HEADERS)
	@echo "compiling $<: about half a minute"
	$(COMPILE)
tokenize: dev/data/tokenize.c $(HEADERS)
	$(COMPILE)
build/%: %.c $(HEADERS) | build
	$(COMPILE)

# the page beside a run, whole or not at all
build/serve_page.h: dev/serve/page.html dev/make/choose.sh | build
	@dev/make/choose.sh page $< > $@.tmp && mv $@.tmp $@
require-microhttpd:
	@$(if $(filter 1,$(MICROHTTPD)),true,dev/make/choose.sh missing libmicrohttpd)
serve build/sanitize/serve: LIBS = -lmicrohttpd
serve build/sanitize/serve: dev/serve/serve.c $(wildcard dev/serve/*.h) build/serve_page.h $(HEADERS) | build/sanitize require-microhttpd
	$(COMPILE)

include dev/make/cuda.mk dev/make/emulated.mk dev/make/tests.mk
build build/sanitize $(EMULATED):
	@mkdir -p $@

train run chat generate:
	@echo "error: make $@: there is no such target; make quickstart trains a small model, make help lists the others" >&2; exit 2

# --- the embedded data set and the first run ---------------------------------------------------------------------------

# a story ends in the token that ends an answer: LoRA can teach a model to chat, but not a token that it has never seen
$(TALES)/tinytales_train.bin: build/tinytales tokenize $(TALES)/tokenizer.json
	./build/tinytales --end "<|eot_id|>" -o $(TALES)/tinytales.jsonl
	./tokenize --tokenizer $(TALES)/tokenizer.json --specials --val-fraction 0.02 -o $(TALES)/tinytales.bin $(TALES)/tinytales.jsonl

# trains on the GPU if there are a GPU and nvcc, else on the CPU; each run has its own output folder
QUICKSTART_TRAINER = $(if $(and $(NVCC),$(FOUND_ARCH)),train_llama3cu,train_llama3)
QUICKSTART_OUT ?= out/quickstart-$(shell date +%Y%m%d-%H%M%S)
QUICKSTART_FLAGS = --model d3 --final-lr-frac 0.05 --val-every 200 --sample-every 400 --sample-tokens 250 \
                   $(if $(STEPS),--steps $(STEPS),--minutes 3) --out $(QUICKSTART_OUT)
quickstart: $(QUICKSTART_TRAINER) $(TALES)/tinytales_train.bin
	@$(if $(and $(NVCC),$(FOUND_ARCH)),,$(shell NVCC=$(call q,$(NVCC)) dev/make/choose.sh cards ""))
	./$(QUICKSTART_TRAINER) $(QUICKSTART_FLAGS)
	@echo "page    make serve && ./serve $(QUICKSTART_OUT)"

# whatever this machine can test; dev/make/tests.mk has the lists
test check: test-programs
	@$(if $(NO_AMX),true,echo "skip test_llama3_no_amx, test_layers_no_amx: here they equal test_llama3, test_layers; FULL=1 runs them")
	@CC="$(CC)" PYTHON="$(PYTHON)" dev/test/run.sh $(CPU_PARITY) $(UNIT_TESTS) $(NO_AMX) $(SHELL_TESTS) \
	    $(addprefix dev/test/faults/test_,faults.sh file_faults.sh) dev/test/crash/test_crash.sh dev/test/gpu/test_gpu.sh \
	    $(wildcard dev/test/python/test_*.py)

# what is built of the programs, the manual page made of the table of flags, and completion for bash; for all users of the machine
prefix ?= /usr/local
PREFIX ?= $(prefix)
SHARE = $(call q,$(DESTDIR)$(PREFIX)/share)
OF_FLAGS = $(CC) -E -P '-DOPTION(kind,field,other,default,min,max,trainer,life,group,value,help)=kind~field~other~default~group~value~help' \
           -x c llmc/run/cli/options.def | awk -f dev/make/manual.awk
install: all $(if $(filter 1,$(MICROHTTPD)),serve)
	@umask 022; mkdir -p $(call q,$(DESTDIR)$(PREFIX)/bin) $(SHARE)/man/man1 $(SHARE)/bash-completion/completions && \
	    install -m 755 train_llama3 tokenize $(wildcard serve train_llama3cu) $(call q,$(DESTDIR)$(PREFIX)/bin) && \
	    $(OF_FLAGS) > $(SHARE)/man/man1/train_llama3.1 && \
	    $(OF_FLAGS) -v completion=1 > $(SHARE)/bash-completion/completions/train_llama3

FORMATTED = $(sort $(wildcard *.c *.cu) $(shell find llmc dev -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cpp'))
format:
	clang-format -i $(FORMATTED)
format-check:
	clang-format --dry-run -Werror $(FORMATTED)
clean:
	rm -rf build train_llama3 train_llama3cu test_llama3 test_llama3cu tokenize serve
