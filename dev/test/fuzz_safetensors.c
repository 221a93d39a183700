/* fuzz_safetensors.c -- opens the bytes as a safetensors file. If it opens, every tensor must lie in the file and give all of
 * its bytes. Its names are also parsed as those of an optimizer state, or refused. */
#include "llmc/files/checkpoint.h"

#include <sys/mman.h>

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const StateSlot slots[2] = {{"m", SAFE_F32, NULL, NULL, NULL}, {"v", SAFE_F32, NULL, NULL, NULL}};
    static int fd = -1;
    char path[64];
    if (fd < 0) { fd = memfd_create("fuzz", 0); }
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != (ssize_t)size) { die("%s: %s", path, strerror(errno)); }
    ModelConfig c;
    config_preset(&c, "d1", 16);
    ParamTable table = param_table(&c);
    SafeTensors st;
    Error e = NO_ERROR;
    const bool ok = safetensors_open(&st, path, &e);
    if (ok == (e.msg[0] != 0) || strchr(e.msg, '\n')) { abort(); }
    uint64_t covered = 0;
    for (size_t i = 0; ok && i < st.count; i++) {
        const SafeTensor* t = &st.tensors[i];
        if (safetensors_find(&st, t->name) != t || t->begin + safe_bytes(t) > size) { abort(); }
        covered += safe_bytes(t);
        void* bytes = xmalloc(safe_bytes(t));
        if (!safetensors_read_raw(&st, t, 0, t->count, bytes, &e)) { abort(); }
        free(bytes);
        if (t->dtype == SAFE_BF16 || t->dtype == SAFE_F16) {
            float* values = (float*)xmalloc(t->count * sizeof(float));
            if (!safetensors_read_f32(&st, t, 0, t->count, values, &e)) { abort(); }
            free(values);
        }
        StatePart part;
        Error refused = NO_ERROR;
        if (state_parse(&st, t, &table, slots, 2, &part, &refused) &&
            part.first + t->count > param_size(&table.items[part.param])) {
            abort();
        }
    }
    if (ok && covered > size) { abort(); }
    safetensors_close(&st);
    param_table_free(&table);
    return 0;
}
