/* fuzz_trainer_state.c -- reads the bytes as a trainer_state.json twice: with and without a check of its checksum, since few
 * inputs pass that check. An accepted state must be in range, and must survive writing and reading. */
#include "fuzz.h"
#include "llmc/files/trainer_state.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    TrainerState s, back;
    Error e = NO_ERROR;
    // checks the checksum
    fuzz_check_error(trainer_state_from_text(&s, fuzz_text(data, size), size, "fuzz", &e), &e);
    trainer_state_free(&s);
    // does not
    memset(&e, 0, sizeof e);
    memset(&s, 0, sizeof s);
    bool ok = json_parse(&s.json, fuzz_text(data, size), size, "fuzz", &e);
    ok = ok && trainer_state_parse(&s, &e);
    fuzz_check_error(ok, &e);
    if (ok) {
        REQUIRE(s.world_size >= 1 && s.loss.count <= OUTLIER_WINDOW && s.loss.next < OUTLIER_WINDOW);
        for (size_t i = 0; i < s.files.count; i++) { REQUIRE(checkpoint_good_name(s.files.items[i].name)); }
        const char* path = fuzz_file(data, 0);
        must(trainer_state_write(&s, &s.files, path, &e) && trainer_state_read(&back, path, &e), &e);
        REQUIRE(s.step == back.step && s.data_row == back.data_row && s.files.count == back.files.count);
        REQUIRE(memcmp(&s.loss, &back.loss, sizeof s.loss) == 0 && memcmp(&s.grad_norm, &back.grad_norm, sizeof s.loss) == 0);
        REQUIRE(memcmp(&s.loss_scale, &back.loss_scale, sizeof s.loss_scale) == 0);
        REQUIRE(strcmp(s.run, back.run) == 0 && strcmp(s.parent_run, back.parent_run) == 0 && strcmp(s.build, back.build) == 0);
        REQUIRE(s.parent_step == back.parent_step && s.not_finite == back.not_finite && s.base == back.base);
        trainer_state_free(&back);
    }
    trainer_state_free(&s);
    return 0;
}
