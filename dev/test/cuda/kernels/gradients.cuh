/* gradients.cuh -- tests where the gradients of tensors lie. */
#ifndef TEST_KERNELS_GRADIENTS_CUH
#define TEST_KERNELS_GRADIENTS_CUH

#include "llmc/gpu/gradients.cuh"
#include "kernel_test.cuh"

/* Gradients of norms lie in fp32 one after the other, also if some blocks have a third norm; here the final norm's kind stands
 * for it. Gradients of matrices lie at the same offsets as the weights. */
static void gradients_of_a_third_norm_have_a_place() {
    ModelConfig c;
    config_preset(&c, "d3", 300);
    Gradients g = {};
    g.config = c;
    g.trained = param_table_open(&c, 1);
    param_table_add(&g.trained, &c, P_EMBEDDING, -1);
    for (int l = 0; l < c.num_layers; l++) {
        param_table_add_block(&g.trained, &c, PLACE_BLOCK, l);
        if (l != 1) { param_table_add(&g.trained, &c, P_FINAL_NORM, l); }
    }
    param_table_add(&g.trained, &c, P_FINAL_NORM, -1);
    param_table_add(&g.trained, &c, P_LM_HEAD, -1);
    param_table_close(&g.trained);
    Arena a = {};
    gradients_lay_out(&g, &a, NULL);
    std::vector<char> room(a.used);
    a = {room.data(), 0};
    gradients_lay_out(&g, &a, NULL);
    size_t norms = 0;
    for (int i = 0; i < g.trained.count; i++) {
        const Param* p = &g.trained.items[i];
        const Gradient found = gradient_of(&g, p->kind, p->layer);
        if (param_specs[p->kind].matrix) {
            CHECK(found.data == (char*)g.all + p->offset * sizeof(floatX) && !found.fp32, "%s", p->name);
        } else {
            CHECK(found.data == g.extra + norms && found.fp32, "%s of block %d", p->name, p->layer);
            norms += 256;  // 192, padded
        }
    }
    CHECK(norms == 9 * 256 && g.extra_size == norms, "%zu elements of norms, room for %zu", norms, g.extra_size);
    CHECK(!gradient_of(&g, P_FINAL_NORM, 1).data, "block 1 has a third norm");
    param_table_free(&g.trained);
}

#endif
