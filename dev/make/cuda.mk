# cuda.mk -- the programs of the GPU: train_llama3cu, test_llama3cu, build/NAME_cu of dev/test/cuda and dev/bench, and build/zoo.
#
# dev/doc/installing.md has the settings. PTX_ONLY=75 builds only the PTX of that architecture, to test the code for an older GPU on
# a newer one. COMPILE_ONLY=1 checks that the kernels compile: without PTX, and with the host's code unoptimized, in half of the time.

CUDA_HOME ?= $(CUDA_PATH)
override NVCC := $(call tool,$(if $(filter undefined,$(origin NVCC)),$(shell dev/make/choose.sh nvcc $(call q,$(CUDA_HOME))),$(NVCC)))
# CUDA_CXX: the compiler of the host's code, if nvcc does not take the system's
CUDA_COMPILER = $(NVCC) $(if $(CUDA_CXX),-ccbin $(CUDA_CXX)) $(NVCCFLAGS_EXTRA)
FOUND_ARCH := $(call choose,FOUND_ARCH,archs)
GPU_ARCH ?= $(or $(FOUND_ARCH),80)
# in the order of numbers, which `sort` alone does not know: two digits, then three
ARCHS = $(or $(PTX_ONLY),$(strip $(sort $(filter-out 1%,$(GPU_ARCH))) $(sort $(filter 1%,$(GPU_ARCH)))))
OLD_ARCHS = $(filter 75,$(ARCHS))
POSSIBLE_ARCHS := 75 $(foreach tens,8 9 10 11 12 13 14 15 16 17 18 19,$(addprefix $(tens),0 1 2 3 4 5 6 7 8 9))
PRECISION ?= $(if $(OLD_ARCHS),FP16,BF16)
$(if $(filter-out $(POSSIBLE_ARCHS),$(ARCHS)),$(error $(if $(PTX_ONLY),PTX_ONLY is $(PTX_ONLY),GPU_ARCH is $(GPU_ARCH)), \
    wanted numbers such as 75, 90 or 120; no GPU before 75 (T4) will do))
$(if $(filter-out BF16 FP16 FP32,$(PRECISION)),$(error PRECISION is $(PRECISION), wanted BF16, FP16 or FP32))
$(if $(and $(filter BF16,$(PRECISION)),$(OLD_ARCHS)),$(error PRECISION=BF16 needs GPU_ARCH 80 or newer, but GPU_ARCH is \
    $(ARCHS): build with PRECISION=FP16 or FP32))

comma := ,
gencode = -gencode arch=compute_$(1)$(comma)code=$(2)_$(1)
CODE = $(foreach a,$(filter-out 90,$(ARCHS)),$(call gencode,$(a),sm)) $(if $(filter 90,$(ARCHS)),$(call gencode,90a,sm))
PTX = $(call gencode,$(lastword $(ARCHS)),compute)
GENCODE = $(if $(PTX_ONLY),$(PTX),$(CODE) $(if $(filter 1,$(COMPILE_ONLY)),,$(PTX)))
# nvcc takes a comma for the end of a flag of the host's compiler
NVCCFLAGS = -std=c++17 $(if $(filter 1,$(COMPILE_ONLY)),,-O3) --threads 0 -DPRECISION_$(PRECISION) $(GENCODE) \
            -Xcompiler $(call q,$(OPENMP_FLAGS) $(MARCH) $(subst $(comma),\$(comma),$(CPPFLAGS) $(CXXFLAGS) $(LDFLAGS))) \
            -Xptxas -warn-spills -diag-suppress 177 $(if $(filter 1,$(WERROR)),-Werror all-warnings) -I. \
            $(if $(NCCL_HOME),-I$(NCCL_HOME)/include)
CUDA_HEADERS = $(HEADERS) $(wildcard llmc/*.cuh llmc/*/*.cuh llmc/*/*/*.cuh dev/bench/*.cuh dev/cuda/*.cuh dev/test/cuda/*.cuh \
                 dev/test/cuda/*/*.cuh)
