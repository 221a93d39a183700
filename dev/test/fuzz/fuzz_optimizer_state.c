/* fuzz_optimizer_state.c -- reads the bytes as the state file of one rank, or as the files of two: the first two bytes say
 * where the second begins (0: one rank). The third says which part of the arena this run owns. An accepted state must give
 * each element of m and v in that part once, and no other. */
#include "fuzz.h"
#include "llmc/files/optimizer_state.h"

enum { MOST = 2048 };
typedef struct {
    uint8_t times[MOST];  // how often each element of the arena was given
} Seen;

static bool take(void* ctx, const Param* p, size_t first, size_t n, const float* src, Error* e) {
    (void)e;
    fuzz_taken(p, first, n, src);
    for (size_t i = 0; i < n; i++) { ((Seen*)ctx)->times[p->offset + first + i]++; }
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static ModelConfig c;
    static ParamTable t;
    static char path[2][PATH_CAP];
    if (!t.count) {
        char name[64];
        fuzz_tiny_model(&c);
        t = param_table(&c);
        REQUIRE(t.elements <= MOST);
        for (int rank = 0; rank < 2; rank++) {
            state_file_name(name, rank);
            fuzz_path(path[rank], name);
        }
    }
    if (size < 3) { return 0; }
    const size_t rest = size - 3, cut = size_min(data[0] | (size_t)data[1] << 8, rest), lo = t.elements * data[2] / 256;
    const int ranks = cut ? 2 : 1;
    if (ranks == 2) { fuzz_write(path[1], data + 3 + cut, rest - cut); }
    fuzz_write(path[0], data + 3, ranks == 2 ? cut : rest);
    Seen m, v;
    memset(&m, 0, sizeof m);
    memset(&v, 0, sizeof v);
    ArenaRange range = {lo, t.elements - lo};
    const ArenaRanges own = {&range, 1};
    const StateSlot slots[2] = {{"m", SAFE_F32, NULL, take, &m, NULL}, {"v", SAFE_F32, NULL, take, &v, NULL}};
    Error e = NO_ERROR;
    const bool ok = state_load(fuzz_folder(), ranks, &t, &own, slots, 2, &e);
    fuzz_check_error(ok, &e);
    for (int k = 0; ok && k < t.count; k++) {
        const Param* p = &t.items[k];
        for (size_t i = p->offset; i < p->offset + param_size(p); i++) {
            REQUIRE(m.times[i] == (i >= lo) && v.times[i] == (i >= lo));
        }
    }
    return 0;
}
