# emulated.mk -- the GPU's programs for a card that the CPU emulates, for tests.
#
# EMULATED_ARCH (75, 80 or 90) and PRECISION say for which card, see dev/test/emulator/device.h. make emulated puts them into
# build/emulated/PRECISION_ARCH; it needs g++, x86-64 or 64-bit ARM, the CUDA toolkit's headers (choose.sh finds them, or set
# CUDA_INCLUDE="-isystem FOLDER") and nccl.h, which the zoo does without.

EMULATOR = dev/test/emulator
.PHONY: require-headers
require-headers:
	@$(if $(EMULATED_HEADERS),true,echo "error: no headers of the CUDA toolkit were found: install it, or these alone, 450 MB, without nvcc:"; \
	    echo "  python3 -m venv build/cuda && build/cuda/bin/pip install --no-deps nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl nvidia-nvtx nvidia-cublas"; exit 1)
EMULATED_HEADERS = $(or $(CUDA_INCLUDE),$(call choose,CUDA_INCLUDE,headers $(call q,$(CUDA_HOME))))
EMULATED_ARCH ?= 90
# HOST_PIECE: state on the host passes in many pieces, though the models are small
# -O2 takes longer than it saves, except in trainers_cu, which runs most, and in the card's own code
EMULATED_OPT ?= -O1
# SANITIZE=1: programs say which fault a kernel has, and where (shadow.cpp)
EMULATED = build/emulated/$(PRECISION)_$(EMULATED_ARCH)$(if $(filter 1,$(SANITIZE)),_sanitized)
SANITIZED_FLAGS = $(if $(filter 1,$(SANITIZE)),-DEMULATED_SANITIZE $(if $(filter %.o,$@),,-g1 -fsanitize=thread -fsanitize=bounds,object-size -fno-tree-sra -fdata-sections -ftrivial-auto-var-init=pattern))
EMULATED_SOURCES = $(filter-out build/%,$(CUDA_HEADERS)) train_llama3.c train_llama3.cu test_llama3.cu $(wildcard dev/test/cuda/*.cu)
EMULATED_INCLUDES = -I$(EMULATOR) $(if $(NCCL_HOME),-I$(NCCL_HOME)/include) $(EMULATED_HEADERS)
EMULATED_FLAGS = -std=c++17 $(if $(filter %/trainers_cu %.o,$@),-O2,$(EMULATED_OPT)) $(MARCH) $(OPENMP_FLAGS) -fno-strict-aliasing -ffp-contract=fast \
                 -fno-math-errno -Wno-psabi -fno-pie -DEMULATED_ARCH=$(EMULATED_ARCH)0 -DPRECISION_$(PRECISION) -DHOST_PIECE=4096 $(SANITIZED_FLAGS) $(EMULATED_INCLUDES)
EMULATED_CARD = $(addprefix $(EMULATED)/,block.o runtime.o cublaslt.o $(if $(filter 1,$(SANITIZE)),shadow.o))
EMULATED_PROGRAMS = train_llama3cu test_llama3cu test_determinism_cu test_kernels_cu test_attention_cu

.PHONY: emulated
emulated: $(EMULATED_CARD) $(addprefix $(EMULATED)/,$(EMULATED_PROGRAMS)) build/emulated/libnccl.so.2

# launches and PTX are rewritten in copies of the sources
REWRITE = sed -z -E -f $(EMULATOR)/launches.sed -e '1s|^|\#line 1 "'"$$f"'"\n|'
build/emulated/sources: $(EMULATED_SOURCES) $(EMULATOR)/launches.sed $(EMULATOR)/ptx.h | $(EMULATED) require-headers
	@for f in $(EMULATED_SOURCES); do mkdir -p $@.tmp/$$(dirname $$f) && $(REWRITE) $$f > $@.tmp/$$f || exit 1; done
	@f=$(EMULATOR)/ptx.h && $(REWRITE) $$f > $@.tmp/llmc/cuda/ptx.cuh && rm -rf $@ && mv $@.tmp $@

$(EMULATED)/%.o: $(EMULATOR)/%.cpp $(wildcard $(EMULATOR)/*.h) llmc/cuda/occupancy.cuh build/cpu_flags | $(EMULATED) require-headers
	$(CXX) $(EMULATED_FLAGS) -I. -Wall -Wextra -c $< -o $@
build/emulated/libnccl.so.2: $(EMULATOR)/nccl.cpp $(EMULATOR)/runtime.h | $(EMULATED) require-headers
	$(CXX) -std=c++17 -O2 -Wall -Wextra -fPIC -shared $(EMULATED_INCLUDES) $< -o $@
# device.h and the toolkit's headers are compiled once for the programs of a variant; g++ fails if another -O reads them
$(EMULATED)/device.h.gch: $(EMULATOR)/device.h $(EMULATOR)/runtime.h build/cpu_flags | $(EMULATED) require-headers
	$(CXX) $(EMULATED_FLAGS) -x c++-header $< -o $@
DEVICE = $(if $(filter %/trainers_cu,$@),device.h,$(EMULATED)/device.h)
# shadow.o stands for the library of -fsanitize=thread
LINKED = -x none $(filter %.o,$^) -no-pie -rdynamic -o $@ -ldl -lpthread
LINK_EMULATED = $(if $(filter 1,$(SANITIZE)),-c -o $@.main.o && $(CXX) $(OPENMP_FLAGS) -Wl$(comma)--sort-section=alignment $@.main.o )$(LINKED)
$(EMULATED)/%_cu: build/emulated/sources $(EMULATED_CARD) $(EMULATED)/device.h.gch
	$(CXX) $(EMULATED_FLAGS) -I$< -x c++ -include $(DEVICE) $</dev/test/cuda/$*.cu $(LINK_EMULATED)
# one program, which each of its names runs
$(EMULATED)/trainers_cu: build/test_llama3_cpu.o
$(addprefix $(EMULATED)/,train_llama3cu test_llama3cu test_determinism_cu): $(EMULATED)/trainers_cu
	ln -f $< $@

# files of the kernel zoo. Of the errors of templates, the lines of the reader's file come first
FIRST_ERRORS = '/^[^ ].*: / { more = 0 } / required from/ && !index(via, own) { via = $$0 "\n" } \
    /: (fatal )?error: |undefined reference/ { at = index($$0, own ":") ? 0 : index(via, own ":") ? 1 : 2; \
        text[at] = text[at] (at == 1 ? substr(via, 1, 160) : "") substr($$0, 1, 240) "\n"; count++; via = ""; more = 2 } \
    /^ +[0-9]* \|/ && more-- > 0 { text[at] = text[at] substr($$0, 1, 160) "\n" } \
    END { lines = split(text[0] text[1] text[2], line, "\n"); for (i = 1; i < lines && i <= 20; i++) { print line[i] }; \
        print count + 0 " error" (count == 1 ? "" : "s") (lines > 21 ? ", the first of them above" : "") }'
build/emulated/zoo/%: dev/cuda/% $(EMULATOR)/launches.sed $(MINE) build/zoo/flags
	@mkdir -p $(@D) && f=$< && $(REWRITE) $< > $@
	@$(if $(MINE),f=$(MINE) && $(REWRITE) $(MINE) > $(@D)/mine.cuh)
$(EMULATED)/zoo/%: build/emulated/zoo/%.cu build/emulated/sources $(EMULATED_CARD) $(EMULATED)/device.h.gch
	@mkdir -p $(@D) && echo "compiling $@"
	{ $(CXX) $(EMULATED_FLAGS) $(ZOO_FLAGS) -Ibuild/emulated/sources -Ibuild/emulated/zoo -x c++ -include $(DEVICE) $< $(LINK_EMULATED); } 2>$@.log || \
	    { awk -v own=$(or $(MINE),dev/cuda/$*.cu) $(FIRST_ERRORS) $@.log; echo "the compiler's whole log: $@.log"; exit 1; }

.PHONY: emulated-sanitize
emulated-sanitize:
	+@$(MAKE) -s --no-print-directory -C dev/cuda $@

# several variants, each by a make of its own
VARIANTS_BUILT = $(addprefix emulated-,FP32_90 BF16_90 BF16_80 FP16_75)
.PHONY: $(VARIANTS_BUILT) test-emulated test-cards
# what they share is made before them, or they would make it at the same time
$(VARIANTS_BUILT): build/emulated/libnccl.so.2 build/emulated/sources build/test_llama3_cpu.o
$(VARIANTS_BUILT): emulated-%:
	@$(MAKE) -s emulated PRECISION=$(firstword $(subst _, ,$*)) EMULATED_ARCH=$(lastword $(subst _, ,$*)) $(OF_VARIANT)
emulated-FP32_90: OF_VARIANT = $(call if_full,,EMULATED_PROGRAMS="$(filter-out test_kernels_cu test_attention_cu,$(EMULATED_PROGRAMS))")
emulated-BF16_80: OF_VARIANT = EMULATED_PROGRAMS=test_attention_cu
emulated-FP16_75: OF_VARIANT = EMULATED_PROGRAMS="test_kernels_cu test_attention_cu"
# test-cards is test-no-gpu, test-emulated and the faults that the card's sanitizer names, in one queue
test-cards: train_llama3cu
test-emulated test-cards: train_llama3 build/ranks_trainer build/copy $(VARIANTS_BUILT)
	@FULL=$(FULL) dev/test/run.sh $(if $(filter %cards,$@),dev/test/gpu/test_no_gpu.sh dev/test/faults/test_zoo_faults.sh:sanitizer) \
	    $(addprefix dev/test/emulator/test_emulated_layers.sh:,kernels passes) \
	    $(addprefix dev/test/emulator/test_emulated_runs.sh:,one two shared)
