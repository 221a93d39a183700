# tests.mk -- test programs of the CPU, what runs them, sanitizers, fuzzers, lint. dev/test/run.sh runs tests and counts them.

SHELL_TESTS = $(wildcard dev/test/shell/*.sh)
UNIT_TESTS = $(patsubst dev/test/unit/%.c,build/%,$(wildcard dev/test/unit/test_*.c))
KILLS ?= 50
# FULL=1: also tests that take long or find little
FULL ?= 0
if_full = $(if $(filter 1,$(FULL)),$(1),$(2))

.PHONY: test check test-full test-programs test-kill test-crash test-no-gpu sanitize sanitize-programs fuzz fuzz-minimize fuzz-coverage lint

# --- programs ------------------------------------------------------------------------------------------------------------

# unit tests that compute for at most a second: to optimize them would take longer than they run. test_generate mostly waits
QUICK_TESTS := test_generate $(shell awk '/^build\/test_/ && !/llama3/ && $$3 < 2 { sub("build/", ""); print $$1 }' dev/test/counts.txt)
ifneq ($(FULL),1)
$(QUICK_TESTS:%=build/%): FLAGS = $(OWN_FLAGS) -O0
endif
# another FULL builds them anew
$(QUICK_TESTS:%=build/%): build/quick_flags
build/quick_flags: FORCE | build
	@$(call stamp,$(filter 1,$(FULL)))

test_llama3 build/test_llama3_plain build/test_llama3_no_amx build/sanitize/test_llama3: test_llama3.cu train_llama3.c $(HEADERS) | build/sanitize
	$(COMPILE)
# a portable build with the plain loops: no OpenMP, only the architecture's baseline vector instructions
build/test_llama3_plain: DEFINES = -DLLMC_PLAIN
build/test_llama3_plain: FLAGS = $(filter-out $(MARCH) $(OPENMP_FLAGS),$(OWN_FLAGS)) -Wno-unknown-pragmas
# tests the vector path of the matrix products on CPUs that would use the matrix unit (AMX). On others these are the programs
# without the suffix once more, so FULL=1 alone runs them there
HAS_AMX = $(shell $(CC) $(MARCH) -dM -E -x c /dev/null 2>/dev/null | grep -q 'AMX_*BF16' && echo 1 || echo 0)
NO_AMX := $(if $(filter 1,$(FULL) $(HAS_AMX)),build/test_llama3_no_amx build/test_layers_no_amx)
build/%_no_amx: DEFINES = -DLLMC_NO_AMX
build/%_no_amx: %.c $(HEADERS) | build
	$(COMPILE)
# programs of Python's tests
build/copy build/text_stub: FLAGS = $(OWN_FLAGS) -O1
$(foreach p,build build/sanitize,$(p)/ranks_trainer $(p)/test_parity): test_llama3.cu train_llama3.c

# the same under AddressSanitizer and UndefinedBehaviorSanitizer; data loader, mix and team under ThreadSanitizer
build/sanitize/%: FLAGS = -std=c11 $(if $(filter $(QUICK_TESTS),$(notdir $@)),-O0,-O1) -g1 -fsanitize=address,undefined \
           -fno-sanitize-recover=all -fno-omit-frame-pointer $(OPENMP_FLAGS)
build/sanitize/%: %.c $(HEADERS) | build/sanitize
	$(COMPILE)
build/sanitize/threads_%: FLAGS = -std=c11 -O1 -g1 -fsanitize=thread -Wno-unknown-pragmas
build/sanitize/threads_%: test_%.c $(HEADERS) | build/sanitize
	$(COMPILE)

# --- runs ----------------------------------------------------------------------------------------------------------------

CPU_PARITY = ./test_llama3 build/test_llama3_plain
test-programs: train_llama3 tokenize $(if $(filter 1,$(MICROHTTPD)),serve) $(CPU_PARITY:./%=%) $(UNIT_TESTS) $(NO_AMX) build/ranks_trainer
# whatever can be tested without a GPU: CI's stages, with more architectures, fuzzing and programs with sanitizers
test-full:
	.ci/run full
test-kill: train_llama3 tokenize
	dev/test/crash/walk.py --kills $(KILLS)
test-crash: train_llama3 tokenize
	dev/test/crash/test_crash.sh full
test-no-gpu: train_llama3cu train_llama3
	@dev/test/run.sh dev/test/gpu/test_no_gpu.sh

SERVES = $(filter 11,$(FULL)$(MICROHTTPD))
SANITIZED = $(addprefix build/sanitize/,train_llama3 tokenize test_llama3 $(call if_full,ranks_trainer) $(SERVES:11=serve) $(notdir $(SANITIZED_UNITS)))
THREADED = $(addprefix build/sanitize/threads_,dataloader mix team)
# what others run under the sanitizers, too: the fuzzers learn vocabularies, and unit tests mix sources
FULL_SANITIZED = build/test_bpe $(addprefix dev/test/shell/test_,cli.sh scripts.sh launch.sh contact.sh resume.sh mix.sh)
NOT_SANITIZED = %test_several_ranks.sh %test_docs.sh %test_build.sh $(call if_full,,$(FULL_SANITIZED))
SANITIZED_UNITS = $(filter-out $(NOT_SANITIZED),$(UNIT_TESTS))
sanitize-programs: $(SANITIZED) $(THREADED)
sanitize: sanitize-programs
	@$(call if_full,true,echo "skip under the sanitizers: $(notdir $(FULL_SANITIZED)): FULL=1 runs them")
	@BIN=build/sanitize SERVE=build/sanitize/serve PYTHON="$(PYTHON)" MEMORY=unlimited dev/test/run.sh build/sanitize/test_llama3 \
	    $(SERVES:11=dev/test/python/test_serve.py) \
	    $(SANITIZED_UNITS:build/%=build/sanitize/%) $(THREADED) $(filter-out $(NOT_SANITIZED),$(SHELL_TESTS))

# make fuzz TARGETS="json config" for some; minimized seeds go into dev/test/fuzz/seeds.tar
SECONDS ?= 20
JOBS ?= 1
# building takes longer than a few seconds of fuzzing
FUZZ_OPT = $(if $(filter 0 1 2 3 4 5,$(SECONDS)),-O0,-O1)
fuzz:
	@JOBS=$(JOBS) OPT=$(FUZZ_OPT) dev/test/fuzz/fuzz.sh $(if $(INPUTS),inputs $(INPUTS),seconds $(SECONDS)) $(TARGETS)
fuzz-minimize fuzz-coverage:
	@dev/test/fuzz/fuzz.sh $(@:fuzz-%=%) $(TARGETS)
lint:
	@FULL=$(FULL) dev/test/lint.sh
