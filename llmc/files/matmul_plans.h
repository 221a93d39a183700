/* matmul_plans.h -- reads and writes the plan file: the algorithms of a run's matrix products. A later run that reads it
 * computes the same bits.
 *
 *   {"format": "llama3.c matmul plans", "gpu": NAME, "sms": COUNT, "cublaslt": VERSION, "workspace": BYTES, "compute": TYPE,
 *    "plans": [{"m": …, (every field of MatmulKey,) "algo": "128 hexadecimal digits"}, …]}
 *
 * "algo" is the 64 bytes of a cublasLtMatmulAlgo_t. Only the same version of cuBLASLt on the same GPU understands them, so a
 * file from another version or GPU is not used. matmul_plans_read() reports whether a file is from elsewhere or damaged. Older
 * files may lack "sms", the number of multiprocessors, and "batch", which is 1 then, or have more fields, which are ignored.
 */
#ifndef LLMC_MATMUL_PLANS_H
#define LLMC_MATMUL_PLANS_H

#include "llmc/files/json.h"
#include "llmc/files/output.h"
#include "llmc/matmul_choice.h"

#define MATMUL_PLANS_FORMAT "llama3.c matmul plans"

/* Every choice in a file depends on these. */
typedef struct {
    char gpu[256];      // name of the GPU
    int64_t sms;        // its multiprocessors: cards of one name may differ
    int64_t cublaslt;   // version of the library
    int64_t workspace;  // bytes of cuBLASLt's workspace
    int64_t compute;    // cublasComputeType_t: fp32 or TF32
} MatmulSetup;

static inline bool matmul_plans_write(const char* path, const MatmulSetup* setup, const MatmulChoice* choices, int count,
                                      Error* e) {
    FILE* f = create_output(path, e);
    if (!f) { return false; }
    fprintf(f, "{\n\"format\": \"%s\",\n\"gpu\": ", MATMUL_PLANS_FORMAT);
    json_write_string(f, setup->gpu, strlen(setup->gpu));
    fprintf(f, ",\n\"sms\": %lld,\n\"cublaslt\": %lld,\n\"workspace\": %lld,\n\"compute\": %lld,\n\"plans\": [",
            (long long)setup->sms, (long long)setup->cublaslt, (long long)setup->workspace, (long long)setup->compute);
    for (int i = 0; i < count; i++) {
        const MatmulChoice* c = &choices[i];
        fprintf(f, "%s\n{", i ? "," : "");
        for (int k = 0; k < NUM_KEY_FIELDS; k++) { fprintf(f, "\"%s\": %lld, ", matmul_key_names[k], (long long)c->key.v[k]); }
        fprintf(f, "\"algo\": \"");
        for (int k = 0; k < MATMUL_ALGO_WORDS; k++) { fprintf(f, "%016llx", (unsigned long long)c->algo[k]); }
        fprintf(f, "\"}");
    }
    fprintf(f, "\n]\n}\n");
    return close_output(f, path, e);
}

/* Reads one entry of "plans". */
static inline bool matmul_plans_choice(MatmulChoice* c, const Json* j, const JsonNode* n, Error* e) {
    memset(c, 0, sizeof *c);
    c->key.v[KEY_BATCH] = 1;
    for (int k = 0; k < NUM_KEY_FIELDS; k++) {
        const bool may_lack = k == KEY_BATCH;
        if (!(may_lack ? json_int_or : json_int)(j, n, matmul_key_names[k], 0, INT64_MAX, &c->key.v[k], e)) { return false; }
    }
    const char* algo = "";
    if (!json_text(j, n, "algo", &algo, e)) { return false; }
    const size_t digits = 16 * MATMUL_ALGO_WORDS;
    if (strlen(algo) != digits || strspn(algo, "0123456789abcdef") != digits) {
        return json_wanted(j, n, "algo", e, "%zu hexadecimal digits", digits);
    }
    for (int k = 0; k < MATMUL_ALGO_WORDS; k++) {
        char word[17] = {0};
        memcpy(word, algo + 16 * k, 16);
        c->algo[k] = strtoull(word, NULL, 16);
    }
    return true;
}

/* Checks that the file is a plan file and was made with our setup; if only the setup differs, *elsewhere becomes true. */
static inline bool matmul_plans_fit(const Json* j, const MatmulSetup* here, bool* elsewhere, Error* e) {
    const JsonNode* root = json_root(j);
    const char *format = "", *gpu = "";
    int64_t sms = here->sms, cublaslt = 0, workspace = 0, compute = 0;
    if (!json_text(j, root, "format", &format, e) || strcmp(format, MATMUL_PLANS_FORMAT) != 0) {
        e->msg[0] = 0;
        return json_wanted(j, root, "format", e, "\"%s\"", MATMUL_PLANS_FORMAT);
    }
    if (!json_text(j, root, "gpu", &gpu, e) || !json_int(j, root, "cublaslt", 0, INT64_MAX, &cublaslt, e) ||
        !json_int(j, root, "workspace", 0, INT64_MAX, &workspace, e) ||
        !json_int(j, root, "compute", 0, INT64_MAX, &compute, e) || !json_int_or(j, root, "sms", 0, INT64_MAX, &sms, e)) {
        return false;
    }
    *elsewhere = true;
    if (strcmp(gpu, here->gpu) != 0) { return json_wanted(j, root, "gpu", e, "\"%s\", the one in this machine", here->gpu); }
    if (sms != here->sms) { return json_wanted(j, root, "sms", e, "%lld, those of this GPU", (long long)here->sms); }
    if (cublaslt != here->cublaslt) {
        return json_wanted(j, root, "cublaslt", e, "%lld, the version of this program", (long long)here->cublaslt);
    }
    if (workspace != here->workspace) { return json_wanted(j, root, "workspace", e, "%lld bytes", (long long)here->workspace); }
    *elsewhere = compute != here->compute;
    return !*elsewhere ||
           json_wanted(j, root, "compute", e, "%lld (with or without TF32, as this run)", (long long)here->compute);
}

/* Reads the choices of a file made with our setup; fails if there are more than `max`. *count is 0 after a failure.
 * *elsewhere: it failed because the file was made on another card, or with another cuBLASLt or setting. */
static inline bool matmul_plans_read(const char* path, const MatmulSetup* here, MatmulChoice* choices, int max, int* count,
                                     bool* elsewhere, Error* e) {
    Json j;
    *count = 0;
    *elsewhere = false;
    if (!json_read_file(&j, path, 16 << 20, e)) { return false; }
    const JsonNode* plans = json_get(&j, json_root(&j), "plans");
    bool ok = matmul_plans_fit(&j, here, elsewhere, e);
    if (ok && (!plans || plans->type != JSON_ARRAY || json_length(plans) > (size_t)max)) {
        ok = json_wanted(&j, json_root(&j), "plans", e, "an array of at most %d", max);
    }
    int read = 0;
    for (const JsonNode* n = ok ? json_first(&j, plans) : NULL; n && ok; n = json_next(&j, n)) {
        ok = matmul_plans_choice(&choices[read++], &j, n, e);
    }
    json_free(&j);
    if (ok) { *count = read; }
    return ok;
}

#endif