# ptxas only warns of spills and serialized wgmma, which ruin a kernel, and the host compiler of a stack frame past 64 KiB,
# which a small stack cannot hold; with WERROR=1 they fail the build
ON_REMARKS = { rm -f $@; echo "error: $@: ptxas spills registers or serializes wgmma, or a stack frame is too large"; exit 1; }
STRICT = $(if $(filter 1,$(WERROR)),> build/$(notdir $@).log 2>&1; status=$$?; cat build/$(notdir $@).log; \
           [ $$status -eq 0 ] || exit $$status; ! grep -qE 'spill|serializ|frame size' build/$(notdir $@).log || $(ON_REMARKS))
CUDA_LIBS = $(call choose,CUDA_LIBS,libraries)
COMPILE_CUDA = $(CUDA_COMPILER) $(NVCCFLAGS) $(DEFINES) $< $(filter %.o,$^) -o $@ $(CUDA_LIBS) -ldl -lpthread $(LIBS) $(STRICT)

# before the first program, and whenever compiler or flags change, a small one shows whether the toolkit will do
CUDA_SAYS = $(eval CUDA_SAYS :=)$(shell NVCC=$(call q,$(NVCC)) dev/make/choose.sh cards $(call q,$(ARCHS)) $(call q,$(CUDA_HOME)))
build/cuda_flags: FORCE | build require-nvcc
	@$(CUDA_SAYS)$(call stamp,$(CUDA_COMPILER) $(NVCCFLAGS) $(EDIT) $(shell $(NVCC) --version | cksum),\
	    NVCC=$(call q,$(CUDA_COMPILER)) dev/make/choose.sh check $(call q,$(CUDA_LIBS)) || exit 1;)

.PHONY: require-nvcc
require-nvcc:
	@$(if $(NVCC),command -v $(NVCC) >/dev/null,false) || \
	    { echo "error: $(or $(NVCC),nvcc) was not found: install the CUDA toolkit 12 or 13, or set NVCC=/path/to/nvcc"; exit 1; }

train_llama3cu: LIBS = $(EDIT) -Xcompiler -Wframe-larger-than=65536
train_llama3cu: train_llama3.cu $(CUDA_HEADERS) build/cuda_flags | require-nvcc
	$(COMPILE_CUDA)
build/test_llama3_cpu.o: test_llama3.cu train_llama3.c $(HEADERS) | build
	$(CC) $(OWN_FLAGS) $(WARNINGS) -I. $(USER_FLAGS) -DTEST_CPU_HALF -x c -c $< -o $@
test_llama3cu: test_llama3.cu train_llama3.cu build/test_llama3_cpu.o $(CUDA_HEADERS) build/cuda_flags | require-nvcc
	$(COMPILE_CUDA)
build/trainers_cu: train_llama3.cu test_llama3.cu dev/test/cuda/test_determinism.cu build/test_llama3_cpu.o
build/%_cu: %.cu $(CUDA_HEADERS) build/cuda_flags | build require-nvcc
	$(COMPILE_CUDA)

# the kernel zoo; its targets are those of dev/cuda/Makefile. A pattern rule whose prerequisite is missing is no error for make:
# the program of an earlier MINE would pass for this one's
$(if $(filter-out $(wildcard $(MINE)),$(MINE)),$(error MINE: there is no file $(MINE)))
ZOO_FLAGS = -DZOO_ARCHS='"$(ARCHS)"' $(if $(MINE),-DMINE='"$(MINE)"')
build/zoo/flags: FORCE
	@mkdir -p build/zoo && $(call stamp,$(ZOO_FLAGS) $(MINE))
build/zoo/%: DEFINES = $(ZOO_FLAGS)
build/zoo/%: dev/cuda/%.cu $(CUDA_HEADERS) $(MINE) build/cuda_flags build/zoo/flags | require-nvcc
	$(COMPILE_CUDA)
	@$@ --skips
