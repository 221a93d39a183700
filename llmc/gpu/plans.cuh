/* plans.cuh -- the plans of the matrix products in files: a checkpoint carries the algorithm of each product, so that a resumed
 * run computes the same bits. files/matmul_plans.h describes the file.
 *
 * A run reads the file of --plan, or the file of the checkpoint that it resumes. Products that the file does not name get the
 * heuristic's first choice.
 */
#ifndef LLMC_PLANS_CUH
#define LLMC_PLANS_CUH

#include "llmc/files/matmul_plans.h"  // defines: MatmulSetup, matmul_plans_write, matmul_plans_read
#include "llmc/cuda/cuda_common.cuh"  // defines: device_name, device_attribute
#include "llmc/matmul.cuh"            // defines: MatmulContext, MatmulPlan, matmul_use_saved
#include "llmc/dist/agree.h"          // defines: agree_first

/* Returns what choices depend on: GPU, its multiprocessors, cuBLASLt, workspace and compute type. */
static inline MatmulSetup matmul_setup(const MatmulContext* c) {
    MatmulSetup s;
    device_name(s.gpu);
    s.sms = device_attribute(cudaDevAttrMultiProcessorCount);
    s.cublaslt = (int64_t)cublasLtGetVersion();
    s.workspace = (int64_t)c->workspace_bytes;
    s.compute = (int64_t)c->compute;
    return s;
}

/* Lists the choices of all plans; the caller frees the list. */
static inline MatmulChoice* matmul_choices(const MatmulContext* c) {
    MatmulChoice* choices = (MatmulChoice*)xcalloc(MATMUL_MAX_PLANS, sizeof *choices);
    for (int i = 0; i < c->num_plans; i++) {
        const MatmulPlan* p = &c->plans[i];
        choices[i].key = p->key;
        memcpy(choices[i].algo, &p->algo, sizeof p->algo);
    }
    return choices;
}

/* Gives each plan made so far its algorithm, if one of the `count` choices is for it. */
static inline void matmul_adopt(MatmulContext* c, MatmulChoice* choices, int count) {
    MatmulContext other = *c;
    other.saved = choices;
    other.num_saved = count;
    for (int i = 0; i < c->num_plans; i++) {
        const MatmulPlan before = c->plans[i];
        if (!matmul_use_saved(&other, &c->plans[i])) { c->plans[i] = before; }
    }
}

/* Writes the choices of all plans. */
static inline bool matmul_save_plans(const MatmulContext* c, const char* path, Error* e) {
    const MatmulSetup setup = matmul_setup(c);
    MatmulChoice* choices = matmul_choices(c);
    const bool ok = matmul_plans_write(path, &setup, choices, c->num_plans, e);
    free(choices);
    return ok;
}

/* Reads choices for the plans that will be made from now on. A file from another GPU, cuBLASLt or setting is an error, and
 * *elsewhere becomes true. The caller may turn it into a warning: then the heuristic chooses. */
static inline bool matmul_load_plans(MatmulContext* c, const char* path, bool* elsewhere, Error* e) {
    const MatmulSetup setup = matmul_setup(c);
    return matmul_plans_read(path, &setup, c->saved, MATMUL_MAX_PLANS, &c->num_saved, elsewhere, e);
}

#define PLAN_NAME "matmul_plan.json"

/* Reads the plan file `path`. A file of another card or cuBLASLt is not used, with one warning; any other error in a file that
 * was `asked` for by name ends the program. */
static inline void device_load_plans(MatmulContext* matmul, const char* path, bool asked, bool warns) {
    bool elsewhere = false;
    Error e = NO_ERROR;
    if (matmul_load_plans(matmul, path, &elsewhere, &e)) { return; }
    if (asked && !elsewhere) { must(false, &e); }
    if (warns) { warn("%s: cuBLASLt chooses again, so the bits may differ", e.msg); }
}

/* Warns, once the products of a training step have been made, if the plan file lacks some: the file is for other shapes. */
static inline void device_check_plans(const MatmulContext* matmul, const char* path) {
    if (matmul->num_unsaved == 0) { return; }
    warn(
        "%s: has no choice that runs here for %d of the %d matrix products of a step: cuBLASLt chooses for them, so the bits "
        "may differ",
        path, matmul->num_unsaved, matmul->num_plans);
}

/* Lets all ranks use rank 0's algorithms for the products made so far: their own heuristics may have chosen otherwise. They
 * have the same card and cuBLASLt (device_build). */
static inline void device_share_plans(MatmulContext* matmul, Team* team) {
    if (!team) { return; }
    int count = matmul->num_plans;
    MatmulChoice* choices = matmul_choices(matmul);
    agree_first(team, &count, sizeof count);
    if (count < 0 || count > MATMUL_MAX_PLANS) { die("rank 0 gives %d choices, wanted 0 to %d", count, MATMUL_MAX_PLANS); }
    agree_first(team, choices, (size_t)count * sizeof *choices);
    if (team->run.rank > 0) { matmul_adopt(matmul, choices, count); }
    free(choices);
}

#endif
