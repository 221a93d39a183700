/* fuzz_trainer_state.c -- reads the bytes as a trainer_state.json, once with its own checksum and once without (else nothing
 * would get past it). What is accepted must be in range, and must not change when it is written and read back. */
#include "llmc/files/trainer_state.h"

#include <sys/mman.h>

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

static char* copy_text(const uint8_t* data, size_t size) {
    char* text = (char*)xmalloc(size + 1);
    memcpy(text, data, size);
    text[size] = 0;
    return text;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static int fd = -1;
    char path[64];
    if (fd < 0) { fd = memfd_create("fuzz", 0); }
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    TrainerState s, back;
    Error e = NO_ERROR;
    // with its checksum
    if (trainer_state_from_text(&s, copy_text(data, size), size, "fuzz", &e) == (e.msg[0] != 0)) { abort(); }
    trainer_state_free(&s);
    // without
    memset(&e, 0, sizeof e);
    memset(&s, 0, sizeof s);
    bool ok = json_parse(&s.json, copy_text(data, size), size, "fuzz", &e);
    ok = ok && trainer_state_parse(&s, &e);
    if (ok == (e.msg[0] != 0) || strchr(e.msg, '\n')) { abort(); }
    if (ok) {
        if (s.world_size < 1 || s.loss.count > OUTLIER_WINDOW || s.loss.next >= OUTLIER_WINDOW) { abort(); }
        for (size_t i = 0; i < s.files.count; i++) {
            if (!checkpoint_good_name(s.files.items[i].name)) { abort(); }
        }
        if (!trainer_state_write(&s, &s.files, path, &e) || !trainer_state_read(&back, path, &e)) { die("%s", e.msg); }
        if (strcmp(s.run, back.run) != 0 || strcmp(s.build, back.build) != 0 || s.not_finite != back.not_finite ||
            s.parent_step != back.parent_step) {
            abort();
        }
        if (s.step != back.step || s.data_row != back.data_row || s.files.count != back.files.count ||
            memcmp(&s.loss, &back.loss, sizeof s.loss) != 0 || memcmp(&s.grad_norm, &back.grad_norm, sizeof s.loss) != 0 ||
            memcmp(&s.loss_scale, &back.loss_scale, sizeof s.loss_scale) != 0) {
            abort();
        }
        trainer_state_free(&back);
    }
    trainer_state_free(&s);
    return 0;
}
